"""Engine against an FSDP2 trainer in processes of its own: the same bits."""

import pathlib
import random
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

from samebits import LLM, NumericsError, SamplingParams, UnsupportedModelError
from samebits.engine.weights import check_contract
from samebits.model import roles
from samebits.model.exact import compute_device, contract_of
from samebits.model.routing import expert_sizes
from samebits.trainer import exact_model, shard, token_logprobs
from samebits.trainer.fsdp import init_process_group

from helpers import fsdp_score
from helpers.adapters import lora
from helpers.engines import prompt_of
from helpers.families import BEFORE_5_13, FAMILIES, MIXTURES, OTHERS, make_family, random_sizes
from helpers.models import DTYPES
from helpers.moe import save_tiny_moe
from helpers.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")


def scored(world: int, job: dict, folder: pathlib.Path) -> dict:
    torch.save(job, folder / "job.pt")
    run_ranks(world, fsdp_score.main, str(folder / "job.pt"), str(folder / "out.pt"))
    return torch.load(folder / "out.pt")


def job_of(path, dtype, sampling, **changes) -> dict:
    base = {
        "path": str(path),
        "dtype": dtype,
        "sampling": sampling,
        "threads": 1,
        "checkpointing": False,
        "master": False,
        "rounds": 0,
        "adapter": None,
    }
    return {**base, **changes}


def test_a_model_computes_on_its_mesh_wherever_its_shards_lie():
    """As trainers offload them to the CPU: here a mesh of CPUs, and shards without data."""
    model = torch.nn.Linear(4, 4)
    assert compute_device(model) == torch.device("cpu") == compute_device(model.to("cpu"))
    assert compute_device(model.to("meta")) == torch.device("meta")
    init_process_group()
    mesh = init_device_mesh("cpu", (1,))
    model.weight = torch.nn.Parameter(DTensor.from_local(torch.empty(4, 4, device="meta"), mesh, [Shard(0)]))
    assert model.weight.device.type == "meta"
    assert compute_device(model) == torch.device("cpu")


PROMPTS = [[5, 6, 7], [900] * 40, list(range(100, 133)), [3]]

SETTINGS = [
    # world, threads, dtype, fp32 master, checkpointing, sampling, family
    (1, 2, "float32", False, False, {"temperature": 0.6}, "llama"),
    (2, 1, "float32", False, True, {"temperature": 1.3, "top_k": 30}, "qwen3"),
    (2, 1, "bfloat16", True, False, {"top_p": 0.8}, "qwen2"),
    (1, 2, "bfloat16", False, True, {"min_p": 0.05}, "mistral"),
    (2, 1, "bfloat16", False, False, {"temperature": 1.0, "min_tokens": 5}, "llama3-bias"),
    pytest.param(2, 2, "float32", False, True, {}, "llama", marks=pytest.mark.slow),
    pytest.param(2, 1, "float16", True, False, {"top_p": 0.9}, "qwen3", marks=pytest.mark.slow),
    (1, 1, "float32", False, False, {}, "glm4_moe"),
    (2, 1, "bfloat16", True, True, {"temperature": 0.8}, "qwen3_moe"),
    (2, 2, "bfloat16", True, True, {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.01}, "mistral"),
]


@pytest.mark.parametrize(("world", "threads", "dtype", "master", "checkpointing", "sampling", "family"), SETTINGS)
def test_fsdp_trainer_recomputes_the_rollout_bit_for_bit(
    checkpoint, tmp_path, world, threads, dtype, master, checkpointing, sampling, family
):
    check_recomputed(checkpoint(family), tmp_path, world, threads, dtype, master, checkpointing, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(12))
def test_fsdp_trainer_recomputes_rollouts_of_mixtures_of_random_sizes(tmp_path, case):
    """Each family on 1 to 3 ranks and 1 or 2 threads, in two dtypes."""
    rng = random.Random(f"fsdp-{case}")
    family = MIXTURES[case % len(MIXTURES)]
    path = make_family(tmp_path / "model", family, case, **random_sizes(rng, family))
    world, threads = 1 + (case + case // len(MIXTURES)) % 3, 1 + case // len(MIXTURES)
    dtype = ["float32", "bfloat16", "float16"][(case // 2) % 3]
    sampling = rng.choice([{}, {"temperature": 0.6}, {"temperature": 1.3, "top_k": 30}, {"top_p": 0.8}])
    check_recomputed(path, tmp_path, world, threads, dtype, rng.random() < 0.5, rng.random() < 0.5, sampling)


def check_recomputed(path, folder, world, threads, dtype, master, checkpointing, sampling) -> None:
    """Generate; compare the log-probs with those of FSDP2's ranks, computed in several ways."""
    llm = LLM(path, dtype=dtype, kv_cache_memory_bytes=2**22)
    full = {**sampling, "n": 3, "max_tokens": 25, "seed": 11}
    outputs = llm.generate(PROMPTS, SamplingParams(**full), use_tqdm=False)
    sequences = [o.prompt_token_ids + c.token_ids for o in outputs for c in o.completions]
    lens = [len(o.prompt_token_ids) for o in outputs for _ in o.completions]
    job = job_of(path, dtype, full, threads=threads, checkpointing=checkpointing, master=master)
    scores = scored(world, {**job, "sequences": sequences, "prompt_lens": lens}, folder)
    rollout = [torch.tensor(c.logprobs) for o in outputs for c in o.completions]
    if "foreign" in scores:  # experts that were given come in their own layer and row, whatever is sharded
        model = exact_model(path, dtype)
        _, own = token_logprobs(model, sequences, SamplingParams(**full), return_routed_experts=True)
        given = fsdp_score.foreign(model, own)
        expected = token_logprobs(model, sequences, SamplingParams(**full), routed_experts=given, prompt_lens=lens)
        replayed = scores.pop("foreign")
        assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))
        _, experts, chosen = expert_sizes(model)
        same = {torch.equal(a, b) for a, b in zip(replayed, scores["replayed"], strict=True)}
        assert same == {chosen == experts}, "another choice of all experts is none"
    assert len(scores) == (3 if "min_tokens" in sampling else 5) + ("replayed" in scores)
    assert ("replayed" in scores) == llm.engine.has_experts
    for way, found in scores.items():
        for ours, prompt, theirs in zip(rollout, lens, found, strict=True):
            assert torch.equal(ours, theirs[prompt:]), way


@pytest.mark.parametrize(("world", "dtype", "checkpointing"), [(1, "float32", True), (2, "bfloat16", False)])
def test_three_rounds_of_training_stay_equal_and_repeat(checkpoint, tmp_path, world, dtype, checkpointing):
    sampling = {"n": 2, "max_tokens": 20, "seed": 3, "temperature": 1.3}
    job = job_of(checkpoint("llama"), dtype, sampling, rounds=3, master=True, checkpointing=checkpointing)
    first = scored(world, {**job, "prompts": PROMPTS}, tmp_path)
    assert first["equal"] == [True] * 3
    assert first["logprobs"][0] != first["logprobs"][1], "the optimizer did not move the weights"
    again = scored(world, {**job, "prompts": PROMPTS}, tmp_path)
    for a, b in zip(first["gradients"], again["gradients"], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), "gradients differ from run to run"


@pytest.mark.parametrize(
    ("dtype", "master"),
    [*[pytest.param(dtype, False, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")], ("bfloat16", True)],
)
def test_three_rounds_of_training_an_adapter_stay_equal(checkpoint, tmp_path, dtype, master):
    """Sharded with its base; updates bring the adapter alone. An adapter in fp32 on a base in bf16, too.

    An engine that would keep in fp32 what FSDP2 casts refuses it by name.
    """
    sampling = {"n": 2, "max_tokens": 20, "seed": 3, "temperature": 1.3}
    settings = {"rounds": 3, "master": master, "checkpointing": not master, "adapter": lora()}
    job = job_of(checkpoint("qwen3"), dtype, sampling, **settings)
    found = scored(2, {**job, "prompts": PROMPTS}, tmp_path)
    assert found["equal"] == [True] * 3
    assert found["logprobs"][0] != found["logprobs"][1], "the optimizer did not move the adapter"
    assert not master or "adapter_dtype: 'float32' here, 'bfloat16' there" in found["refused"]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_moe", "float32"),
        pytest.param("glm4_moe", "bfloat16", marks=pytest.mark.slow),
        pytest.param("ernie4_5_moe", "bfloat16", marks=pytest.mark.slow),
        pytest.param("minimax_m2", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_three_rounds_of_training_experts_stay_equal_and_repeat(tmp_path, family, dtype):
    """Experts sharded over 2 ranks; updates of FSDP2's module bring a router's bias, a buffer, too."""
    sampling = {"n": 2, "max_tokens": 20, "seed": 3, "temperature": 1.3}
    path = save_tiny_moe(tmp_path / "model", family)
    job = job_of(path, dtype, sampling, rounds=3, master=dtype != "float32", checkpointing=dtype == "float32")
    prompts = [[5, 6, 7], [60] * 40, list(range(10, 43)), [3]]
    first, again = (scored(2, {**job, "prompts": prompts}, tmp_path) for _ in range(2))
    assert first["equal"] == [True] * 3
    assert first["logprobs"][0] != first["logprobs"][1], "the optimizer did not move the weights"
    for a, b in zip(first["gradients"], again["gradients"], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), "gradients differ from run to run"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_a_family_that_fsdp_casts_has_the_engines_bits(tmp_path, family, dtype):
    """FSDP2 casts all fp32 parameters, a layer's inputs, and no buffer; transformers keeps some parameters in fp32.

    Who wraps layers alone is refused.
    """
    path = make_family(tmp_path, family)
    init_process_group()
    trainer, engine = exact_model(path, torch.float32), exact_model(path, dtype)
    differ = {  # as who wraps layers alone has it
        "ernie4_5_moe": f"mlp.gate.weight is {dtype}",
        "hunyuan_v1_moe": f"mlp.gate.wg.weight is {dtype}",
        "minimax_m2": "e_score_correction_bias is torch.float32",
    }
    if family in differ:
        with pytest.raises(NumericsError, match=rf"{differ[family]} .*or wrap the model with samebits"):
            contract_of(trainer, dtype)
    shard(trainer, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    contract_of(trainer).check(contract_of(engine))
    if dtype == torch.bfloat16:
        ids = torch.tensor([prompt_of(40)])
        with torch.no_grad():
            if family == "hunyuan_v1_moe" and BEFORE_5_13:  # FSDP2's hooks on the router run within its block's mode
                with pytest.raises(UnsupportedModelError, match="HunYuanMoEV1Moe"):
                    token_logprobs(trainer, ids)
                return
            assert torch.equal(token_logprobs(trainer, ids), token_logprobs(engine, ids))


@pytest.mark.skipif(BEFORE_5_13, reason="OLMo 3's own code casts its tables")
def test_a_layers_inputs_reach_it_as_they_are(tmp_path, monkeypatch):
    """Here rotary tables in fp32, as a family's own code may make them."""
    monkeypatch.setattr(roles, "_rotary", lambda module: None)
    init_process_group()
    path = make_family(tmp_path, "olmo3")
    ids = torch.tensor([prompt_of(40)])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with torch.no_grad():
        expected = token_logprobs(exact_model(path, torch.bfloat16), ids)
        assert torch.equal(token_logprobs(shard(exact_model(path), mp_policy=policy), ids), expected)
        plain = exact_model(path)
        for module in (*plain.model.layers, plain):
            fully_shard(module, mp_policy=policy)
        assert not torch.equal(token_logprobs(plain, ids), expected), "FSDP2's own default rounds them"


def test_a_model_that_was_not_trained_since_it_scored_is_what_it_was(checkpoint):
    """FSDP2 leaves the root's parameters whole until a backward."""
    init_process_group()
    model = exact_model(checkpoint("qwen3"), torch.float32)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before = contract_of(model)
    with torch.no_grad():
        token_logprobs(model, torch.tensor([prompt_of(40)]))
    check_contract(model, before)


@pytest.mark.parametrize("family", ["ernie4_5_moe", "minimax_m2"])
def test_a_base_under_an_adapter_is_checked_by_its_own_names(tmp_path, family):
    init_process_group()
    path = make_family(tmp_path, family)
    model = exact_model(path, torch.float32, adapter=lora(target_modules=["q_proj"]))
    with pytest.raises(NumericsError, match=r"model\.layers\.\d\.mlp\..* in an engine of torch.bfloat16: give both"):
        contract_of(model, torch.bfloat16)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    engine = exact_model(path, torch.bfloat16, adapter=lora(target_modules=["q_proj"]))
    check_contract(model, replace(contract_of(engine), adapter_dtype="bfloat16"))
    ids = torch.tensor([prompt_of(40)])
    with torch.no_grad():
        assert torch.equal(token_logprobs(model, ids), token_logprobs(engine, ids))


def test_parameters_that_fsdp_is_told_to_ignore_are_not_cast(checkpoint):
    init_process_group()
    model = exact_model(checkpoint("qwen3"), torch.float32)
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, ignored_params={model.model.norm.weight}, **policy)
    with pytest.raises(NumericsError, match=r"model\.norm\.weight is torch.float32 as FSDP2 has it"):
        contract_of(model)


def test_a_control_is_not_refused_for_its_casts(tmp_path):
    init_process_group()
    model = exact_model(make_family(tmp_path, "minimax_m2"), torch.float32, exact=False)
    assert contract_of(model, torch.bfloat16).linear == "torch"


@pytest.mark.parametrize(
    ("base", "cast", "dtype", "adapter"),
    [
        ("float32", "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", None, "bfloat16", "float32"),
        ("float32", None, "float32", "float32"),
    ],
)
def test_a_contract_says_in_what_a_sharded_model_computes(checkpoint, base, cast, dtype, adapter):
    """PEFT keeps an adapter in fp32, which FSDP2's policy casts, whatever the base is in."""
    init_process_group()
    path = checkpoint("qwen3")
    model = exact_model(path, base, adapter=lora())
    assert next(p for n, p in model.named_parameters() if "lora_A" in n).dtype == torch.float32
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=cast and getattr(torch, cast)))
    found = contract_of(model)
    assert (found.dtype, found.adapter_dtype) == (dtype, adapter)
    check_contract(model, found)
    with pytest.raises(NumericsError, match=r"adapter_dtype: '.*' here"):
        check_contract(model, replace(found, adapter_dtype="float32" if adapter == "bfloat16" else "bfloat16"))
    other = replace(found, dtype="bfloat16" if dtype == "float32" else "float32")
    with pytest.raises(NumericsError, match=r"dtype: '.*' here"):  # FSDP2 says in what it computes
        check_contract(model, other)
    check_contract(exact_model(path), contract_of(exact_model(path, "bfloat16")))  # masters of somebody's copy


def test_gradients_are_close_to_plain_hf_in_fp64(checkpoint):
    for family in ("llama", "llama3-bias", "qwen2", "qwen3", "mistral"):
        path = checkpoint(family)
        ids = [[5, 6, 7, 8] * 15, list(range(50, 91))]
        ours = exact_model(path)
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        sum(lp.sum() for lp in token_logprobs(ours, ids)).backward()
        for s in ids:
            logits = reference(torch.tensor([s]), use_cache=False).logits[0, :-1]
            logits.log_softmax(-1).gather(1, torch.tensor(s[1:])[:, None]).sum().backward()
        expected = dict(reference.named_parameters())
        floor = 1e-3 * max(p.grad.norm() for p in expected.values())  # a key's bias has almost no gradient
        for name, parameter in ours.named_parameters():
            exact = expected[name].grad
            error = (parameter.grad - exact).norm() / exact.norm().clamp_min(floor)
            assert error < 5e-4, f"{family} {name}: {error}"


def test_activation_checkpointing_changes_no_gradient_bit(checkpoint):
    grads = []
    for recompute in (False, True):
        model = exact_model(checkpoint("qwen2")).train()
        if recompute:
            model.gradient_checkpointing_enable()
        sum(lp.sum() for lp in token_logprobs(model, PROMPTS[:3])).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_entropy_and_its_gradient_are_those_of_the_distribution_in_fp64(checkpoint):
    """Tempered and filtered; the reference filters by the same rule in fp64."""
    path, ids = checkpoint("llama"), list(range(50, 91))
    model = exact_model(path)
    params = SamplingParams(temperature=1.3, top_k=30)
    _, (entropy,) = token_logprobs(model, [ids], params, return_entropy=True)
    assert entropy[0] == 0
    entropy.sum().backward()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    z = reference(torch.tensor([ids]), use_cache=False).logits[0, :-1] / 1.3
    logp = z.masked_fill(z < z.topk(30).values[:, -1:], -torch.inf).log_softmax(-1)
    exact = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    assert (entropy[1:] - exact).abs().max() < 1e-4
    exact.sum().backward()
    weight, expected = model.lm_head.weight.grad, reference.lm_head.weight.grad
    assert (weight - expected).norm() / expected.norm() < 5e-4


def test_padding_at_both_ends_is_the_same_and_a_hole_is_refused(checkpoint):
    model = exact_model(checkpoint("llama"))
    ids = torch.tensor([[0, 5, 6, 7, 0], [9, 8, 7, 6, 5]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        padded = token_logprobs(model, ids, attention_mask=mask)
        packed = token_logprobs(model, [[5, 6, 7], [9, 8, 7, 6, 5]])
    assert torch.equal(padded[0], torch.cat((torch.zeros(1), packed[0], torch.zeros(1))))
    assert torch.equal(padded[1], packed[1])
    with pytest.raises(ValueError, match="has a hole"):
        token_logprobs(model, ids, attention_mask=torch.tensor([[1, 0, 1, 1, 1]] * 2))


def test_tokens_are_scored_inside_the_forward_of_a_wrapped_model(checkpoint):
    """A trainer that replaces `model.forward` gives the plain one; the model's own hooks don't run a second time."""
    model = exact_model(checkpoint("llama"))
    expected = token_logprobs(model, PROMPTS[:2])
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    found = token_logprobs(model, PROMPTS[:2], forward=model.forward)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not calls


def test_token_ids_must_be_integers_in_range(checkpoint):
    model = exact_model(checkpoint("llama"))
    with pytest.raises(TypeError, match="integers"):
        token_logprobs(model, [[5.9, 6.9]])
    with pytest.raises(ValueError, match="vocabulary has 1001"):
        token_logprobs(model, [[5, 1001]])


@pytest.mark.parametrize("call", ["keyword", "positional", "base model"])
def test_a_padding_mask_is_not_ignored(checkpoint, call):
    model = exact_model(checkpoint("llama"))
    ids, mask = torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]])
    calls = {
        "keyword": lambda ids, mask: model(ids, attention_mask=mask).logits,
        "positional": lambda ids, mask: model(ids, mask).logits,
        "base model": lambda ids, mask: model.base_model(ids, attention_mask=mask).last_hidden_state,
    }
    call = calls[call]
    with torch.no_grad():
        alone = call(ids[:, 1:], mask[:, 1:])
        assert torch.equal(call(ids, mask)[:, 1:], alone)
        assert not torch.equal(call(ids, torch.ones_like(mask))[:, 1:], alone)
