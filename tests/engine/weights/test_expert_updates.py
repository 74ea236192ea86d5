"""Weight updates of a mixture of experts: from any source, in either layout, all or nothing."""

import random
import threading

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeForCausalLM

from samebits import LLM, SamplingParams, WeightUpdateError
from samebits.engine.weights import WeightGroup, specs_of
from samebits.engine.weights.group import listening_store
from samebits.trainer import exact_model, save_weights

from helpers.engines import generate, pairs
from helpers.moe import save_tiny_moe, stored

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["qwen3_moe", "mixtral", "glm4_moe", "ernie4_5_moe", "minimax_m2"]
PARAMS = SamplingParams(n=2, max_tokens=12, seed=3, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9]]
LAYOUTS = {"whole": {}, "stages": {"pipeline_parallel_size": 2, "backend": "inproc"}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """checkpoints(family) -> two, of other weights."""
    made = {}

    def get(family):
        if family not in made:
            folders = [tmp_path_factory.mktemp(family) / str(seed) for seed in (0, 1)]
            made[family] = [save_tiny_moe(folder, family, seed=seed) for seed, folder in enumerate(folders)]
        return made[family]

    return get


def engine(path, **settings):
    return LLM(path, kv_cache_memory_bytes=1 << 20, **settings)


def results(llm):
    return [pairs(output) for output in generate(llm, PROMPTS, PARAMS)]


def shuffled(state, seed=0):
    items = list(state.items())
    random.Random(seed).shuffle(items)
    return items


def stacked_directory(path, folder):
    """A checkpoint with the names of transformers' modules, as some trainers write it."""
    from safetensors.torch import save_file

    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.save_pretrained(folder)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors")
    return folder


def ours(path, folder):
    """A checkpoint that a trainer of ours wrote."""
    save_weights(exact_model(path), folder / "ours", max_file_bytes=3000)
    return folder / "ours"


SOURCES = {
    "module": lambda path, folder: exact_model(path),
    "stacked pairs": lambda path, folder: shuffled(exact_model(path).state_dict()),
    "stored pairs": lambda path, folder: shuffled(stored(path)),
    "directory": lambda path, folder: path,
    "stacked directory": stacked_directory,
    "our directory": ours,
}


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        pytest.param(
            source, layout, marks=[] if (layout == "whole") == (source != "stored pairs") else pytest.mark.slow
        )
        for source in SOURCES
        for layout in LAYOUTS
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_after_an_update_the_engine_is_one_of_the_new_checkpoint(checkpoints, tmp_path, family, source, layout):
    old, new = checkpoints(family)
    llm, expected = engine(old, **LAYOUTS[layout]), engine(new)
    before = results(llm)
    llm.update_weights(SOURCES[source](new, tmp_path))
    assert results(llm) == results(expected) != before
    assert llm.weight_checksums() == expected.weight_checksums()
    llm.update_weights(SOURCES[source](old, tmp_path))  # into the memory that the first update replaced
    assert results(llm) == before


def test_experts_over_a_process_group(checkpoints):
    """One by one, as trainers of other frameworks broadcast them."""
    old, new = checkpoints("glm4_moe")
    llm, state, store = engine(old), dict(shuffled(stored(new))), listening_store("127.0.0.1")
    specs = specs_of(state)

    def send():
        with WeightGroup("127.0.0.1", store.port, rank=0, world_size=2) as group:
            group.send(state.items(), specs, 4096)

    sender = threading.Thread(target=send)
    sender.start()
    with WeightGroup("127.0.0.1", store.port, rank=1, world_size=2) as group:
        llm.update_weights(group.receive(specs, 4096))
        sender.join()
    assert results(llm) == results(engine(new))


def test_a_routers_bias_stays_fp32_in_an_engine_of_bf16(checkpoints):
    old, new = checkpoints("glm4_moe")
    llm = engine(old, dtype="bfloat16")
    llm.update_weights(stored(new).items())
    (name, bias) = next(item for item in stored(new).items() if item[0].endswith("e_score_correction_bias"))
    assert torch.equal(llm.engine.executor.workers[0].store.tensor(name), bias) and bias.dtype == torch.float32
    assert not torch.equal(bias, bias.bfloat16().float()), "the test proves nothing"
    assert results(llm) == results(engine(new, dtype="bfloat16"))


DAMAGE = {
    "missing": (lambda s, n: s.pop(n), "1 tensors are missing, first '{}'"),
    "misshapen": (lambda s, n: s.update({n: s[n][1:]}), r"tensor '{}' has shape \[19, 12\], expected \[20, 12\]"),
    "a bias less": (
        lambda s, n: s.pop("model.layers.1.mlp.gate.e_score_correction_bias"),
        "missing, first 'model.layers.1.mlp.gate.e_score_correction_bias'",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_update_names_the_expert_and_changes_nothing(checkpoints, kind, layout):
    old, new = checkpoints("glm4_moe")
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    damage, message = DAMAGE[kind]
    state = stored(new)
    damage(state, name)
    llm = engine(old, **LAYOUTS[layout])
    before, sums = results(llm), llm.weight_checksums()
    with pytest.raises(WeightUpdateError, match=message.format(name.replace(".", r"\."))):
        llm.update_weights(state.items())
    assert (llm.weight_version, results(llm), llm.weight_checksums()) == (0, before, sums)


def test_an_expert_given_twice_is_named(checkpoints):
    old, new = checkpoints("qwen3_moe")
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    llm = engine(old)
    with pytest.raises(WeightUpdateError, match=r"up_proj\.weight' was given twice"):
        llm.update_weights([*stored(new).items(), (name, stored(new)[name])])
    stacked = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(WeightUpdateError, match=r"gate_up_proj' was given twice: it came as '.*_proj.weight', too"):
        llm.update_weights([*stored(new).items(), (stacked, exact_model(new).state_dict()[stacked])])
    assert llm.weight_version == 0


def test_dropped_weights_are_read_again(checkpoints):
    old, _ = checkpoints("mixtral")
    llm = engine(old)
    before = results(llm)
    assert llm.sleep(level=2) > 0
    llm.wake_up()
    assert results(llm) == before


@pytest.mark.slow
def test_resident_memory_is_the_weights_once_and_kv(tmp_path):
    """A model of 440 MB; 5 % above weights and KV, beside what a process with a small engine has."""
    path = save_tiny_moe(
        tmp_path / "model", "qwen3_moe", hidden_size=512, moe_intermediate_size=512, num_experts=32, vocab_size=1000,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64, initializer_range=0.02,
    )  # fmt: skip
    small = engine(save_tiny_moe(tmp_path / "small", "qwen3_moe"))
    results(small)
    before = psutil.Process().memory_info().rss
    llm = LLM(path, kv_cache_memory_bytes=1 << 26)
    results(llm)
    resident = psutil.Process().memory_info().rss - before
    own = llm.stats().kv_cache_bytes + llm.engine.weight_bytes
    assert llm.engine.weight_bytes > 4e8
    assert resident <= 1.05 * own, f"{resident / 1e6:.0f} MB for {own / 1e6:.0f} MB of weights and KV"


def test_no_process_has_what_it_passes_over_in_an_order_of_its_own(tmp_path, monkeypatch):
    """transformers has patterns in a set, whose order differs by process: replicas compare their tables."""
    path = save_tiny_moe(tmp_path, "glm4_moe")
    patterns = {f"model.layers.{number}" for number in range(90, 120)}
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", patterns)
    _, *found = engine(path).engine.executor.info.table.ignored
    assert patterns <= {*found} and found == sorted(found)


def test_layers_that_predict_further_tokens_are_passed_over_in_a_checkpoint(tmp_path):
    """GLM-4.5's files have one; transformers doesn't load it."""
    path = save_tiny_moe(tmp_path, "glm4_moe")
    expected = results(engine(path))
    tensors = load_file(path / "model.safetensors")
    further = {"model.layers.46.eh_proj.weight": torch.ones(3, 5), "model.layers.46.mlp.gate.weight": torch.ones(2, 2)}
    save_file(tensors | further, path / "model.safetensors", {"format": "pt"})
    for layout in LAYOUTS.values():
        llm = engine(path, **layout)
        assert results(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        assert results(llm) == expected
        assert llm.update_weights(path) == 1
        assert results(llm) == expected
        with pytest.raises(WeightUpdateError, match=r"unknown tensor 'model\.layers\.45"):
            llm.update_weights([("model.layers.45.eh_proj.weight", torch.ones(3, 5))])
