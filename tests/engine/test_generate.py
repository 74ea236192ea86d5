"""What `LLM.generate` promises."""

import pytest
import torch

from samebits import SamplingParams
from samebits.trainer import exact_model

from helpers.engines import PROMPT, assert_idle, engine, generate, one, pairs, prompt_of, trainer_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")


def test_outputs_come_in_the_order_of_the_prompts_whoever_finishes_first(shared, checkpoint):
    path = checkpoint("llama")
    prompts = [prompt_of(n, n) for n in (40, 1, 9, 70, 3)]
    params = [SamplingParams(max_tokens=m, seed=m, ignore_eos=True) for m in (3, 30, 1, 12, 20)]
    outputs = generate(shared(path, max_num_seqs=3, max_num_batched_tokens=16), prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.completions[0].token_ids) for o in outputs] == [3, 30, 1, 12, 20]
    assert all(o.finished and o.completions[0].finish_reason == "length" for o in outputs)
    for prompt, setting, output in zip(prompts, params, outputs, strict=True):
        assert pairs(output) == pairs(generate(shared(path), [prompt], setting)[0])


def test_one_sampling_params_serves_all_prompts(llm):
    prompts, params = [prompt_of(5, 1), prompt_of(6, 2)], SamplingParams(max_tokens=6, seed=1)
    together = generate(llm, prompts, params)
    assert list(map(pairs, together)) == list(map(pairs, generate(llm, prompts, [params, params])))


def test_a_prompt_may_be_a_list_a_dict_or_a_tensor(llm):
    params = SamplingParams(max_tokens=6, seed=1)
    forms = [PROMPT, [PROMPT], {"prompt_token_ids": PROMPT}, [torch.tensor(PROMPT)], [tuple(PROMPT)]]
    outputs = [generate(llm, form, params) for form in forms]
    assert all(len(o) == 1 and pairs(o[0]) == pairs(outputs[0][0]) for o in outputs)
    assert generate(llm, [], params) == []


def test_without_sampling_params_the_defaults_apply(llm):
    assert len(one(llm, PROMPT, SamplingParams(ignore_eos=True)).token_ids) == 16
    assert len(llm.generate(PROMPT, use_tqdm=False)[0].completions[0].token_ids) <= 16


def test_samples_of_a_group_share_the_prompt(llm):
    prompt, before = prompt_of(75), llm.stats()
    output = generate(llm, [prompt], SamplingParams(n=6, max_tokens=5, seed=3, ignore_eos=True))[0]
    stats = llm.stats()
    computed = stats.prompt_tokens_computed - before.prompt_tokens_computed
    assert computed == 75, "the prompt was computed more than once"
    assert stats.generation_tokens - before.generation_tokens == 30
    for i, completion in enumerate(output.completions):
        assert completion.index == i
        assert len(completion.token_ids) == len(completion.logprobs) == 5
    assert_idle(llm)


@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 1}, {"max_num_seqs": 2, "tokens": 96}, {"max_num_batched_tokens": 7}]
)
def test_a_group_is_the_same_whether_its_samples_run_together_or_one_by_one(shared, checkpoint, settings):
    path, prompt, params = checkpoint("llama"), prompt_of(50), SamplingParams(n=5, max_tokens=20, seed=3)
    together = generate(shared(path), [prompt], params)[0]
    assert pairs(generate(shared(path, **settings), [prompt], params)[0]) == pairs(together)


def test_logprobs_are_the_trainers_bit_for_bit_at_any_temperature_in_bf16(checkpoint):
    """Exactness only at T = 1, because the trainer divides logits in bf16 (VeXact)."""
    path = checkpoint("qwen2")
    llm, model = engine(path, dtype="bfloat16"), exact_model(path, "bfloat16")
    for temperature in (0.3, 0.7, 1.0, 1.9):
        params = SamplingParams(n=2, temperature=temperature, max_tokens=20, seed=1)
        for c in generate(llm, [PROMPT], params)[0].completions:
            assert c.logprobs == trainer_logprobs(model, [PROMPT + c.token_ids], params)[0][len(PROMPT) :]
