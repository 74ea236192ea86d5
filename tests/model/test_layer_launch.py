"""Decoder layers in one launch: the bits of their kernels one by one, and only where it stands for them."""

import weakref
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from samebits import LLM, SamplingParams
from samebits.kernels import cpu
from samebits.kernels.cpu import layer
from samebits.model.rollout import FusedLayer, prepare_rollout
from samebits.model.stage import stage_model
from samebits.trainer import exact_model, token_logprobs

from helpers.adapters import adapted_model
from helpers.models import make_checkpoint

PROMPTS = [[5, 7, 11 + i] for i in range(3)]
PARAMS = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
LAYERS = 3


def generate(llm: LLM, prompts=PROMPTS) -> list:
    return [(c.token_ids, c.logprobs) for out in llm.generate(prompts, PARAMS, use_tqdm=False) for c in out.completions]


def layers_of(llm: LLM):
    return llm.engine.executor.workers[0].model.base_model.layers


@pytest.fixture
def launches(monkeypatch):
    """The layers and rows of each launch, as they come."""
    found = []

    class Counted(cpu.DecoderLayers):
        def __init__(self, layers):
            self.count = len(layers)
            super().__init__(layers)

        def __call__(self, x, *rest):
            found.append((self.count, len(x)))
            return super().__call__(x, *rest)

    monkeypatch.setattr(cpu, "decoder_layers", Counted)
    return found


def without_launches(monkeypatch):
    monkeypatch.setattr(FusedLayer, "_launch", lambda layer, total: None)


def in_single_kernels(llm: LLM, launches: list, monkeypatch, prompts=PROMPTS) -> list:
    """What the engine generates without a launch of layers."""
    llm.reset_prefix_cache()
    launches.clear()
    with monkeypatch.context() as patch:
        without_launches(patch)
        found = generate(llm, prompts)
    assert not launches
    return found


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "llama3-bias", "qwen2", "qwen3", "mistral"])
def test_layers_in_one_launch_have_the_bits_of_their_kernels(checkpoint, family, dtype, adapted, launches, monkeypatch):
    path = checkpoint(family, num_hidden_layers=LAYERS)
    adapter = adapted_model(path, dtype) if adapted else None
    llm = LLM(path, dtype=dtype, adapter=adapter, kv_cache_memory_bytes=2**24)
    for number, tokens in ((3, 3), (17, 3), (70, 3)):  # rows by one thread, shared, and low-rank updates shared, too
        prompts = [[5, 7, *[11 + i] * (tokens - 2)] for i in range(number)]
        launches.clear()
        found = generate(llm, prompts)
        assert (LAYERS, number) in launches
        assert {count for count, _ in launches} == {LAYERS}
        assert in_single_kernels(llm, launches, monkeypatch, prompts) == found


def experts_of(llm: LLM, prompts: list) -> list:
    """What it generates, with each token's experts."""
    outs = llm.generate(prompts, replace(PARAMS, routed_experts=True), use_tqdm=False)
    return [(c.token_ids, c.logprobs, c.routed_experts.tolist()) for out in outs for c in out.completions]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"mlp_only_layers": []}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 70, "moe_intermediate_size": 40}),
        ("mixtral", {}),
    ],
)
def test_experts_in_one_launch_have_the_bits_of_their_kernels(tmp_path, family, settings, dtype, launches, monkeypatch):
    path = make_checkpoint(tmp_path / "model", family, num_hidden_layers=LAYERS, **settings)
    llm = LLM(path, dtype=dtype, kv_cache_memory_bytes=2**24)
    for number, tokens in ((1, 3), (3, 3), (110, 5)):  # the last in two parts
        prompts = [[5, 7, *[11 + i] * (tokens - 2)] for i in range(number)]
        launches.clear()
        found = experts_of(llm, prompts)
        assert (LAYERS, number) in launches
        assert {count for count, _ in launches} == {LAYERS}
        llm.reset_prefix_cache()
        with monkeypatch.context() as patch:
            without_launches(patch)
            assert experts_of(llm, prompts) == found


@pytest.mark.parametrize(("dense", "expected"), [([], [1, 1, 1]), ([0, 1], [2, 1]), ([1], [1, 1, 1])])
def test_a_layer_is_launched_up_to_what_is_more_than_experts(tmp_path, dense, expected, launches, monkeypatch):
    """Here with one that all tokens share. Dense layers before it are launched whole."""
    path = make_checkpoint(tmp_path / "model", "qwen2_moe", num_hidden_layers=LAYERS, mlp_only_layers=dense)
    llm = LLM(path, kv_cache_memory_bytes=2**24)
    launches.clear()
    found = generate(llm)
    assert [count for count, _ in launches] == expected * (len(launches) // len(expected))
    assert in_single_kernels(llm, launches, monkeypatch) == found


@pytest.mark.parametrize("change", ["another number a token", "a router in fp32"])
def test_experts_of_another_kind_than_those_before_them_are_not_of_their_launch(tmp_path, change, launches):
    path = make_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=LAYERS, mlp_only_layers=[])
    model = exact_model(path, "bfloat16")
    router = model.model.layers[2].mlp.gate
    if change == "a router in fp32":
        router.float()
    else:
        router.top_k, router.routing = 1, replace(router.routing, top_k=1)
    prepare_rollout(model)  # compares its bits
    assert [count for count, _ in launches[-2:]] == [2, 1]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("dtype", "adapted"), [("float32", False), ("bfloat16", True)])
def test_launches_of_groups_that_share_reads_and_draft_have_the_bits_of_their_kernels(
    checkpoint, dtype, adapted, launches, monkeypatch, rows_cost_nothing
):
    path = checkpoint("qwen3", num_hidden_layers=LAYERS)
    adapter = adapted_model(path, dtype) if adapted else None
    drafts = {"method": lambda ids: ids[-2:], "num_speculative_tokens": 2}
    llm = LLM(path, dtype=dtype, adapter=adapter, kv_cache_memory_bytes=2**24, speculative_config=drafts)
    params = SamplingParams(n=4, max_tokens=12, seed=3, temperature=0.5, ignore_eos=True)
    together, share_reads = [], cpu.share_reads
    monkeypatch.setattr(cpu, "share_reads", lambda *args: (together.append(share_reads(*args)), together[-1])[1])
    found = []
    for launched in (True, False):
        if not launched:
            without_launches(monkeypatch)
        llm.reset_prefix_cache()
        launches.clear()
        together.clear()
        before = llm.stats().draft_tokens
        outs = llm.generate([[5, 7, 11 + i] * 12 for i in range(6)], params, use_tqdm=False)
        found.append([(c.token_ids, c.logprobs) for out in outs for c in out.completions])
        assert bool(launches) == launched
        assert max(items[:, 3].max() for items in together) >= 4
        assert llm.stats().draft_tokens > before
    assert found[0] == found[1]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("mistral", "bfloat16")])
def test_parts_of_a_launch_have_the_bits_of_the_whole(checkpoint, family, dtype, launches, monkeypatch):
    """Prompts of several chunks, groups that share reads, and decodes, in parts that end in the midst of them."""
    llm = LLM(checkpoint(family), dtype=dtype, kv_cache_memory_bytes=2**24, max_num_batched_tokens=96)
    params = SamplingParams(n=3, max_tokens=10, seed=3, temperature=0.5, ignore_eos=True)
    prompts = [[5, 7, 11 + i] * (1 + 14 * i % 50) for i in range(6)]

    def run():
        llm.reset_prefix_cache()
        outs = llm.generate(prompts, params, use_tqdm=False)
        return [(c.token_ids, c.logprobs) for out in outs for c in out.completions]

    expected, parts, compute = run(), [], layer._decoder_layers
    assert max(rows for _, rows in launches) == 96
    monkeypatch.setattr(layer, "_decoder_layers", lambda x, *rest: (parts.append(len(x)), compute(x, *rest)))
    for most in (1, 7, 64, 95):
        monkeypatch.setattr(layer, "_ROWS", most)
        parts.clear()
        assert run() == expected
        assert max(parts) <= most + 12
        assert sum(parts) > sum(map(len, prompts))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("ordered", [True, False])
def test_a_long_prompt_in_parts_has_the_trainers_bits(checkpoint, ordered, monkeypatch):
    """In one step of as many rows as a user's; a negative control reads keys before the part that writes them."""
    path, parts, cut = checkpoint("llama", max_position_embeddings=1024), [], layer._parts

    def parts_of(items, rows):
        found = list(cut(items, rows))
        parts.append([len(range(rows)[where]) for where, _ in found])
        return found if ordered else found[::-1]

    monkeypatch.setattr(layer, "_parts", parts_of)
    llm = LLM(path, dtype="float32", kv_cache_memory_bytes=2**24, max_num_batched_tokens=2048)
    prompt = [3 + i * i % 50 for i in range(1000)]
    out = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    assert max(parts, key=sum) == [512, 488]
    (expected,) = token_logprobs(exact_model(path, "float32"), [prompt])
    assert (out.prompt_logprobs == expected.tolist()) is ordered


def test_windows_of_a_layer_are_its_own(checkpoint, launches, monkeypatch):
    settings = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    llm = LLM(checkpoint("qwen2", num_hidden_layers=LAYERS, **settings), kv_cache_memory_bytes=2**22)
    windows = [layer.self_attn.observed.window for layer in layers_of(llm)]
    assert windows[1] and not windows[0]
    found = generate(llm)
    assert launches
    assert in_single_kernels(llm, launches, monkeypatch) == found


@pytest.mark.parametrize("layers", [(0, 2), (1, 3), (2, 3)])
def test_a_stage_launches_the_layers_that_are_its_own(checkpoint, layers, launches):
    stage = stage_model(checkpoint("llama", num_hidden_layers=LAYERS), "float32", "cpu", layers)
    prepare_rollout(stage)  # compares its bits
    assert launches[-1][0] == layers[1] - layers[0]


@pytest.mark.parametrize(("family", "part"), [("llama", "up_proj"), ("qwen3_moe", "gate"), ("qwen3_moe", "experts")])
def test_a_hook_sees_its_module_and_the_others_keep_their_launches(tmp_path, family, part, launches):
    path = make_checkpoint(tmp_path / "model", family, num_hidden_layers=LAYERS, mlp_only_layers=[])
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    expected = generate(llm)
    seen = []
    handle = getattr(layers_of(llm)[1].mlp, part).register_forward_hook(lambda *call: seen.append(call))
    llm.reset_prefix_cache()
    launches.clear()
    assert generate(llm) == expected
    assert {count for count, _ in launches} == {1} and len(launches) == 2 * len(seen) > 0
    handle.remove()
    llm.reset_prefix_cache()
    launches.clear()
    seen.clear()
    assert generate(llm) == expected
    assert launches and not seen


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_a_hook_between_two_layers_sees_the_second_s_input(checkpoint, before, launches):
    path = checkpoint("llama", num_hidden_layers=LAYERS)
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    expected = generate(llm)
    seen = []
    layers = layers_of(llm)
    if before:
        layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].total.clone()))
    else:
        layers[0].register_forward_hook(lambda module, args, out: seen.append(out.total.clone()))
    llm.reset_prefix_cache()
    launches.clear()
    assert generate(llm) == expected
    assert {count for count, _ in launches} == {1, 2}
    prompts = [list(p) for p in PROMPTS]
    plain = AutoModelForCausalLM.from_pretrained(path)
    states = plain(torch.tensor(prompts), output_hidden_states=True).hidden_states[1]
    assert torch.allclose(seen[0].reshape(states.shape), states, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_negative_control_a_launch_of_other_bits_is_not_used(checkpoint, family, launches, monkeypatch):
    path = checkpoint(family)
    expected = generate(LLM(path, kv_cache_memory_bytes=2**22))

    class Wrong(cpu.decoder_layers):  # the counted one
        def __call__(self, *args):
            total, *rest = super().__call__(*args)
            return torch.nextafter(total, total + 1), *rest

    monkeypatch.setattr(cpu, "decoder_layers", Wrong)
    launches.clear()
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    assert launches
    launches.clear()
    assert generate(llm) == expected and not launches


def test_layers_called_in_another_order_are_an_error(checkpoint):
    llm = LLM(checkpoint("llama", num_hidden_layers=LAYERS), kv_cache_memory_bytes=2**22)
    layers = layers_of(llm)
    order = [*layers]
    layers[1], layers[2] = order[2], order[1]
    with pytest.raises(RuntimeError, match="calls its layers otherwise"):
        generate(llm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("updates", [1, 2])  # the second takes the memory that the first one replaced
@pytest.mark.parametrize(
    ("family", "part"),
    [
        *[("qwen2", part) for part in ("bias", "layernorm.weight", "model.norm.weight", "proj.weight")],
        *[("qwen3_moe", part) for part in ("mlp.gate.weight", "gate_up_proj", "down_proj")],
    ],
)
def test_a_launch_follows_an_update_of_what_it_was_read_from(
    checkpoint, family, part, updates, dtype, launches, monkeypatch
):
    path = checkpoint(family)
    llm = LLM(path, dtype=dtype, kv_cache_memory_bytes=2**22)
    before = generate(llm)
    state = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for _ in range(updates):
        llm.update_weights((name, tensor.cos() if name.endswith(part) else tensor) for name, tensor in state.items())
    launches.clear()
    found = generate(llm)
    assert launches and found != before
    assert in_single_kernels(llm, launches, monkeypatch) == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_launch_follows_an_update_of_the_adapter(checkpoint, dtype, launches, monkeypatch):
    path = checkpoint("qwen3", num_hidden_layers=LAYERS)
    llm = LLM(path, dtype=dtype, adapter=adapted_model(path, dtype), kv_cache_memory_bytes=2**22)
    before = generate(llm)
    for seed in (1, 2):
        llm.update_weights(adapted_model(path, dtype, seed=seed))
        launches.clear()
        found = generate(llm)
        assert launches and found != before
        assert in_single_kernels(llm, launches, monkeypatch) == found


class Around(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


@pytest.mark.parametrize(
    ("family", "part", "counts"),
    [("llama", "up_proj", {2}), ("qwen3_moe", "gate", {1, 2}), ("qwen3_moe", "experts", {1, 2})],
)
def test_a_launch_follows_a_module_that_takes_another_s_place(tmp_path, family, part, counts, launches):
    path = make_checkpoint(tmp_path / "model", family, num_hidden_layers=LAYERS, mlp_only_layers=[])
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    expected = generate(llm)
    mlp = layers_of(llm)[0].mlp
    own = getattr(mlp, part)
    setattr(mlp, part, Around(own))
    llm.reset_prefix_cache()
    launches.clear()
    assert generate(llm) == expected
    assert {count for count, _ in launches} == counts
    setattr(mlp, part, own)
    llm.reset_prefix_cache()
    launches.clear()
    assert generate(llm) == expected
    assert {count for count, _ in launches} == {LAYERS}


def test_what_a_launch_was_read_from_is_not_kept_alive(checkpoint):
    llm = LLM(checkpoint("llama"), kv_cache_memory_bytes=2**22)
    generate(llm)
    layers = layers_of(llm)
    launch = layers[0]._last_launch
    assert launch.holds()
    weight = weakref.ref(layers[0].mlp.up_proj.packed)
    layers[0].mlp.up_proj.packed = None
    assert weight() is None and not launch.holds()
