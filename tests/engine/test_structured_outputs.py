"""Structured outputs: what comes follows the grammar, and its log-probs are the oracle's and the trainer's, as bits."""

import dataclasses
import json
import pickle
import random
import re

import pytest
import torch
from transformers import AutoTokenizer

from samebits import LLM, SamplingParams
from samebits.engine import StructuredOutputsParams, structured_outputs
from samebits.engine.structured_outputs import Constraint, GrammarError
from samebits.kernels import ops
from samebits.trainer import exact_model, rescore, token_logprobs

from helpers.oracle import oracle
from helpers.schedules import FILTERS, random_requests, run_schedule
from helpers.serving import served_checkpoint
from helpers.structured import KINDS, SCHEMA, random_structure

PROMPT = [17, 900, 3, 44]


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    return served_checkpoint(checkpoint("qwen3"), tmp_path_factory.mktemp("structured") / "model")


@pytest.fixture(scope="module")
def tokenizer(path):
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def llm(path):
    return LLM(path)


def structured(given: dict, **more) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**given), **more)


def structured_requests(rng: random.Random, count: int):
    """Requests of which half have a grammar."""
    for prompt, params in random_requests(rng, 1001, count, 40):
        if rng.random() < 0.6:
            structure = {"structured_outputs": random_structure(rng), "min_tokens": 0}
            params = dataclasses.replace(params, **structure)
        yield prompt, params


def check_bits(model, tokenizer, requests, results) -> tuple[int, int]:
    """Engine against oracle and trainer, as bits. Returns how many completions had a grammar, and ended by it."""
    structured = ended = 0
    for (prompt, params), out in zip(requests, results, strict=True):
        found = [(c.token_ids, c.logprobs) for c in out.completions]
        assert found == oracle(model, prompt, params, (2,), tokenizer)
        sequences = [prompt + c.token_ids for c in out.completions]
        lens = [len(prompt)] * params.n
        scored = token_logprobs(model, sequences, params, prompt_lens=lens, tokenizer=tokenizer)
        for c, logprobs in zip(out.completions, scored, strict=True):
            assert torch.equal(torch.tensor(c.logprobs), logprobs[len(prompt) :].detach())
        if params.structured_outputs is not None:
            structured += params.n
            ended += sum(c.token_ids[-1] == 2 for c in out.completions)
    return structured, ended


STAGES = {"pipeline_parallel_size": 2, "backend": "inproc", "batches_in_flight": 3}


@pytest.mark.parametrize(("dtype", "layout"), [("float32", {}), ("bfloat16", STAGES)], ids=["one", "stages"])
def test_no_schedule_changes_a_bit_of_structured_outputs(path, tokenizer, dtype, layout):
    model = exact_model(path, dtype)
    structured = ended = preemptions = hits = 0
    for case in range(12):
        if ended and preemptions and hits:
            break
        rng = random.Random(f"structured-{case}-{dtype}")
        requests = list(structured_requests(rng, 6))
        results, llm = run_schedule(path, dtype, rng, requests, [model], **layout)
        found = check_bits(model, tokenizer, requests, results)
        structured += found[0]
        ended += found[1]
        preemptions += llm.stats().preemptions
        hits += llm.stats().prefix_hit_tokens
    assert structured and ended and preemptions and hits, "the schedules exercised nothing"


@pytest.mark.slow
def test_replicas_give_the_same_structured_outputs(path, tokenizer, ray_cluster):
    model = exact_model(path)
    requests = list(structured_requests(random.Random(7), 8))
    with LLM(path, replicas=2, kv_cache_memory_bytes=2**22) as llm:
        results = llm.generate([p for p, _ in requests], [p for _, p in requests], use_tqdm=False)
    assert check_bits(model, tokenizer, requests, results)[0]


def test_a_sample_that_moves_to_another_replica_takes_its_grammar_along(path, tokenizer):
    llm = LLM(path)
    params = SamplingParams(max_tokens=30, seed=3, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    request = llm.process(PROMPT, params, "moves")
    llm.add_request(request)
    while request.samples[0].num_completion_tokens < 5:
        llm.step()
    here = request.samples[0]
    there = pickle.loads(pickle.dumps(request)).samples[0]
    assert there.constraint is None
    there.begin_constraint(tokenizer)
    assert here.num_completion_tokens == there.num_completion_tokens
    mask = here.mask(here.num_tokens)
    assert (mask == there.mask(there.num_tokens)).all()
    assert not (mask == Constraint(params.structured_outputs, tokenizer, 1001, [2]).mask).all()
    llm.abort("moves")


def test_negative_control_a_trainer_without_the_grammar_has_other_bits(path, tokenizer):
    params = SamplingParams(max_tokens=30, seed=3, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    completion = LLM(path).generate(PROMPT, params, use_tqdm=False)[0].completions[0]
    model = exact_model(path)
    sequences = [PROMPT + completion.token_ids]
    expected = torch.tensor(completion.logprobs)
    for same, known in (params, True), (SamplingParams(), False):
        found = token_logprobs(model, sequences, same, prompt_lens=[4], tokenizer=tokenizer)[0][4:]
        assert torch.equal(found, expected) is known
    ((rescored, _),) = rescore(model, [(PROMPT, completion.token_ids)], params, tokenizer=tokenizer)
    assert torch.equal(rescored, expected)
    other = dataclasses.replace(params, structured_outputs=StructuredOutputsParams(choice=["no"]))
    with pytest.raises(GrammarError, match="number 0 of a completion, is not what structured_outputs allows"):
        token_logprobs(model, sequences, other, prompt_lens=[4], tokenizer=tokenizer)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_ends_by_itself_follows_its_grammar(path, kind):
    params = [
        SamplingParams(max_tokens=60, seed=seed, structured_outputs=StructuredOutputsParams(**kind), **setting)
        for seed, setting in enumerate([*FILTERS, {"logprobs": 5}])
    ]
    outputs = LLM(path).generate([PROMPT] * len(params), params, use_tqdm=False)
    texts = [o.completions[0].text for o in outputs if o.completions[0].finish_reason == "stop"]
    if "regex" in kind:
        assert all(re.fullmatch(kind["regex"], text) for text in texts)
    if "choice" in kind:
        assert texts
        assert set(texts) <= set(kind["choice"])
    if "json" in kind:
        assert all(json.loads(text)["name"] in ("add", "multiply") for text in texts)
    top = outputs[-1].completions[0]
    for token, logprob, best, rank in zip(top.token_ids, top.logprobs, top.top_logprobs, top.ranks, strict=True):
        assert best.get(token, logprob) == logprob
        assert rank <= 5 or token not in best


def test_gradients_are_those_of_a_softmax_over_the_allowed_tokens(path, tokenizer):
    model = exact_model(path)
    params = SamplingParams(max_tokens=12, seed=1, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    ids = LLM(path).generate(PROMPT, params, use_tqdm=False)[0].completions[0].token_ids
    token_logprobs(model, [PROMPT + ids], params, prompt_lens=[4], tokenizer=tokenizer)[0].sum().backward()
    ours = model.get_output_embeddings().weight.grad.clone()
    model.zero_grad()
    logits = model(torch.tensor([PROMPT + ids])).logits[0, 3:-1].double()
    masks = Constraint(params.structured_outputs, tokenizer, 1001, [2]).masks(ids)
    rows = ops.RowParams.repeat(len(ids))
    rows.masks, rows.mask_rows = ops.stack_masks([*masks])
    for row, masked in rows.outside(1001, logits.device):
        logits = logits.masked_fill((torch.arange(len(ids)) == row)[:, None] & masked, -torch.inf)
    logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum().backward()
    theirs = model.get_output_embeddings().weight.grad
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


WRONG = [
    ({}, "exactly one of"),
    ({"regex": "a", "choice": ["b"]}, "exactly one of"),
    ({"json": {}, "regex": "a"}, "exactly one of"),
    ({"json_object": False}, "exactly one of"),
    ({"choice": []}, "list of non-empty strings"),
    ({"regex": "[a-"}, "unclosed character class"),
    ({"json": "{"}, "structured_outputs"),
    ({"json": {"type": "objct"}}, "objct"),
    ({"choice": "ab"}, "list of non-empty strings"),
    ({"grammar": "start: nothing"}, "nothing"),
    ({"regex": 7}, "must be a string"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=str)
def test_a_wrong_grammar_is_refused_before_anything_runs(llm, given, message):
    with pytest.raises(GrammarError, match=message):
        llm.generate([PROMPT, PROMPT], [SamplingParams(), structured(given)], use_tqdm=False)
    assert not llm.has_unfinished_requests()


def test_a_grammar_is_compiled_once_for_all_that_ask_for_it(llm, monkeypatch):
    found, real = [], structured_outputs.grammar_tokenizer
    monkeypatch.setattr(structured_outputs, "grammar_tokenizer", lambda *how: found.append(how) or real(*how))
    params = [structured({"choice": ["once", "or", "twice"]}, n=3, max_tokens=9, seed=seed) for seed in range(4)]
    outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    assert {c.text for o in outputs for c in o.completions} <= {"once", "or", "twice"}
    assert len(found) == 1


def test_what_has_no_meaning_with_a_grammar_is_refused(path, checkpoint):
    structure = StructuredOutputsParams(regex="a+")
    for more in ({"min_tokens": 1}, {"ignore_eos": True}):
        with pytest.raises(ValueError, match="leave min_tokens and ignore_eos out"):
            SamplingParams(structured_outputs=structure, **more)
    with pytest.raises(TypeError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})
    params = SamplingParams(structured_outputs=structure)
    with pytest.raises(ValueError, match="structured outputs need a tokenizer"):
        LLM(checkpoint("llama")).generate(PROMPT, params)
    model = exact_model(path)
    with pytest.raises(ValueError, match="give prompt_lens"):
        token_logprobs(model, [[1, 2]], params)
    with pytest.raises(ValueError, match="give tokenizer"):
        token_logprobs(model, [[1, 2]], params, prompt_lens=[1])


def test_a_grammar_that_the_vocabulary_cant_follow_ends_its_request_alone(path, monkeypatch):
    allowed = structured_outputs._allowed

    def fails(matcher):
        if matcher.is_accepting():
            raise GrammarError("structured_outputs: the grammar and the vocabulary leave no token here")
        return allowed(matcher)

    monkeypatch.setattr(structured_outputs, "_allowed", fails)
    structured = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["no"]))
    bad, good = LLM(path).generate([PROMPT] * 2, [structured, SamplingParams(max_tokens=20)], use_tqdm=False)
    assert bad.completions[0].finish_reason == "error"
    assert "leave no token here" in bad.completions[0].stop_reason
    assert good.completions[0].finish_reason in ("stop", "length")


def test_a_grammar_is_followed_without_drafts_and_to_the_same_bits(path, rows_cost_nothing):
    """The mask of a drafted token would need the draft's own state of the grammar: such samples draft nothing."""
    params = SamplingParams(max_tokens=30, seed=3, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    free = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    found = []
    for settings in ({}, {"speculative_config": {"method": lambda ids: [ids[-1]] * 3}}):
        llm = LLM(path, **settings)
        (out,) = llm.generate([PROMPT], params, use_tqdm=False)
        assert llm.stats().draft_tokens == 0
        beside = llm.generate([PROMPT] * 2, [params, free], use_tqdm=False)
        found.append([each.completions for each in (out, *beside)])
    assert found[0] == found[1]
    assert llm.stats().draft_tokens > 0, "nothing was drafted for the other sample: this proves nothing"
