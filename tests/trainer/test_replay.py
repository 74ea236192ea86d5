"""Routing replay: given experts take the place of a router's own; gradients go through its weights."""

import numpy as np
import pytest
import torch

from samebits import LLM, SamplingParams
from samebits.model.routing import routers
from samebits.trainer import exact_model, token_logprobs
from samebits.trainer.rescore import rescore

from helpers.moe import save_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["qwen3_moe", "glm4_moe", "mixtral", "granitemoe"]
SEQUENCES = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = save_tiny_moe(tmp_path_factory.mktemp(family) / "model", family)
        return made[family]

    return get


def results(model, experts=None, **options):
    """Log-probs, and gradients by name, of a sum of them."""
    model.zero_grad()
    logprobs = token_logprobs(model, SEQUENCES, routed_experts=experts, **options)
    (torch.cat(logprobs) * torch.linspace(-1, 1, 11)).sum().backward()
    return torch.cat(logprobs).detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(a, b):
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def own_experts(model):
    with torch.no_grad():
        return token_logprobs(model, SEQUENCES, return_routed_experts=True)[1]


def foreign_experts(model, seed=0):
    """Random ones, of each router as many as there are."""
    rng = np.random.default_rng(seed)
    found = [
        np.zeros((len(s) - 1, *ids.shape[1:]), np.int32) for s, ids in zip(SEQUENCES, own_experts(model), strict=True)
    ]
    for layer, router in routers(model).items():
        for ids in found:
            for row in ids[:, layer]:
                row[:] = rng.permutation(router.routing.num_experts)[: len(row)]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_experts_change_no_bit_in_any_order(paths, family):
    model = exact_model(paths(family))
    plain, own = results(model), own_experts(model)
    assert same(results(model, own), plain)
    assert same(results(model, [ids[:-1].numpy().astype(np.uint8)[..., ::-1] for ids in own]), plain)
    assert same(results(model, [None, np.full_like(own[1].numpy(), -1), None]), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_foreign_experts_are_those_of_an_fp64_model_that_is_forced_to_them(paths, family):
    """The reference is transformers' own code in fp64 whose top-k is told what to choose."""
    model = exact_model(paths(family))
    experts = foreign_experts(model)
    logprobs, gradients = results(model, experts)
    assert not torch.equal(logprobs, results(model)[0]), "the experts were ignored"
    expected, theirs = forced(model, experts)
    assert torch.allclose(logprobs.double(), expected, rtol=0, atol=2e-4)
    for name, gradient in gradients.items():
        scale = theirs[name].abs().max()
        assert (gradient.double() - theirs[name]).abs().max() <= 1e-4 * scale + 1e-9, name
    router = [gradients[n] for n in gradients if n.endswith(("gate.weight", "router.weight", "router.layer.weight"))]
    assert len(router) == len(routers(model)) and all(bool(g.abs().max() > 0) for g in router)


def forced(model, experts):
    """Log-probs and gradients of the model's plain code in fp64, sequence by sequence."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64, attn_implementation="eager")
    plain.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    plain.set_experts_implementation("eager")
    for module in plain.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.double()
    own = torch.topk
    layers = sorted(routers(model))
    sizes = {(r.routing.num_experts, r.routing.top_k) for r in routers(model).values()}
    logprobs = []
    for sequence, ids in zip(SEQUENCES, experts, strict=True):
        calls = iter(layers)

        def topk(x, k, *args, _ids=ids, _calls=calls, **kwargs):
            if x.dim() != 2 or (x.shape[1], k) not in sizes:
                return own(x, k, *args, **kwargs)
            last = np.arange(k)[None]  # of the last token, whose choice nothing follows
            chosen = torch.from_numpy(np.concatenate([_ids[:, next(_calls), :k], last]).astype(np.int64))
            return torch.return_types.topk((x.gather(-1, chosen), chosen))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "topk", topk)
            patch.setattr(torch.Tensor, "topk", topk)
            logits = plain(torch.tensor([sequence])).logits[0]
        found = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(sequence)[1:, None])[:, 0]
        logprobs += [logits.new_zeros(1), found]
    whole = torch.cat(logprobs)
    (whole * torch.linspace(-1, 1, 11)).sum().backward()
    return whole.detach(), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_activation_checkpointing_meets_the_same_experts(paths, family):
    model = exact_model(paths(family))
    experts = foreign_experts(model)
    plain = results(model, experts)
    model.gradient_checkpointing_enable()
    model.train()
    first = token_logprobs(model, SEQUENCES, routed_experts=experts)
    token_logprobs(model, SEQUENCES, routed_experts=foreign_experts(model, 1))  # another forward before the backward
    model.zero_grad()
    (torch.cat(first) * torch.linspace(-1, 1, 11)).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert same((torch.cat(first).detach(), gradients), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_drafted_rollouts_replay_to_their_bits(paths, family, rows_cost_nothing):
    """Also those of tokens whose rows were first written by a wrong draft."""
    config = {"method": "suffix", "num_speculative_tokens": 4}
    llm = LLM(paths(family), kv_cache_memory_bytes=1 << 22, speculative_config=config)
    model = exact_model(paths(family))
    for seed in (1, 1, 2):  # the second call is drafted from the first, rightly; the third finds other tokens
        params = SamplingParams(n=3, max_tokens=40, seed=seed, ignore_eos=True, routed_experts=True)
        outputs = llm.generate(SEQUENCES, params, use_tqdm=False)
        for output, completion in ((o, c) for o in outputs for c in o.completions):
            sequence = output.prompt_token_ids + completion.token_ids
            with torch.no_grad():
                (found,) = token_logprobs(model, [sequence], params, routed_experts=[completion.routed_experts])
            assert found[len(output.prompt_token_ids) :].tolist() == completion.logprobs
    stats = llm.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens, "no draft was right, or none was wrong"


def test_rollouts_are_scored_again_with_their_experts(paths):
    path = paths("qwen3_moe")
    model = exact_model(path)
    params = SamplingParams(n=3, max_tokens=12, seed=2, routed_experts=True, ignore_eos=True)
    outputs = LLM(path, kv_cache_memory_bytes=1 << 20).generate([[*range(3, 40)], [7, 8]], params, use_tqdm=False)
    pairs = [(o.prompt_token_ids, c.token_ids) for o in outputs for c in o.completions]
    completions = [c for o in outputs for c in o.completions]
    for experts in (
        [c.routed_experts for c in completions],
        [None] * 6,
        [None, *(c.routed_experts for c in completions[1:])],
    ):
        found = [logprobs.tolist() for logprobs, _ in rescore(model, pairs, params, routed_experts=experts)]
        assert found == [c.logprobs for c in completions]
    with pytest.raises(ValueError, match="shorter"):
        list(rescore(model, pairs, params, routed_experts=[None] * 5))
    wrong = [(c.routed_experts + 1) % 5 for c in completions]
    found = [logprobs.tolist() for logprobs, _ in rescore(model, pairs, params, routed_experts=wrong)]
    assert all(a != c.logprobs for a, c in zip(found, completions, strict=True))


BAD = {
    "shape": (lambda ids: ids[:4], r"\[0\] has shape \[4, 2, 2\], expected \[6, 2, 2\]"),
    "layers": (lambda ids: ids[:, :1], r"\[0\] has shape \[6, 1, 2\]"),
    "range": (lambda ids: np.where(ids == ids.max(), 5, ids), r"\[0\]: token \d has an expert of 5 that isn't there"),
    "negative": (lambda ids: np.where(ids == ids.max(), -2, ids), "an expert of 5 that isn't there"),
    "twice": (lambda ids: np.repeat(ids[..., :1], 2, -1), r"token 0 has an expert twice in layer 0: \[\d, \d\]"),
    "floats": (lambda ids: ids + 0.5, r"\[0\] holds float64, expected integers"),
    "half": (lambda ids: np.where(np.arange(2) == 0, -1, ids), "an expert of 5 that isn't there"),
}


@pytest.mark.parametrize("kind", BAD)
def test_wrong_experts_are_named(paths, kind):
    damage, message = BAD[kind]
    model = exact_model(paths("qwen3_moe"))
    experts = [damage(foreign_experts(model)[0]), None, None]
    with pytest.raises(ValueError, match=message):
        token_logprobs(model, SEQUENCES, routed_experts=experts)


def test_a_wrong_number_of_arrays_and_a_dense_model_are_refused(paths, checkpoint):
    with pytest.raises(ValueError, match="2 entries for 3 sequences"):
        token_logprobs(exact_model(paths("qwen3_moe")), SEQUENCES, routed_experts=[None, None])
    with pytest.raises(ValueError, match="LlamaForCausalLM is no mixture of experts"):
        token_logprobs(exact_model(checkpoint("llama")), SEQUENCES, routed_experts=[None] * 3)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "ernie4_5_moe", "minimax_m2"])
def test_the_routers_loss_is_transformers_own(paths, family):
    from transformers import AutoModelForCausalLM

    path = paths(family)
    model, plain = exact_model(path), AutoModelForCausalLM.from_pretrained(path)
    *_, loss = token_logprobs(model, [SEQUENCES[0]], return_router_loss=True)
    expected = plain(torch.tensor([SEQUENCES[0]]), output_router_logits=True).aux_loss
    assert torch.allclose(loss, expected, rtol=1e-5)
    loss.backward()
    expected.backward()
    for name, theirs in plain.named_parameters():
        if name.endswith(".gate.weight"):
            router, theirs = model.get_parameter(name), theirs.grad
            assert theirs.abs().max() > 0 and torch.allclose(router.grad, theirs, rtol=1e-3, atol=1e-7)


def test_a_model_without_such_a_loss_says_so(paths, checkpoint):
    with pytest.raises(ValueError, match="Glm4MoeForCausalLM has no load-balancing loss"):
        token_logprobs(exact_model(paths("glm4_moe")), SEQUENCES, return_router_loss=True)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no load-balancing loss"):
        token_logprobs(exact_model(checkpoint("llama")), SEQUENCES, return_router_loss=True)
