"""Plain calls of an exact model, as a trainer or an evaluation makes them: each row what it is alone, or an error."""

import pytest
import torch

from samebits.model import exact_model

from helpers.engines import prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral"])
def model(request, checkpoint):
    return exact_model(checkpoint(request.param))


@torch.no_grad()
def logits(model, ids, **arguments):
    return model(torch.tensor(ids), **arguments).logits


def test_rows_of_a_batch_are_what_each_is_alone(model):
    rows = [prompt_of(60, seed) for seed in range(3)]
    together = logits(model, rows)
    for row, ids in zip(together, rows, strict=True):
        assert torch.equal(row, logits(model, [ids])[0])


def test_sequences_packed_into_a_row_by_their_positions_are_what_each_is_alone(model):
    sequences = [prompt_of(length, length) for length in (1, 45, 2, 60)]
    positions = torch.tensor([[p for ids in sequences for p in range(len(ids))]])
    packed = logits(model, [[t for ids in sequences for t in ids]], position_ids=positions)[0]
    for part, ids in zip(packed.split([len(ids) for ids in sequences]), sequences, strict=True):
        assert torch.equal(part, logits(model, [ids])[0])
    rows = logits(model, [sequences[3]] * 2, position_ids=torch.arange(60)[None])  # one row of positions for all
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], logits(model, [sequences[3]])[0])


def test_logits_to_keep_are_the_last_rows(model):
    ids = [prompt_of(33)]
    assert torch.equal(logits(model, ids, logits_to_keep=1)[0, 0], logits(model, ids)[0, -1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"position_ids": torch.arange(5, 14)[None]}, ValueError, "position_ids must run 0, 1, 2"),
        ({"position_ids": torch.tensor([[0, 1, 2, 5, 6, 7, 8, 9, 10]])}, ValueError, "position_ids must run 0, 1, 2"),
        ({"attention_mask": torch.tensor([[0, *[1] * 8]])}, ValueError, "takes no padding mask"),
    ],
    ids=["from 5", "a hole", "padding"],
)
def test_a_call_that_attention_would_misread_is_refused(model, arguments, error, message):
    with pytest.raises(error, match=message):
        logits(model, [prompt_of(9)], **arguments)


def test_a_cache_of_transformers_is_refused(model):
    with pytest.raises(NotImplementedError, match=r"no HF cache.*generate with samebits\.LLM"):
        model.generate(torch.tensor([prompt_of(9)]), max_new_tokens=3, use_cache=True)


def test_dropout_in_attention_is_refused(checkpoint):
    model = exact_model(checkpoint("llama")).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(NotImplementedError, match="dropout"):
        logits(model, [prompt_of(9)])


def test_a_cast_that_rounds_the_rotary_table_is_refused(checkpoint):
    with pytest.raises(TypeError, match=r"inv_freq was cast to torch\.bfloat16; load with dtype="):
        logits(exact_model(checkpoint("llama")).to(torch.bfloat16), [prompt_of(9)])
