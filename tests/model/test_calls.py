"""Plain calls of an exact model, as a trainer or an evaluation makes them: each row what it is alone, or an error."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache

from samebits import SamplingParams
from samebits.engine import StructuredOutputsParams
from samebits.model import exact_model
from samebits.model.adapter import is_adapted
from samebits.trainer import selective_log_softmax, token_logprobs

from helpers.adapters import adapted_model
from helpers.engines import SETTINGS, engine, generate, prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 45, 33, 60)
SEQUENCES = [prompt_of(length, length) for length in LENGTHS]
DIGITS = StructuredOutputsParams(regex="[0-9]+")


MODELS = [  # family, dtype, and whether PEFT is around it
    *((family, "float32", False) for family in ("llama", "qwen2", "qwen3", "mistral")),
    ("llama", "bfloat16", False),
    ("qwen3", "bfloat16", False),
    ("qwen2", "float32", True),
    ("llama", "bfloat16", True),
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0]}-{p[1]}{'-adapter' * p[2]}")
def model(request, checkpoint):
    family, dtype, adapted = request.param
    return (adapted_model if adapted else exact_model)(checkpoint(family), dtype)


def engine_of(model):
    """An engine with the model's weights, and with its adapter, if it has one."""
    dtype = str(model.dtype).removeprefix("torch.")
    adapter = {"adapter": model} if is_adapted(model) else {}
    return engine(model.config._name_or_path, dtype=dtype, **adapter)


@torch.no_grad()
def logits(model, ids, **arguments):
    return model(torch.tensor(ids), **arguments).logits


def padded(left=0, right=0):
    """SEQUENCES as rows with some padding at their starts and at their ends, and their attention mask."""
    width = max(LENGTHS) + left + right
    ids = torch.zeros(len(SEQUENCES), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(SEQUENCES):
        start = width - right - len(sequence) if left else 0
        ids[row, start : start + len(sequence)] = torch.tensor(sequence)
        mask[row, start : start + len(sequence)] = 1
    return ids, mask


def positions_of(mask):
    """Position ids as `generate` of transformers makes them."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)


def test_rows_of_a_batch_are_what_each_is_alone(model):
    rows = [prompt_of(60, seed) for seed in range(3)]
    together = logits(model, rows)
    for row, ids in zip(together, rows, strict=True):
        assert torch.equal(row, logits(model, [ids])[0])


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("with_positions", [True, False], ids=["positions", "no positions"])
@pytest.mark.parametrize("padding", [{"left": 3}, {"right": 3}, {"left": 2, "right": 5}, {}], ids=str)
def test_padded_rows_are_what_each_is_alone(model, padding, with_positions, dtype):
    ids, mask = padded(**padding)
    arguments = {"position_ids": positions_of(mask)} if with_positions else {}
    with torch.no_grad():
        found = model(ids, attention_mask=mask.to(dtype), **arguments).logits
    assert found.dtype == torch.float32 and found.isfinite().all()
    for row, keep, alone in zip(found, mask.bool(), SEQUENCES, strict=True):
        assert torch.equal(row[keep], logits(model, [alone])[0])


def test_the_control_without_exact_ops_differs_when_padded(checkpoint):
    plain = exact_model(checkpoint("llama"), exact=False)
    ids, mask = padded(left=3)
    with torch.no_grad():
        found = plain(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    alone = [logits(plain, [sequence])[0] for sequence in SEQUENCES]
    assert any(not torch.equal(row[keep], a) for row, keep, a in zip(found, mask.bool(), alone, strict=True))
    for row, keep, a in zip(found, mask.bool(), alone, strict=True):
        torch.testing.assert_close(row[keep], a, atol=1e-3, rtol=1e-3)  # it is the padding's rounding alone


def test_sequences_packed_into_a_row_by_their_positions_are_what_each_is_alone(model):
    positions = torch.tensor([[p for ids in SEQUENCES for p in range(len(ids))]])
    packed = logits(model, [[t for ids in SEQUENCES for t in ids]], position_ids=positions)[0]
    for part, ids in zip(packed.split(LENGTHS), SEQUENCES, strict=True):
        assert torch.equal(part, logits(model, [ids])[0])
    rows = logits(model, [SEQUENCES[3]] * 2, position_ids=torch.arange(60)[None])  # one row of positions for all
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], logits(model, [SEQUENCES[3]])[0])


def test_the_batch_of_a_padding_free_collator_is_what_each_is_alone(model):
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, separator_id=-100)
    batch = collate([{"input_ids": ids} for ids in SEQUENCES])
    labels = batch["labels"]
    with torch.no_grad():
        found = model(**batch)
    for part, ids in zip(found.logits[0].split(LENGTHS), SEQUENCES, strict=True):
        assert torch.equal(part, logits(model, [ids])[0])
    assert labels.shape == found.logits.shape[:2] and found.loss.isfinite()


def test_packed_rows_may_be_padded_too(model):
    ids, mask = padded(right=4)
    ids[0, 1:8] = torch.tensor(SEQUENCES[1][:7])
    mask[0, 1:8] = 1
    positions = positions_of(mask)
    positions[0, 1:8] = torch.arange(7)
    with torch.no_grad():
        row = model(ids, attention_mask=mask, position_ids=positions).logits[0]
    assert torch.equal(row[1:8], logits(model, [SEQUENCES[1][:7]])[0])
    assert torch.equal(row[:1], logits(model, [SEQUENCES[0]])[0])


@pytest.mark.parametrize("keep", [1, 7, torch.tensor([0, 20, -1])], ids=str)
def test_logits_to_keep_are_those_rows(model, keep):
    ids, mask = padded(left=3)
    rows = slice(-keep, None) if isinstance(keep, int) else keep
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits[:, rows]
        assert torch.equal(model(ids, attention_mask=mask, logits_to_keep=keep).logits, whole)
    assert torch.equal(logits(model, ids[3:, 3:].tolist(), logits_to_keep=1)[0, 0], whole[3, -1])


def test_embeddings_hidden_states_and_losses_come_in_the_callers_shape(model):
    ids, mask = padded(left=3)
    labels = ids.masked_fill(mask == 0, -100)
    found = model(ids, attention_mask=mask, labels=labels, output_hidden_states=True)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, labels=labels)
    assert torch.equal(found.logits, embedded.logits) and torch.equal(found.loss, embedded.loss)
    alone = model(torch.tensor([SEQUENCES[1]]), output_hidden_states=True)
    assert len(found.hidden_states) == len(alone.hidden_states) == 3
    for states, expected in zip(found.hidden_states, alone.hidden_states, strict=True):
        assert torch.equal(states[1][mask[1].bool()], expected[0])
    as_tuple = model(ids, attention_mask=mask, return_dict=False)
    assert torch.equal(as_tuple[0], found.logits)


def test_the_gradient_of_padded_rows_is_that_of_packed_ones(model):
    ids, mask = padded(left=3)
    keep = mask.bool()
    model.zero_grad()
    model(ids, attention_mask=mask).logits[keep].square().sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    positions = torch.tensor([[p for n in LENGTHS for p in range(n)]])
    model(ids[keep][None], position_ids=positions).logits[0].square().sum().backward()
    expected = [p.grad for p in model.parameters() if p.requires_grad]
    for ours, theirs in zip(found, expected, strict=True):
        ulp = torch.finfo(ours.dtype).eps  # rows of padding are among the sums of lm_head
        torch.testing.assert_close(ours, theirs, rtol=max(1e-4, ulp), atol=1e-3)
    model.zero_grad()


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, *SETTINGS[2:]], ids=str)
def test_log_softmax_of_logits_has_the_engines_bits(model, settings):
    """Logits of a padded batch, made log-probs: those of the engine and of token_logprobs."""
    llm = engine_of(model)
    params = SamplingParams(max_tokens=12, seed=6, ignore_eos=True, **settings)
    completions = [o.completions[0] for o in generate(llm, SEQUENCES, params)]
    sequences = [p + c.token_ids for p, c in zip(SEQUENCES, completions, strict=True)]
    width = max(map(len, sequences))
    ids = torch.tensor([[0] * (width - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
    found = model(ids, attention_mask=mask, logits_to_keep=13).logits[:, :-1]
    logprobs = selective_log_softmax(found, ids[:, -12:], params)
    assert logprobs.dtype == torch.float32 and logprobs.requires_grad
    assert torch.equal(logprobs, torch.tensor([c.logprobs for c in completions]))
    assert torch.equal(logprobs, token_logprobs(model, ids, params, attention_mask=mask)[:, -12:])


def test_log_softmax_of_logits_has_torchs_gradient(model):
    raw = logits(model, SEQUENCES[1:2]).requires_grad_()
    ids = torch.tensor(SEQUENCES[1:2])
    params = SamplingParams(temperature=0.7)
    weights = torch.linspace(-1, 1, ids.numel()).view(ids.shape)
    (selective_log_softmax(raw, ids, params) * weights).sum().backward()
    wide = raw.detach().double().requires_grad_()
    ((wide / 0.7).log_softmax(-1).gather(-1, ids[..., None])[..., 0] * weights.double()).sum().backward()
    torch.testing.assert_close(raw.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)


def test_a_token_outside_the_filter_has_no_gradient(model):
    raw = logits(model, SEQUENCES[1:2]).requires_grad_()
    unlikely = raw.detach().argmin(-1)
    logprobs = selective_log_softmax(raw, unlikely, SamplingParams(top_k=3))
    assert (logprobs == -torch.inf).all()
    logprobs.sum().backward()
    assert not raw.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(1, 2, 9, dtype=torch.bfloat16)}, "float32 logits.*as an exact model returns them"),
        ({"ids": torch.zeros(1, 3, dtype=torch.long)}, r"ids \[1, 3\] don't fit logits \[1, 2, 9\]"),
        ({"ids": torch.full((1, 2), 9)}, "a token id is out of range"),
        ({"sampling_params": SamplingParams(min_tokens=2)}, "min_tokens.*use token_logprobs"),
        ({"sampling_params": SamplingParams(structured_outputs=DIGITS)}, "structured_outputs.*use token_logprobs"),
    ],
    ids=["dtype", "shape", "range", "min_tokens", "structured_outputs"],
)
def test_log_softmax_refuses_what_it_would_misread(change, message):
    given = {"logits": torch.zeros(1, 2, 9), "ids": torch.zeros(1, 2, dtype=torch.long)} | change
    with pytest.raises((TypeError, ValueError), match=message):
        selective_log_softmax(**given)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"position_ids": torch.arange(5, 14)[None]}, ValueError, "position_ids must run 0, 1, 2"),
        ({"position_ids": torch.tensor([[0, 1, 2, 5, 6, 7, 8, 9, 10]])}, ValueError, "position_ids must run 0, 1, 2"),
        ({"position_ids": torch.arange(8)[None]}, ValueError, r"position_ids \[1, 8\]"),
        ({"position_ids": torch.arange(9).expand(3, 1, 9)}, ValueError, r"position_ids \[3, 1, 9\]"),
        ({"attention_mask": torch.tensor([[1, 0, *[1] * 7]])}, ValueError, "attention_mask has a hole"),
        ({"attention_mask": torch.zeros(1, 9)}, ValueError, "attention_mask hides every token"),
        ({"attention_mask": torch.tensor([[1] * 4 + [2] * 5])}, ValueError, "1 where a token is and 0 at padding"),
        ({"attention_mask": torch.ones(1, 12)}, ValueError, r"attention_mask \[1, 12\]"),
        ({"attention_mask": torch.ones(1, 1, 9, 9)}, ValueError, r"attention_mask \[1, 1, 9, 9\]"),
        ({"attention_mask": {"full_attention": None}}, TypeError, "attention_mask is a dict"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, ValueError, "cu_seq_lens_q.*position_ids"),
        ({"use_cache": True}, NotImplementedError, "no HF cache"),
        ({"past_key_values": DynamicCache()}, NotImplementedError, "no HF cache"),
        ({"inputs_embeds": torch.zeros(1, 9, 100)}, ValueError, "either input_ids or inputs_embeds"),
    ],
    ids=str,
)
def test_a_call_that_attention_would_misread_is_refused(model, arguments, error, message):
    with pytest.raises(error, match=message):
        logits(model, [prompt_of(9)], **arguments)


def test_left_padded_rows_that_count_from_elsewhere_are_refused(model):
    ids, mask = padded(left=3)
    with pytest.raises(ValueError, match=r"position_ids must run 0, 1, 2.* leave them out"):
        model(ids, attention_mask=mask, position_ids=torch.arange(ids.shape[1])[None])


def test_a_cache_of_transformers_is_refused(model):
    with pytest.raises(NotImplementedError, match=r"no HF cache.*generate with samebits\.LLM"):
        model.generate(torch.tensor([prompt_of(9)]), max_new_tokens=3, use_cache=True)


def test_generate_of_transformers_without_a_cache_is_the_engines_greedy_choice(model):
    ids, mask = padded(left=3)
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=5, use_cache=False, do_sample=False, eos_token_id=-1
    )
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    greedy = generate(engine_of(model), SEQUENCES, params)
    assert found[:, -5:].tolist() == [o.completions[0].token_ids for o in greedy]


# --- attn_implementation="samebits" on a model of transformers: exact attention, and nothing that it can't see ---


@pytest.fixture(scope="module", params=["llama", "mistral"])
def plain(request, checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint(request.param), attn_implementation="samebits").eval()


def test_attention_alone_takes_rows_and_packed_rows(plain):
    reference = AutoModelForCausalLM.from_pretrained(plain.name_or_path, attn_implementation="sdpa").eval()
    ids = SEQUENCES[3:]
    near = {"rtol": 1e-3, "atol": 1e-3}  # all but the attention is torch's
    torch.testing.assert_close(logits(plain, ids), logits(reference, ids), **near)
    assert torch.equal(logits(plain, ids, attention_mask=torch.ones(1, 60)), logits(plain, ids))
    packed = logits(plain, ids, position_ids=torch.tensor([[*range(25), *range(35)]]))
    torch.testing.assert_close(packed[:, 25:], logits(reference, [ids[0][25:]]), **near)


@pytest.mark.parametrize("padding", [{"left": 3}, {"right": 3}], ids=str)
def test_attention_alone_refuses_padding(plain, padding):
    ids, mask = padded(**padding)
    with pytest.raises(ValueError, match=r'"samebits".*padding.*exact_model'):
        plain(ids, attention_mask=mask)


def test_attention_alone_refuses_a_mask_of_scores(plain):
    with pytest.raises(ValueError, match=r'"samebits".*exact_model'):
        logits(plain, SEQUENCES[3:], attention_mask=torch.ones(1, 1, 60, 60, dtype=torch.bool))


def test_the_attention_of_exact_models_is_refused_in_others(checkpoint):
    """As a trainer uses it that loads a reference with its policy's attention."""
    exact = exact_model(checkpoint("llama")).config._attn_implementation
    other = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), attn_implementation=exact)
    with pytest.raises(ValueError, match="exact_model"):
        logits(other, SEQUENCES[:1])


def test_dropout_in_attention_is_refused(checkpoint):
    model = exact_model(checkpoint("llama")).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(NotImplementedError, match="dropout"):
        logits(model, [prompt_of(9)])


def test_a_cast_that_rounds_the_rotary_table_is_refused(checkpoint):
    with pytest.raises(TypeError, match=r"inv_freq was cast to torch\.bfloat16; load with dtype="):
        logits(exact_model(checkpoint("llama")).to(torch.bfloat16), [prompt_of(9)])
