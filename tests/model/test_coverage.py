"""Coverage by op: what is exact loads whatever its name, what isn't is refused by module and op; nothing is wrong."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from samebits import LLM, SamplingParams, UnsupportedModelError
from samebits.kernels import ops
from samebits.model import exact_model, make_exact
from samebits.model.coverage import UnderMode, is_router
from samebits.model.experts import check_experts
from samebits.model.families import TESTED
from samebits.model.paged import group_size, hidden_states, new_kv_caches
from samebits.model.roles import ExactMLP, ExactRMSNorm, role_of
from samebits.model.rollout import (
    FusedAttention,
    FusedLayer,
    FusedRouter,
    PackedEmbedding,
    PlainRouter,
    prepare_rollout,
)
from samebits.model.routing import RoutedExperts, routers
from samebits.model.selfcheck import SelfCheck
from samebits.model.stage import stage_model
from samebits.model.survey import survey
from samebits.trainer import token_logprobs
from samebits.trainer.verify import verify

from helpers.engines import prompt_of
from helpers.families import BEFORE_5_13, FAMILIES, REFUSED, family_config, make_family

pytestmark = pytest.mark.usefixtures("one_thread")


def plain(path):
    """The model of transformers, not exact."""
    return AutoModelForCausalLM.from_pretrained(path)


def test_the_tested_list_is_the_matrix_of_the_tests():
    assert set(FAMILIES) == TESTED


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_covered_is_refused_by_module_and_op(tmp_path, family):
    with pytest.raises(UnsupportedModelError, match=REFUSED[family][1]):
        exact_model(make_family(tmp_path, family))


def test_a_window_that_is_in_the_mask_alone_is_refused(tmp_path):
    """Qwen2-MoE's own code tells attention nothing of it."""
    window = {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 10}
    with pytest.raises(UnsupportedModelError, match=r"Qwen2MoeAttention\) brings .* a window in its mask alone"):
        exact_model(make_family(tmp_path, "qwen2_moe", **window))


def test_a_router_may_read_the_dtype_of_its_weight(tmp_path):
    """An engine has packed it by then."""
    path = make_family(tmp_path, "hunyuan_v1_moe")
    llm = LLM(path, dtype="bfloat16", kv_cache_memory_bytes=1 << 20)
    (output,) = llm.generate([prompt_of(20)], SamplingParams(max_tokens=10, seed=1), use_tqdm=False)
    (found,) = token_logprobs(
        exact_model(path, "bfloat16"), [output.prompt_token_ids + output.completions[0].token_ids]
    )
    assert output.completions[0].logprobs == found[20:].tolist()


@pytest.mark.skipif(not BEFORE_5_13, reason="its router no longer sorts")
def test_granitemoe_of_an_older_transformers_is_refused_by_module_and_op():
    model = AutoModelForCausalLM.from_config(family_config("granitemoe"))
    with pytest.raises(UnsupportedModelError, match=r"GraniteMoeTopKGating\) is not covered: .*Tensor\.sort"):
        make_exact(model)


def test_a_family_off_the_tested_list_loads_with_one_line_in_the_log(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr("samebits.model.exact.TESTED", frozenset())
    exact_model(checkpoint("llama"))
    assert [record.message for record in caplog.records] == [
        f"{checkpoint('llama')}: model type 'llama' isn't one that the tests cover; it passed all checks"
    ]


# --- models with one op more ------------------------------------------------------------------------------------------


class Changed(nn.Module):
    """An MLP with something done to its result, [1, T, H]."""

    def __init__(self, mlp, change):
        super().__init__()
        self.mlp = mlp
        self.change = change

    def forward(self, x):
        return self.change(self.mlp(x))


def shift(x):
    return x + F.pad(x[:, :-1], (0, 0, 1, 0))


@torch.library.custom_op("samebits_tests::tables", mutates_args=())
def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return positions.cos(), positions.sin()


@torch.library.custom_op("samebits_tests::total", mutates_args=())
def total(tensors: list[torch.Tensor], dim: torch.Tensor) -> list[torch.Tensor]:
    return [sum(tensors).cumsum(int(dim))]


UNCOVERED = {
    "cumsum": (lambda x: x + x.cumsum(1), r"layers\.1\.mlp \(Changed\) is not covered: torch function .*cumsum has"),
    "mean over tokens": (lambda x: x - x.mean(1, keepdim=True), r"mean over dimension 1"),
    "matmul": (lambda x: x @ torch.ones(x.shape[-1], x.shape[-1]), r"matmul"),
    "erf": (torch.erf, "erf"),
    "dropout": (nn.Dropout(0.1), r"dropout in training"),
    "noise": (lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1), "uniform_"),
    "token shift": (shift, "depends on the one beside it|differs from the same one"),
    "largest over tokens": (lambda x: x / x.amax(1, keepdim=True), "depends on the one beside it"),
    "complex numbers": (lambda x: (x * torch.complex(x, x)).real, "complex"),
    "a tuple of whole numbers": (lambda x: x * tables(torch.zeros(1, dtype=torch.int64))[0], "tables"),
    "a list of numbers": (lambda x: total([x, x], torch.tensor(1))[0], "total"),
    "a scaled sum": (lambda x: torch.add(x, x, alpha=0.3), "torch.add with alpha has"),
    "reversal": (lambda x: x.flip(1), "depends on the one beside it, or a token on one after it"),
}


@pytest.mark.parametrize("op", UNCOVERED)
def test_a_model_with_an_uncovered_op_is_refused_and_left_as_it_was(checkpoint, op):
    change, message = UNCOVERED[op]
    model = plain(checkpoint("llama"))
    model.model.layers[1].mlp = Changed(model.model.layers[1].mlp, change)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match=message):
        make_exact(model)
    assert [type(module) for module in model.modules()] == kinds
    assert model.config._attn_implementation == "sdpa"


def numbered(model):
    """Its layers depend on their number, which counts from 0 in a stage."""
    for layer in model.model.layers:
        layer.mlp = Changed(layer.mlp, lambda x, of=layer.self_attn: x * 2.0 ** (of.layer_idx % 2))


def doubled(model):
    """It does something after its last layer, whichever that is."""

    def change(module, args, out):
        out.last_hidden_state = out.last_hidden_state * 2

    model.model.register_forward_hook(change)


def counted(model):
    """Its layers depend on how many there are."""
    for layer in model.model.layers:
        layer.mlp = Changed(layer.mlp, lambda x: x * 2.0**-model.config.num_hidden_layers)


@pytest.mark.parametrize("change", [numbered, doubled, counted])
def test_a_model_whose_stages_would_compute_something_else_is_refused_and_left_as_it_was(checkpoint, change):
    model = plain(checkpoint("llama"))
    change(model)

    def state():
        base = model.model
        attributes = {*vars(base)}, {*vars(model)}
        return dict(vars(model.config)), [*base.layers], base.norm, len(base._forward_pre_hooks), attributes

    before = state()
    with pytest.raises(UnsupportedModelError, match="as stages of a pipeline"):
        make_exact(model)
    assert state() == before
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [*range(len(model.model.layers))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_each_family_run_one_by_one(tmp_path, family):
    """Or the check of stages would have nothing to compare."""
    SelfCheck(exact_model(make_family(tmp_path, family))).stages()


def test_a_model_whose_layers_cannot_run_alone_loads_and_says_so(checkpoint, caplog):
    model = plain(checkpoint("llama"))
    model.model.layers[0].mlp = Changed(model.model.layers[0].mlp, lambda x: x * {2: 1.0}[len(model.model.layers)])
    make_exact(model)
    assert "LlamaForCausalLM runs in one stage only: a layer alone raises KeyError(1)" in caplog.text
    assert len(model.model.layers) == 2 and "given" not in vars(model.model)


EXACT = {
    "relu": lambda x: x.relu(),
    "sigmoid": torch.sigmoid,
    "softmax of a row": lambda x: F.softmax(x, -1),
    "mean of a row": lambda x: x - x.mean(-1, keepdim=True),
}


@pytest.mark.parametrize("op", EXACT)
def test_a_model_with_another_covered_op_is_exact(checkpoint, op):
    model = plain(checkpoint("llama"))
    model.model.layers[1].mlp = Changed(model.model.layers[1].mlp, EXACT[op])
    make_exact(model)
    ids = prompt_of(50)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
        prepare_rollout(model)
        layout = ops.packed_layout([len(ids)], group_size(model.config), model.device)
        caches = new_kv_caches(model, layout.num_blocks)
        found = model.lm_head.logits(hidden_states(model, torch.tensor(ids), layout, caches))
    assert torch.equal(found, expected)


def test_an_mlp_whose_activation_is_a_lambda_is_the_role_that_it_computes(checkpoint):
    mlp = plain(checkpoint("llama")).model.layers[0].mlp
    del mlp.act_fn
    mlp.act_fn = lambda x: F.gelu(x)
    assert role_of(mlp) == (ExactMLP, {"activation": "gelu"})
    for other in (lambda x: 1.001 * F.gelu(x), lambda x: F.gelu(x.clamp(max=7.0)), lambda x: F.gelu(x).clamp(max=90.0)):
        mlp.act_fn = other
        assert role_of(mlp) is None


class Swish(nn.Module):
    """SiLU, as long as beta is one."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def test_what_holds_more_than_its_role_reads_has_none(tmp_path):
    model = plain(make_family(tmp_path, "qwen3_moe", mlp_only_layers=[0]))
    mlp, rotary, experts = model.model.layers[0].mlp, model.model.rotary_emb, model.model.layers[1].mlp.experts
    assert role_of(mlp) and role_of(rotary) and check_experts("experts", experts) == "silu"
    mlp.act_fn = Swish()
    rotary.gain = nn.Parameter(torch.ones(()))
    experts.act_fn = Swish()
    assert role_of(mlp) is None and role_of(rotary) is None
    with pytest.raises(UnsupportedModelError, match="have further weights"):
        check_experts("experts", experts)


class Scaled(nn.Module):
    """A norm with something done to its result."""

    def __init__(self, norm, change):
        super().__init__()
        self.weight, self.variance_epsilon, self.change = norm.weight, norm.variance_epsilon, change

    def forward(self, x):
        rows = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.change(self.weight, rows)


def test_a_norms_form_is_found_by_probing(checkpoint):
    norm = plain(checkpoint("llama")).model.norm
    weight = norm.weight.detach().clone()
    assert role_of(norm) == (ExactRMSNorm, {"variance_epsilon": 1e-6, "offset": 0.0})
    assert role_of(Scaled(norm, lambda w, n: (1 + w) * n))[1]["offset"] == 1.0
    assert role_of(Scaled(norm, lambda w, n: w * n + 0.01)) is None
    shifted = Scaled(norm, lambda w, n: w * n + shifted.shift)
    shifted.register_buffer("shift", torch.zeros(len(weight)))
    assert role_of(shifted) is None
    other = Scaled(norm, lambda w, n: w * n)
    other.variance_epsilon, other.eps = 1e-5, 1e-6
    assert role_of(other)[1]["variance_epsilon"] == 1e-5
    assert torch.equal(norm.weight, weight)


def errors(found, expected, exact) -> tuple[float, float]:
    """How far two are from the third, at most, over its size."""
    first, second, size = (x.detach().abs().max().item() for x in (found - exact, expected - exact, exact))
    return first / size, second / size


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_transformers_does(tmp_path, family):
    """A role that were another function would be exact, and no schedule would tell. Against fp64: logits and gradients
    of fp32 are as near as transformers' own, within a factor."""
    path = make_family(tmp_path, family)
    ids = torch.tensor([prompt_of(40)])
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    models = [exact_model(path)]
    models += [AutoModelForCausalLM.from_pretrained(path, dtype=d, **settings) for d in (torch.float32, torch.float64)]
    logits = [model(ids, use_cache=False).logits for model in models]
    for each in logits:
        each.double().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).sum().backward()
    ours, theirs = errors(*logits)
    assert ours < 5 * theirs + 1e-7, (ours, theirs)
    for name, exact in models[2].named_parameters():
        if exact.grad is not None and exact.grad.abs().max() > 1e-6:
            ours, theirs = errors(*(model.get_parameter(name).grad for model in models[:2]), exact.grad)
            assert ours < 5 * theirs + 1e-5, (name, ours, theirs)


# --- traps ------------------------------------------------------------------------------------------------------------


def test_what_is_done_to_logits_after_lm_head_is_found_or_refused(tmp_path):
    """A scale that the config names is part of every log-prob; another is refused."""
    path = make_family(tmp_path, "granite")
    model = exact_model(path)
    assert model.get_output_embeddings().scale == ops.LogitScale(3.7, True)
    ids = torch.tensor([prompt_of(20)])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
        expected = ops.logit_logprobs(logits, ids[0, 1:], ops.RowParams.repeat(19)).logprob
        assert torch.equal(token_logprobs(model, ids)[0, 1:], expected)
    other = plain(path)
    forward = type(other).forward

    def scaled(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = out.logits * 0.123
        return out

    other.__class__ = type(type(other).__name__, (type(other),), {"forward": scaled})
    with pytest.raises(UnsupportedModelError, match="changes logits after lm_head"):
        make_exact(other)


def test_a_softcap_after_lm_head_is_refused_by_its_op(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"the model \(Gemma3ForCausalLM\): tanh"):
        exact_model(make_family(tmp_path, "gemma3_text", final_logit_softcapping=30.0))


def test_the_gradient_of_scaled_logits_is_autograds(tmp_path):
    model = exact_model(make_family(tmp_path, "granite"))
    ids = torch.tensor([prompt_of(20)])
    token_logprobs(model, ids).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logp = model(ids).logits.log_softmax(-1)[0, :-1]
    logp.gather(1, ids[0, 1:, None]).sum().backward()
    for ours, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=1e-4, atol=1e-4)


def test_a_tied_scaled_embedding_is_kept_once_and_still_scales(tmp_path):
    model = exact_model(make_family(tmp_path, "gemma3_text"))
    embedding = model.get_input_embeddings()
    ids = torch.tensor([5, 900, 3])
    before = embedding(ids)
    prepare_rollout(model)
    assert isinstance(embedding, PackedEmbedding) and embedding.weight.numel() == 0
    assert torch.equal(embedding(ids), before)
    assert not torch.equal(embedding.packed.rows(ids), before)


def test_a_tied_embedding_that_reads_its_weight_in_its_own_way_is_refused(checkpoint):
    class Other(nn.Embedding):
        def forward(self, ids):
            return self.weight[ids]

    model = make_exact(plain(checkpoint("llama")))
    model.get_input_embeddings().__class__ = Other
    with pytest.raises(UnsupportedModelError, match="a tied Other"):
        prepare_rollout(model)


def test_a_survey_tells_what_an_engine_refuses(checkpoint, monkeypatch):
    monkeypatch.setattr(PackedEmbedding, "forward", lambda self, ids: 2 * self.packed.rows(ids))
    assert "a tied Embedding that doesn't look rows up" in survey(checkpoint("llama")).problem


def fused(path, kind):
    """Whether each layer of an engine has a fused form."""
    model = exact_model(path)
    prepare_rollout(model)
    modules = model.base_model.layers if kind is FusedLayer else [x.self_attn for x in model.base_model.layers]
    return [isinstance(module, kind) for module in modules]


@pytest.mark.parametrize(
    ("family", "layers", "attention"),
    [
        ("qwen3", 3, [True] * 3),
        ("mixtral", 3, [True] * 3),  # a window that its own code reads
        ("smollm3", 3, [True, False, True]),  # a layer without positions
        ("olmo2", 0, [False] * 3),  # norms after, and of whole projections
        ("granite", 0, [True] * 3),  # scaled sums
        ("gemma3_text", 0, [True] * 3),
        ("phi3", 3, [False] * 3),  # one projection for all
        ("glm4_moe", 3, [False] * 3),  # half a head is turned
        ("ministral3", 3, [False] * 3),  # scaled by position, far beyond what a probe has
    ],
)
def test_a_fused_form_is_used_only_where_it_is_the_models_own(tmp_path, family, layers, attention):
    path = make_family(tmp_path, family)
    assert fused(path, FusedAttention) == attention
    assert sum(fused(path, FusedLayer)) == layers


def test_a_layer_that_looks_at_positions_is_not_fused(checkpoint, monkeypatch):
    """At short ones it is the same; at long ones it isn't."""
    model = plain(checkpoint("llama"))
    attention = type(model.model.layers[0].self_attn)

    class Far(attention):
        def forward(self, hidden_states, position_ids=None, **kwargs):
            hidden_states = torch.where(position_ids[..., None] > 4096, hidden_states * 2, hidden_states)
            return super().forward(hidden_states, position_ids=position_ids, **kwargs)

    model.model.layers[0].self_attn.__class__ = Far
    prepare_rollout(make_exact(model))
    assert [isinstance(layer.self_attn, FusedAttention) for layer in model.model.layers] == [False, True]


@pytest.mark.parametrize("part", ["", "self_attn", "mlp"])
@pytest.mark.parametrize("register", [nn.Module.register_parameter, nn.Module.register_buffer])
def test_a_part_with_a_scale_that_is_one_when_it_is_loaded_follows_it_from_there_on(checkpoint, part, register):
    """Neither a role nor a fused form reads it, so the part has none."""
    ids, found = torch.tensor(prompt_of(50)), {}
    for name in ("trainer", "engine"):
        model = plain(checkpoint("llama"))
        module = model.model.layers[0].get_submodule(part)

        class Scaling(type(module)):
            @functools.wraps(type(module).forward)
            def forward(self, *args, **kwargs):
                result = super().forward(*args, **kwargs)
                return (self.gain * result[0], *result[1:]) if isinstance(result, tuple) else self.gain * result

        module.__class__ = Scaling
        register(module, "gain", nn.Parameter(torch.ones(())))
        make_exact(model)
        if name == "engine":
            prepare_rollout(model)
        layout = ops.packed_layout([50], group_size(model.config), model.device)
        for gain in (1.0, 0.5):
            module.gain.data.fill_(gain)
            with torch.no_grad():
                found[name, gain] = hidden_states(model, ids, layout, new_kv_caches(model, layout.num_blocks))
    assert not torch.equal(found["trainer", 1.0], found["trainer", 0.5])
    assert all(torch.equal(found["trainer", gain], found["engine", gain]) for gain in (1.0, 0.5))


def test_attention_that_asks_for_more_is_refused(checkpoint):
    model = plain(checkpoint("llama"))
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, s_aux=torch.zeros(5), **kwargs)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn .* takes 's_aux'"):
        make_exact(model)


@pytest.mark.parametrize("cuts", [(0, 1, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("family", ["granite", "gemma3_text", "smollm3", "cohere2", "qwen3_moe", "glm4_moe"])
@torch.no_grad()
def test_stages_one_after_the_other_are_the_model_as_bits(tmp_path, family, cuts):
    """Scaled embeddings are scaled once, layers keep their kinds and positions, logits their scale."""
    path = make_family(tmp_path, family)
    given = {"input_ids": torch.tensor([prompt_of(50)])}
    whole = exact_model(path)(**given).logits
    for layers in itertools.pairwise(cuts):
        stage = stage_model(path, "float32", "cpu", layers)
        hidden = stage.base_model(**given).last_hidden_state
        given = {"inputs_embeds": hidden}
    assert torch.equal(stage.lm_head.logits(hidden), whole)


# --- mixtures of experts ----------------------------------------------------------------------------------------------


def test_routers_are_what_chooses_experts(tmp_path):
    model = exact_model(make_family(tmp_path, "glm4_moe"))
    routers = {name: m for name, m in model.named_modules() if is_router(m)}
    chooser = "mlp" if BEFORE_5_13 else "mlp.gate"
    assert sorted(routers) == [f"model.layers.{layer}.{chooser}" for layer in (1, 2)]
    assert all((m.routing.num_experts, m.routing.top_k) == (6, 2) for m in routers.values())
    assert all(isinstance(m, UnderMode) for m in routers.values())


@pytest.mark.parametrize(
    ("family", "settings", "form"),
    [
        ("qwen3_moe", {}, FusedRouter),
        ("qwen3_moe", {"norm_topk_prob": False}, PlainRouter),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 7}, None),  # whose weights' sum is 1 anyhow
        ("qwen2_moe", {}, PlainRouter),  # in a block that runs under the mode
        ("mixtral", {}, FusedRouter),
        ("granitemoe", {}, None),  # a softmax of the chosen
        ("glm4_moe", {}, None),  # sigmoids, groups and a bias
        ("ernie4_5_moe", {}, None),  # a bias
    ],
)
def test_a_router_is_fused_only_where_the_form_is_its_own(tmp_path, family, settings, form):
    """Fused or not, its choice is noted, and others that are given take its place, to the bits of the trainer."""
    trainer = exact_model(make_family(tmp_path, family, **settings))
    engine = exact_model(tmp_path)
    prepare_rollout(engine)
    forms = {type(router).__mro__[1] for router in routers(engine).values()}
    assert forms == {form} if form else not any(issubclass(each, FusedRouter) for each in forms)
    given, layout = torch.tensor(prompt_of(50)), ops.packed_layout([50], group_size(engine.config), engine.device)
    with torch.no_grad():
        for foreign in (False, True):
            found = []
            for model in (trainer, engine):
                routed = RoutedExperts.of_batch(model, [50], None, model.device, note=True)
                if foreign:
                    routed.given = torch.arange(routed.noted.shape[2]).expand(routed.noted.shape)
                caches = new_kv_caches(model, layout.num_blocks)
                found.append((hidden_states(model, given, layout, caches, routed_experts=routed), routed.noted))
            assert all(map(torch.equal, *found))


def test_routers_whose_scores_go_to_few_experts_show_their_form_with_even_ones(tmp_path):
    """Where the softmax gives all to one expert, a sum of the largest changes no bit."""
    model = exact_model(make_family(tmp_path, "qwen3_moe", norm_topk_prob=False))
    for router in routers(model).values():
        router.weight.data *= 1e6
    prepare_rollout(model)
    assert {type(router).__mro__[1] for router in routers(model).values()} == {PlainRouter}


def run_checks(model):
    check = SelfCheck(model)
    check.batches()
    check.paged()


def test_a_fused_form_that_errs_in_an_engines_steps_alone_is_refused(tmp_path, monkeypatch):
    """Probed with a prompt it gives the model's own bits; two sequences' last tokens are what an engine computes."""
    route = FusedRouter.forward

    def bent(self, hidden_states):
        logits, weights, ids = route(self, hidden_states)
        return logits, weights * 1.25 if len(weights) == 2 else weights, ids

    monkeypatch.setattr(FusedRouter, "forward", bent)
    with pytest.raises(UnsupportedModelError, match="chunks and single tokens over the paged cache differ"):
        LLM(make_family(tmp_path, "qwen2_moe"), kv_cache_memory_bytes=1 << 20)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_negative_control_with_other_experts_bits_differ(tmp_path, experts):
    """In an otherwise exact trainer, in fp32. Two of them depend on the batch, too."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 8, "head_dim": 32}
    path = make_family(tmp_path, "qwen3_moe", **sizes)
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    out = llm.generate([prompt_of(9)], params, use_tqdm=False)[0].completions[0]
    model = exact_model(path)
    model.set_experts_implementation(experts)
    with torch.no_grad():
        found = token_logprobs(model, [prompt_of(9) + out.token_ids])[0][9:]
    assert not torch.equal(torch.tensor(out.logprobs), found)
    if experts != "batched_mm":  # one product for each pair, on CPUs
        with pytest.raises(UnsupportedModelError, match=r"depends on|differs from"):
            run_checks(model)


@pytest.mark.parametrize(
    "module",
    [
        *[pytest.param(m, marks=pytest.mark.slow) for m in (None, "model.layers.2.mlp.gate")],
        "model.layers.2.mlp.experts",
    ],
)
def test_verify_passes_and_names_a_fault_in_experts_or_router(tmp_path, module):
    report = verify(make_family(tmp_path, "qwen3_moe"), plant_fault=module, use_tqdm=False)
    assert report.ok == (module is None)
    assert module is None or report.fault.startswith(f"{module} (")


def test_a_router_with_noise_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"uniform"):
        exact_model(make_family(tmp_path, "mixtral", router_jitter_noise=0.1))


def test_updates_of_a_mixture_of_experts_are_on_policy(tmp_path):
    """Also packed experts read back are those that came."""
    path = make_family(tmp_path / "0", "glm4_moe")
    other = exact_model(make_family(tmp_path / "1", "glm4_moe", seed=1))
    llm = LLM(path, kv_cache_memory_bytes=2**22)
    llm.update_weights(other)
    assert llm.weight_checksums() == LLM(tmp_path / "1", kv_cache_memory_bytes=2**22).weight_checksums()
    out = llm.generate([prompt_of(9)], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)[0].completions[0]
    with torch.no_grad():
        expected = token_logprobs(other, [prompt_of(9) + out.token_ids])[0][9:]
    assert torch.equal(torch.tensor(out.logprobs), expected)
