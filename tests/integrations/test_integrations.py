"""Rollouts of every format read the same, errors name their line, settings of other frameworks mean what they say."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch

from samebits.correction.actions import PRESETS, Correction, Gate, Weight, preset
from samebits.correction.losses import policy_loss
from samebits.correction.statistics import LogProbs, Statistic
from samebits.integrations.corrections import (
    from_miles,
    from_slime,
    from_trl,
    from_verl,
    to_miles,
    to_slime,
    to_trl,
    to_verl,
)
from samebits.integrations.rollouts import Rollout, RolloutFormatError, read_rollouts, write_rollouts

PROMPTS = [[1, 15, 7], [1, 4]]
IDS = [[11, 12, 2], [13, 2]]
ROLLOUT = [[-0.5, -1.25, -0.125], [-2.5, -0.0625]]
OLD = [[-0.5, -1.5, -0.125], [-2.0, -0.0625]]
CURRENT = [[-0.25, -1.75, -0.25], [-2.25, -0.125]]


def plain(row=0, **changes):
    record = {"prompt_token_ids": PROMPTS[row], "token_ids": IDS[row], "rollout_logprobs": ROLLOUT[row], **changes}
    return {key: value for key, value in record.items() if value is not ...}


def lines(tmp_path, *records, name="rollouts.jsonl"):
    path = tmp_path / name
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def one(tmp_path, *records, **kwargs):
    return list(read_rollouts(lines(tmp_path, *records), **kwargs))


def refused(path, message, **kwargs):
    """Reading fails, with the message (its special characters taken literally) and only there."""
    with pytest.raises(RolloutFormatError, match=re.escape(message)):
        list(read_rollouts(path, **kwargs))


def same(a, b):
    """Rollouts equal in all but their source."""
    for name in Rollout.__dataclass_fields__.keys() - {"source"}:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            assert x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y, err_msg=name)
        else:
            assert x == y and type(x) is type(y), name


# --- plain files -----------------------------------------------------------------------------------------------------


def test_plain_jsonl_has_the_promised_types(tmp_path):
    full = plain(old_logprobs=OLD[0], mask=[1, 0, True], advantages=0.5, reward=1, group=3, top_token_ids=[11, -1, 2])
    rollout, bare = one(tmp_path, full, "\n", plain(1))
    for name in ("rollout", "old", "advantages"):
        assert getattr(rollout, name).dtype == np.float64
    for name in ("token_ids", "prompt_token_ids", "top_token_ids"):
        assert getattr(rollout, name).dtype == np.int64
    assert rollout.mask.tolist() == [True, False, True] and rollout.mask.dtype == bool
    assert rollout.advantages.tolist() == [0.5] * 3 and rollout.reward == 1.0 and rollout.group == "3"
    assert bare.old is bare.current is bare.mask is bare.advantages is bare.reward is bare.group is None
    assert bare.source == f"{tmp_path}/rollouts.jsonl:3"  # the blank line counts


def test_what_is_written_is_read(tmp_path):
    rng = np.random.default_rng(0)
    wrote = [
        Rollout(
            token_ids=rng.integers(0, 1000, n),
            prompt_token_ids=rng.integers(0, 1000, 4),
            **{name: -rng.exponential(size=n) for name in ("rollout", "old", "current", "reference")},
            mask=np.arange(n) % 3 != 1,
            advantages=rng.normal(size=n),
            reward=float(n),
            group=f"g{n}",
            top_token_ids=rng.integers(-1, 1000, n),
        )
        for n in (5, 0, 1, 200)
    ]
    wrote.append(Rollout(np.arange(4)[::2], -np.ones(4)[::2]))  # not contiguous, and little there
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, wrote)
    for before, after in zip(wrote, read_rollouts(path), strict=True):
        same(before, after)


def test_infinite_and_missing_log_probs_survive_json(tmp_path):
    """JSON has neither: -inf keeps its meaning as a ratio of 0, NaN stays outside the mask."""
    mask, old = np.array([True, False, True]), np.array([-np.inf, np.nan, -0.5])
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [Rollout(np.arange(3), np.array([-1.0, np.nan, -0.5]), old=old, mask=mask)])
    (read,) = read_rollouts(path)
    ratios = [
        LogProbs(torch.tensor(mask)[None], torch.tensor(r)[None], torch.tensor(o)[None]).log_ratio("old/rollout")
        for r, o in ((read.rollout, read.old), (np.array([-1.0, np.nan, -0.5]), old))
    ]
    assert torch.equal(*ratios)


BAD = {
    "no rollout_logprobs": plain(rollout_logprobs=...),
    "no token_ids": plain(token_ids=None),
    "rollout_logprobs has shape [2], token_ids [3]": plain(rollout_logprobs=[-0.5, -1.25]),
    "old_logprobs has shape [4]": plain(old_logprobs=[-1.0] * 4),
    "mask has shape [2]": plain(mask=[1, 1]),
    "advantages has shape [2]": plain(advantages=[1.0, 2.0]),
    "top_token_ids has shape [1]": plain(top_token_ids=[1]),
    "rollout_logprobs[1] is 0.75": plain(rollout_logprobs=[-0.5, 0.75, -0.125]),
    "old_logprobs[2] is 2.5": plain(old_logprobs=[-0.5, -1.25, 2.5]),
    "rollout_logprobs[1] is nan": plain(rollout_logprobs=[-0.5, None, -0.125]),
    "current_logprobs[0] is nan": plain(current_logprobs=[None, -0.5, -0.125], mask=[1, 0, 0]),
    "advantages[1] is nan": plain(advantages=[1.0, None, 2.0]),
    "rollout_logprobs holds <U": plain(rollout_logprobs=["-0.5", "-1.25", "-0.125"]),
    "token_ids holds float64": plain(token_ids=[11.5, 12, 2]),
    "token_ids holds <U": plain(token_ids=["a", "b", "c"]),
    "token_ids[1] is -100": plain(token_ids=[11, -100, 2]),
    "rollout_logprobs holds object": plain(rollout_logprobs=[-0.5, "x", None]),
    "token_ids has shape [1, 3]": plain(token_ids=[[11, 12, 2]]),
    "inhomogeneous": plain(rollout_logprobs=[[-0.5], [-1.25, -0.125]]),
    "mask[1] is 2": plain(mask=[1, 2, 0]),
    "reward is 'good'": plain(reward="good"),
    "JSONDecodeError": '{"token_ids": [1, 2\n',
    "JSONDecodeError: unexpected": '{"token_ids": [1], "rollout_logprobs": [NaN]}\n',
    "TypeError": "5\n",
    "AttributeError": '"text"\n',
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_record_is_named_with_its_line(tmp_path, message):
    path = lines(tmp_path, plain(), "\n", plain(1), BAD[message], plain())
    reader = read_rollouts(path)
    assert len(list(itertools.islice(reader, 2))) == 2
    with pytest.raises(RolloutFormatError) as caught:
        next(reader)
    text = str(caught.value)
    message = message.replace("<U", "str")
    assert text.startswith(f"{path}:4: ") and message in text and "; expected " in text, text


def test_rounding_above_zero_is_no_error(tmp_path):
    (rollout,) = one(tmp_path, plain(rollout_logprobs=[-0.5, 3e-6, 0.0]))
    assert rollout.rollout[1] == 3e-6


def test_reading_is_lazy(tmp_path):
    """The first record arrives without the rest: behind it lie 8 MB that aren't JSON."""
    path = lines(tmp_path, plain(), plain(1))
    with path.open("ab") as file:
        file.write(b"x" * 2**23)
    reader = read_rollouts(path)
    assert next(reader).token_ids.tolist() == IDS[0] and next(reader).token_ids.tolist() == IDS[1]
    with pytest.raises(RolloutFormatError, match=":3: "):
        next(reader)


def test_memory_does_not_grow_with_the_file(tmp_path):
    import tracemalloc

    def peak(records):
        path = tmp_path / f"{records}.jsonl"
        rollout = Rollout(np.arange(1000), -np.ones(1000))
        write_rollouts(path, itertools.repeat(rollout, records))
        tracemalloc.start()
        for _ in read_rollouts(path):
            pass
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(1)
    assert peak(400) < 2 * peak(40)


def test_a_format_that_is_asked_for_is_insisted_on(tmp_path):
    path = lines(tmp_path, plain())
    assert len(list(read_rollouts(path, "jsonl"))) == 1
    refused(path, f"{path}:1: KeyError: 'choices'", format="vllm")
    refused(path, f"{path}:1: KeyError: 'meta_info'", format="sglang")
    refused(path, "a text file can't have format 'verl'; expected one of jsonl, vllm, sglang", format="verl")
    with pytest.raises(FileNotFoundError):
        read_rollouts(tmp_path / "missing.jsonl")


# --- parquet and npz -------------------------------------------------------------------------------------------------


def test_parquet_reads_as_jsonl_does(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = [
        plain(0, old_logprobs=OLD[0], mask=[True, False, True], advantages=[0.5, 1.0, 2.0], reward=1.0, group="a"),
        plain(1, old_logprobs=None, mask=None, advantages=None, reward=None, group=None),
    ] * 100
    path = tmp_path / "rollouts.parquet"
    parquet.write_table(arrow.Table.from_pylist([{**r, "text": "ignored"} for r in records]), path)
    for a, b in zip(read_rollouts(path), one(tmp_path, *records), strict=True):
        same(a, b)
    records[150] = plain(rollout_logprobs=[-0.5, 0.75, -0.125])
    parquet.write_table(arrow.Table.from_pylist(records), path)
    refused(path, f"{path}[150]: rollout_logprobs[1] is 0.75")
    parquet.write_table(arrow.table({"token_ids": [[1]]}), path)
    refused(path, f"{path}[0]: no rollout_logprobs")
    path.write_bytes(b"PAR1 and then nothing")
    refused(path, f"{path}: ArrowInvalid")


def test_parquet_is_streamed_within_a_row_group(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    offsets, rng = np.arange(0, 2_000_001, 1000), np.random.default_rng(0)
    columns = {"token_ids": rng.integers(0, 1000, 2_000_000), "rollout_logprobs": -rng.exponential(size=2_000_000)}
    table = {name: arrow.LargeListArray.from_arrays(offsets, arrow.array(values)) for name, values in columns.items()}
    path = tmp_path / "rollouts.parquet"
    parquet.write_table(arrow.table(table), path)
    del table
    before, largest = arrow.total_allocated_bytes(), 0
    for rollout in read_rollouts(path):
        last = rollout
        largest = max(largest, arrow.total_allocated_bytes() - before)
    assert last.source == f"{path}[1999]" and last.rollout[-1] == columns["rollout_logprobs"][-1]
    assert largest < path.stat().st_size / 2, (largest, path.stat().st_size)


def test_parquet_without_pyarrow_says_how_to_install_it(tmp_path, monkeypatch):
    path = tmp_path / "rollouts.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'samebits\[parquet\]'"):
        list(read_rollouts(path))


def padded(rows, width, fill=0, left=False):
    """[B, width] of rows, padded with `fill` on the right or left."""
    pads = [[fill] * (width - len(row)) for row in rows]
    return np.array([[*pad, *row] if left else [*row, *pad] for pad, row in zip(pads, rows, strict=True)])


EXPECTED = [
    Rollout(*map(np.array, (IDS[row], ROLLOUT[row], PROMPTS[row], OLD[row])), advantages=np.full(len(IDS[row]), adv))
    for row, adv in enumerate((0.5, -1.0))
]
MASKS = [np.ones(3, bool), np.ones(2, bool)]


def test_npz_padded_and_packed_are_the_same(tmp_path):
    path = tmp_path / "rollouts.npz"
    arrays = {
        "token_ids": padded(IDS, 5),
        "rollout_logprobs": padded(ROLLOUT, 5, np.nan),  # padding may hold anything
        "old_logprobs": padded(OLD, 5, 7.0),
        "mask": padded([[1, 0, 1], [1, 1]], 5),
        "prompt_token_ids": padded(PROMPTS, 4),
        "prompt_mask": padded([[1] * 3, [1] * 2], 4),
        "advantages": np.array([0.5, -1.0]),
        "reward": np.array([1, 0]),
        "group": np.array(["a", "a"]),
    }
    np.savez_compressed(path, **arrays)
    from_padded = list(read_rollouts(path))
    packed = {key: np.concatenate(rows) for key, rows in (("token_ids", IDS), ("rollout_logprobs", ROLLOUT))}
    packed |= {"old_logprobs": np.concatenate(OLD), "mask": np.array([1, 0, 1, 1, 1]), "offsets": np.array([0, 3, 5])}
    packed |= {"prompt_token_ids": np.concatenate(PROMPTS), "prompt_offsets": np.array([0, 3, 5])}
    packed |= {key: arrays[key] for key in ("advantages", "reward", "group")}
    np.savez(path, **packed)
    for a, b, expected in zip(from_padded, read_rollouts(path), EXPECTED, strict=True):
        same(a, b)
        np.testing.assert_array_equal(a.rollout, expected.rollout)
    assert from_padded[0].mask.tolist() == [True, False, True] and from_padded[1].reward == 0.0
    packed["offsets"] = np.array([0, 4, 3])
    np.savez(path, **packed)
    refused(path, f"{path}: offsets of token_ids from 0 to 3; expected ascending ones from 0 to 5")
    np.savez(path, **{**arrays, "reward": np.ones(3)})
    refused(path, f"{path}: reward has 3 rows; expected 2")
    np.savez(path, **{**arrays, "old_logprobs": np.zeros((2, 4))})
    refused(path, f"{path}: old_logprobs has shape [2, 4], token_ids [2, 5]")
    np.savez(path, **{**arrays, "rollout_logprobs": padded([ROLLOUT[0], [-2.5, 0.75]], 5)})
    refused(path, f"{path}[1]: rollout_logprobs[1] is 0.75")
    del arrays["mask"]
    np.savez(path, **arrays)
    refused(path, f"{path}: no mask; expected the arrays of format 'npz': token_ids, rollout_logprobs, mask")
    np.savez(path, token_ids=np.array([None, 1]), rollout_logprobs=np.zeros(2))
    refused(path, f"{path}: ValueError: Object arrays cannot be loaded")


# --- replies of engines ----------------------------------------------------------------------------------------------


def completion(choices):
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    head = {"id": "cmpl-7f", "object": "text_completion", "created": 1764000000, "model": "m", "usage": usage}
    return {**head, "choices": [{"index": i, "text": "…", "finish_reason": "stop", **c} for i, c in enumerate(choices)]}


def choice(row, names=str, k=2, **extra):
    tops = [{names(t): lp, names(99): lp - 1} for t, lp in zip(IDS[row], ROLLOUT[row], strict=True)]
    tops[0][names(98)] = -0.01 if k else tops[0].pop(names(99)) and -9  # above the sampled token
    logprobs = {"tokens": [names(t) for t in IDS[row]], "token_logprobs": ROLLOUT[row], "text_offset": [0] * len(tops)}
    return {"logprobs": {**logprobs, "top_logprobs": tops}, **extra}


def as_token_id(token):
    return f"token_id:{token}"


def test_vllm_completions(tmp_path):
    by_ids = completion(
        [
            choice(0, token_ids=IDS[0], prompt_token_ids=PROMPTS[0]),
            choice(1, token_ids=IDS[1], prompt_token_ids=PROMPTS[0]),
        ]
    )
    by_names = completion([choice(0, as_token_id), choice(1, as_token_id)])
    two_prompts = completion([choice(r, token_ids=IDS[r], prompt_token_ids=PROMPTS[r]) for r in (0, 0, 1, 1)])
    rollouts = one(tmp_path, by_ids, by_names, two_prompts)
    for row, rollout in enumerate(rollouts[:4]):
        assert rollout.token_ids.tolist() == IDS[row % 2] and rollout.rollout.tolist() == ROLLOUT[row % 2]
        assert rollout.source == f"{tmp_path}/rollouts.jsonl:{1 + row // 2}, choice {row % 2}"
    assert rollouts[0].prompt_token_ids.tolist() == PROMPTS[0] and rollouts[2].prompt_token_ids is None
    assert rollouts[0].top_token_ids is None  # of texts
    assert rollouts[2].top_token_ids.tolist() == [98, 12, 2]
    assert rollouts[0].group == rollouts[1].group
    groups = [rollout.group for rollout in rollouts[4:]]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_vllm_alone_in_its_list_a_token_is_the_top_only_above_one_half(tmp_path):
    """logprobs=0 lists the sampled token only, whether or not it was the most likely."""
    record = completion([choice(0, as_token_id)])
    record["choices"][0]["logprobs"]["top_logprobs"] = [
        {as_token_id(t): lp} for t, lp in zip(IDS[0], ROLLOUT[0], strict=True)
    ]
    (rollout,) = one(tmp_path, record)
    assert rollout.top_token_ids.tolist() == [11, -1, 2]  # exp(-0.5) and exp(-0.125) are above 1/2, exp(-1.25) isn't


def test_vllm_chat_and_generate(tmp_path):
    def content(with_ids):
        def entry(token, logprob):
            shown = {"token": as_token_id(token) if with_ids is None else "é", "logprob": logprob, "bytes": None}
            return {**shown, "token_id": token} if with_ids else shown

        return [
            {**entry(t, lp), "top_logprobs": [entry(t, lp), entry(97, lp - 0.5)]}
            for t, lp in zip(IDS[0], ROLLOUT[0], strict=True)
        ]

    chat = {"id": "chatcmpl-1", "object": "chat.completion", "prompt_token_ids": PROMPTS[0]}
    message = {"message": {"role": "assistant", "content": "…"}, "finish_reason": "stop"}
    chat["choices"] = [{"index": 0, **message, "logprobs": {"content": content(False)}, "token_ids": IDS[0]}]
    names = {**chat, "choices": [{"index": 0, **message, "logprobs": {"content": content(None)}}]}
    generate = {"request_id": "r1", "prompt_token_ids": PROMPTS[0]}
    generate["choices"] = [{"index": 0, "token_ids": IDS[0], "logprobs": {"content": content(True)}}]
    rollouts = one(tmp_path, chat, names, generate)
    for rollout in rollouts:
        assert rollout.token_ids.tolist() == IDS[0] and rollout.rollout.tolist() == ROLLOUT[0]
        assert rollout.prompt_token_ids.tolist() == PROMPTS[0]
    assert rollouts[0].top_token_ids is None
    assert rollouts[1].top_token_ids.tolist() == rollouts[2].top_token_ids.tolist() == IDS[0]


def test_vllm_errors_say_what_to_ask_for(tmp_path):
    cases = {
        "no token ids; expected a reply to return_token_ids=true": choice(0),
        "no log-probs; expected a reply to logprobs=0 or more": {"token_ids": IDS[0], "logprobs": None},
        "rollout_logprobs has shape [3], token_ids [2]": choice(0, token_ids=[11, 12]),
        "rollout_logprobs[0] is nan": {"token_ids": [5], "logprobs": {"token_logprobs": [None]}},
    }
    for message, bad in cases.items():
        path = lines(tmp_path, completion([choice(0, as_token_id)]), completion([choice(1, as_token_id), bad]))
        refused(path, f"{path}:2, choice 1: {message}")
    path = lines(tmp_path, {"choices": [{"logprobs": {"content": [{"token": "a"}]}}]})
    refused(path, f"{path}:1: KeyError: 'logprob'")


def generated(row, **meta):
    triples = [[lp, t, None] for t, lp in zip(IDS[row], ROLLOUT[row], strict=True)]
    info = {"id": "rid", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": len(PROMPTS[row])}
    info |= {"output_token_logprobs": triples, "output_top_logprobs": None, "input_token_logprobs": [], **meta}
    return {"text": "…", "output_ids": IDS[row], "meta_info": info}


def test_sglang_generate(tmp_path):
    tops = [[[-0.01, 96, None], [-3.0, 11, None]], None, [[-0.125, 2, "</s>"]]]
    scored = [[None, 1, None], [-3.0, 15, None], [-1.0, 7, None]]
    first = {**generated(0, output_top_logprobs=tops), "prompt_token_ids": PROMPTS[0]}
    rollouts = one(tmp_path, first, [generated(0, input_token_logprobs=scored), generated(1)])
    for rollout, row in zip(rollouts, (0, 0, 1), strict=True):
        assert rollout.token_ids.tolist() == IDS[row] and rollout.rollout.tolist() == ROLLOUT[row]
    assert rollouts[0].top_token_ids.tolist() == [96, -1, 2] and rollouts[1].top_token_ids is None
    assert rollouts[0].prompt_token_ids.tolist() == rollouts[1].prompt_token_ids.tolist() == PROMPTS[0]
    assert rollouts[2].prompt_token_ids is None and rollouts[2].source == f"{tmp_path}/rollouts.jsonl:2[1]"
    cases = {
        "no meta_info.output_token_logprobs; expected a reply to return_logprob=true": {"output_token_logprobs": None},
        "output_ids differ from the ids of output_token_logprobs": {"output_token_logprobs": [[-0.5, 11, None]]},
    }
    for message, meta in cases.items():
        path = lines(tmp_path, generated(0), generated(0, **meta))
        refused(path, f"{path}:2: {message}")


# --- dumps of trainers -----------------------------------------------------------------------------------------------


def trl_batch(dtype=torch.float32):
    return {
        "prompt_ids": torch.tensor(padded(PROMPTS, 4, left=True)),
        "prompt_mask": torch.tensor(padded([[1] * 3, [1] * 2], 4, left=True)),
        "completion_ids": torch.tensor(padded(IDS, 5)),
        "completion_mask": torch.tensor(padded([[1] * 3, [1] * 2], 5)),
        "sampling_per_token_logps": torch.tensor(padded(ROLLOUT, 5)).to(dtype),
        "old_per_token_logps": torch.tensor(padded(OLD, 5, np.nan)).to(dtype),
        "ref_per_token_logps": torch.zeros(2, 5),
        "advantages": torch.tensor([0.5, -1.0]),
        "num_items_in_batch": torch.tensor(5),
    }


def verl_batch():
    attention = [padded([[1] * 3, [1] * 2], 4, left=True), padded([[1] * 3, [1] * 2], 5)]
    return {
        "prompts": torch.tensor(padded(PROMPTS, 4, left=True)),
        "responses": torch.tensor(padded(IDS, 5)),
        "attention_mask": torch.tensor(np.concatenate(attention, 1)),
        "response_mask": torch.tensor(attention[1]),
        "rollout_log_probs": torch.tensor(padded(ROLLOUT, 5)).float(),
        "old_log_probs": torch.tensor(padded(OLD, 5)).float(),
        "advantages": torch.tensor([[0.5] * 5, [-1.0] * 5]),
    }


@pytest.mark.parametrize("batch", [trl_batch(), trl_batch(torch.bfloat16), verl_batch()])
@pytest.mark.parametrize("suffix", ["pt", "npz"])
def test_trl_and_verl_dumps(tmp_path, batch, suffix):
    path = tmp_path / f"dump.{suffix}"
    if suffix == "pt":
        torch.save(batch, path)
    else:
        np.savez(path, **{key: (v.float() if v.dtype == torch.bfloat16 else v).numpy() for key, v in batch.items()})
    for rollout, expected, mask in zip(read_rollouts(path), EXPECTED, MASKS, strict=True):
        same(rollout, dataclasses.replace(expected, mask=mask))


@pytest.mark.parametrize("suffix", ["pt", "npz"])
def test_a_truncated_dump_is_named(tmp_path, suffix):
    path = tmp_path / f"dump.{suffix}"
    if suffix == "pt":
        torch.save(trl_batch(), path)
    else:
        np.savez(path, **{key: value.numpy() for key, value in trl_batch().items()})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RolloutFormatError, match=rf"dump\.{suffix}: "):
        list(read_rollouts(path))


def test_tokens_of_tools_stay_in_the_sequence_outside_the_mask(tmp_path):
    trl, verl = trl_batch(), verl_batch()
    trl["tool_mask"] = torch.ones(2, 5, dtype=torch.int64)
    trl["tool_mask"][0, 1:3] = 0  # the last two tokens of the first sequence
    verl["response_mask"] = verl["response_mask"] * trl["tool_mask"]
    for name, batch in (("trl.pt", trl), ("verl.pt", verl)):
        torch.save(batch, tmp_path / name)
        rollout, _ = read_rollouts(tmp_path / name)
        assert rollout.token_ids.tolist() == IDS[0] and rollout.mask.tolist() == [True, False, False]


def test_dump_errors(tmp_path):
    path = tmp_path / "dump.pt"
    batch = trl_batch()
    torch.save({**batch, "sampling_per_token_logps": None}, path)
    refused(path, f"{path}: no sampling_per_token_logps; expected the arrays of format 'trl': completion_ids")
    refused(path, f"{path}: no responses", format="verl")
    batch["sampling_per_token_logps"][1, 0] = 0.5
    torch.save(batch, path)
    refused(path, f"{path}[1]: rollout_logprobs[0] is 0.5")
    torch.save({"batch": Rollout(np.zeros(1), np.zeros(1))}, path)
    refused(
        path, "expected a dictionary of plain arrays; of verl's DataProto: torch.save(dict(data.batch.items()), path)"
    )
    torch.save([1, 2], path)
    refused(path, f"{path}: AttributeError")


def miles_file(folder, rank, call, **changes):
    samples = [
        {
            "index": row,
            "total_length": len(PROMPTS[row]) + len(IDS[row]),
            "response_length": len(IDS[row]),
            "train_log_probs": torch.tensor(CURRENT[row]),
            "old_log_probs": torch.tensor(OLD[row]),
            "rollout_log_probs": torch.tensor(ROLLOUT[row]),
            "advantages": torch.full((len(IDS[row]),), 0.5),
            "local_loss_mask": torch.ones(len(IDS[row])),
            "group_index": 4,
            "in_group_id": row,
            **changes,
        }
        for row in (0, 1)
    ]
    path = folder / f"rank_{rank}_call_{call}.pt"
    torch.save(
        {"rank": rank, "call": call, "samples": samples, "ppo_kl": torch.zeros(5), "finite": {"ppo_kl": True}}, path
    )
    return path


def test_miles_dumps(tmp_path):
    folder = tmp_path / "dump" / "policy_loss_debug"
    folder.mkdir(parents=True)
    refused(tmp_path, "a folder without *.jsonl or rank_*_call_*.pt")
    for rank, call in ((1, 0), (0, 10), (0, 2)):
        path = miles_file(folder, rank, call)
    first, second = read_rollouts(path)
    assert (first.rollout.tolist(), first.old.tolist(), first.current.tolist()) == (ROLLOUT[0], OLD[0], CURRENT[0])
    assert first.mask.all() and first.advantages.tolist() == [0.5] * 3 and first.group == second.group == "4"
    assert second.token_ids.tolist() == [-1, -1] and second.prompt_token_ids is None
    sources = [rollout.source for rollout in read_rollouts(tmp_path / "dump")]
    names = [f"rank_{name}.pt[{row}]" for name in ("0_call_2", "0_call_10", "1_call_0") for row in (0, 1)]
    assert sources == [f"{folder}/{name}" for name in names]
    path = miles_file(folder, 3, 0, rollout_log_probs=None)
    refused(path, f"{path}[0]: no rollout_logprobs")


# --- settings --------------------------------------------------------------------------------------------------------


def log_probs(seed=0, rows=64, width=7):
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3
    noise = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    old = (rollout + 0.4 * noise[0]).clamp(max=0)
    return LogProbs(mask, rollout, old, (old + 0.1 * noise[1]).clamp(max=0)), torch.randn(rows, generator=generator)


def equivalent(a, b):
    """Corrections that do the same to a batch: weights of what is kept, and what is kept."""
    logprobs, advantages = log_probs()
    one, two = a(logprobs, advantages), b(logprobs, advantages)
    kept = [torch.where(c.keep, c.weights, 0.0) for c in (one, two)]
    assert torch.equal(kept[0] != 0, kept[1] != 0)
    torch.testing.assert_close(*kept)


TIM = "old/rollout"
TOKEN, SUM, MEAN = (Statistic(TIM, "log_ratio", how) for how in ("token", "sum", "mean"))


def test_verl_settings_translate():
    mode, correction, _ = from_verl({"rollout_is": "token", "rollout_is_threshold": 2.0})
    assert (mode, correction) == ("decoupled", Correction(Weight(TOKEN, high=2.0)))
    _, correction, _ = from_verl({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"})
    assert correction == preset("icepop")
    settings = {
        "rollout_is": "sequence",
        "rollout_rs": "seq_mean_k1, token_k3",
        "rollout_rs_threshold": "0.999_1.001,0.1",
    }
    mode, correction, notes = from_verl({**settings, "rollout_is_batch_normalize": True})
    assert correction.weight == Weight(SUM, high=2.0, normalize=True) and correction.denominator == "kept"
    assert correction.gates == (Gate.on_ratio(MEAN, 0.999, 1.001), Gate(Statistic(TIM, "k3"), high=0.1))
    assert any("kept tokens" in note for note in notes)
    _, correction, _ = from_verl(
        {"rollout_is": None, "rollout_rs": "seq_max_k2,seq_sum_k3", "rollout_rs_threshold": 0.5}
    )
    assert correction.gates == tuple(Gate(Statistic(TIM, k, a), high=0.5) for k, a in (("k2", "max"), ("k3", "sum")))
    assert from_verl({"rollout_is": None}) == ("recompute", Correction(), ())
    assert "dataclass" in from_verl({}).notes[0]


def verl_keeps(threshold, ratio):
    """What verl's code does with token_k1: -log r against the logarithms of the bounds."""
    low, high = map(float, threshold.split("_"))
    return math.log(low) <= -math.log(ratio) <= math.log(high)


def test_verl_inverts_k1_bounds_and_the_note_says_so():
    settings = {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"}
    _, correction, notes = from_verl(settings)
    ratios = torch.tensor([[0.59, 0.65, 0.72, 1.0, 1.35, 1.5, 1.65]], dtype=torch.float64)
    logprobs = LogProbs(torch.ones(1, 7), torch.full((1, 7), -3.0).double(), -3.0 + ratios.log())
    kept = correction(logprobs).keep[0].tolist()
    assert kept == [False, True, True, True, True, False, False]  # as documented
    assert [verl_keeps("0.6_1.4", r) for r in ratios[0]] == [False, False, True, True, True, True, True]
    (note,) = (note for note in notes if "97eac9048" in note)
    assert "keeps 0.7143 <= r <= 1.667, not the documented 0.6 <= r <= 1.4" in note
    advised = re.search(r"'([\d.]+_[\d.]+)'", note)[1]
    assert [verl_keeps(advised, r) for r in ratios[0]] == kept
    for symmetric in ("0.5_2.0", "0.999_1.001", 1.001):
        assert not any("97eac9048" in n for n in from_verl({**settings, "rollout_rs_threshold": symmetric}).notes)


def test_verl_bypass_with_ppo_takes_no_weight():
    settings = {"bypass_mode": True, "rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    mode, correction, notes = from_verl(settings)
    assert mode == "bypass" and correction.weight is None and correction.denominator == "original"
    assert correction.ratios == {"current/rollout"} and any("metric only" in note for note in notes)
    mode, correction, notes = from_verl({**settings, "loss_type": "reinforce"})
    assert correction.weight == Weight(Statistic("current/rollout"), high=2.0)
    assert to_verl(mode, correction)["loss_type"] == "reinforce"
    logprobs, advantages = log_probs()
    policy_loss(logprobs, advantages, mode, "reinforce", correction)  # consistent


VERL = [
    {"rollout_is": "token", "rollout_is_threshold": 2.0},
    {"rollout_is": "sequence", "rollout_is_threshold": 5.0, "rollout_is_batch_normalize": True},
    {"rollout_is": "token", "rollout_is_threshold": "0.5_5"},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"},
    {"rollout_rs": "seq_sum_k1,seq_mean_k1", "rollout_rs_threshold": "0.5_2,0.999_1.001"},
    {"rollout_is": "token", "rollout_rs": "seq_mean_k3,seq_max_k2", "rollout_rs_threshold": "0.01,0.05"},
    {"bypass_mode": True, "rollout_rs": "token_k2", "rollout_rs_threshold": "0.5"},
    {"bypass_mode": True, "rollout_is": "sequence", "loss_type": "reinforce"},
    {"bypass_mode": True},
    {},
]
MIS = {"use_tis": True, "tis_upper_bound": 2.0}
MILES = [
    {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0},
    {"use_tis": True, "tis_clip": 3.0, "tis_clip_low": 0.5},
    {"use_tis": True, "custom_tis_function_path": "miles.backends.training_utils.loss.hub.corrections.icepop_function"},
    {"use_tis": True, "tis_clip_low": 0.5, "tis_clip": 5.0, "custom_tis_function_path": "mine.icepop_function"},
    {"use_opsm": True, "opsm_delta": 1e-3},
    {"use_rollout_logprobs": True, "use_opsm": True},
    {"use_rollout_logprobs": True},
    {"use_tis": True, "use_opsm": True},
    {**MIS, "tis_mode": "clip", "tis_lower_bound": None},
    {**MIS, "tis_mode": "mask", "tis_level": "sequence", "tis_lower_bound": 0.5},
    {**MIS, "tis_mode": "mask", "tis_batch_normalize": True, "use_rs": True, "rs_level": "geometric"},
    {**MIS, "use_rs": True, "rs_lower_bound": 0.99, "rs_upper_bound": 1.001, "tis_batch_normalize": True},
    {**MIS, "use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.1, "use_opsm": True},
    {**MIS, "use_rs": True, "rs_lower_bound": 0.9, "rs_upper_bound": 1.1, "rs_veto_threshold": None},
    {**MIS, "tis_level": "geometric", "tis_mode": "clip", "tis_lower_bound": 0.9999, "tis_upper_bound": 1.0001},
    {},
]
IS = "vllm_importance_sampling"
TRL = [
    {f"{IS}_mode": "token_truncate"},
    {f"{IS}_mode": "token_truncate", f"{IS}_clip_min": 0.5, f"{IS}_clip_max": 2.0},
    {f"{IS}_mode": "token_mask", f"{IS}_clip_max": None, f"{IS}_clip_min": 0.5},
    {f"{IS}_mode": "sequence_truncate", f"{IS}_cap": 2.0, "off_policy_mask_threshold": 0.5},
    {f"{IS}_mode": "sequence_mask"},
    {f"{IS}_correction": False, "off_policy_mask_threshold": 0.5},
    {f"{IS}_correction": False},
    {},
]
ROUND_TRIPS = [
    (f, t, c)
    for f, t, cs in ((from_verl, to_verl, VERL), (from_trl, to_trl, TRL), (from_miles, to_miles, MILES))
    for c in cs
]


@pytest.mark.parametrize(("read", "write", "config"), ROUND_TRIPS)
def test_settings_survive_the_way_there_and_back(read, write, config):
    mode, correction, _ = read(config)
    written = write(mode, correction)
    again, same_correction, _ = read(written)
    assert (again, same_correction) == (mode, correction)
    assert write(again, same_correction) == written
    equivalent(correction, same_correction)


EXPRESSIBLE = {
    to_verl: {"token_tis", "sequence_tis", "sequence_is", "icepop", "geo_rs", "k1_sum_rs", "k1_mean_rs", "k2_sum_rs"}
    | {
        "k2_mean_rs",
        "k3_sum_rs",
        "k3_mean_rs",
        "trm",
        "srs_k3_corr",
        "tis_geo_rs",
        "tis_srs_k3_corr",
        "token_mis",
        "sequence_mis",
    },
    to_trl: {"token_tis", "sequence_tis", "sequence_is", "icepop", "token_mis", "sequence_mis"},
    to_miles: {"token_tis", "sequence_tis", "sequence_is", "icepop", "token_mis", "sequence_mis", "geometric_is"}
    | {"tis_srs_k1_corr", "tis_geo_rs"},
}
EXPRESSIBLE[to_slime] = EXPRESSIBLE[to_miles]


@pytest.mark.parametrize(
    ("write", "read"), [(to_verl, from_verl), (to_trl, from_trl), (to_miles, from_miles), (to_slime, from_slime)]
)
def test_presets_translate_or_are_refused_by_name(write, read):
    for name in PRESETS.keys() - {"opsm", "srs_k3_ppo", "none"}:
        correction = preset(name)
        if name in EXPRESSIBLE[write]:
            equivalent(read(write("decoupled", correction)).correction, correction)
        else:
            with pytest.raises(ValueError, match="can't express"):
                write("decoupled", correction)


def test_trl_settings_translate():
    mode, correction, notes = from_trl({})
    assert (mode, correction) == ("decoupled", preset("sequence_mis"))  # its defaults
    assert any("KL term" in note for note in notes)
    _, correction, notes = from_trl(
        {f"{IS}_mode": "token_truncate", f"{IS}_cap": 2.0, "off_policy_mask_threshold": 0.5}
    )
    assert correction == Correction(Weight(TOKEN, high=2.0), preset("opsm", delta=0.5, ratio="current/rollout").gates)
    assert any("older name" in note for note in notes)
    mode, correction, notes = from_trl({"use_vllm": False, "off_policy_mask_threshold": 0.5})
    assert correction.ratios == {"current/old"} and any("falls back" in note for note in notes)
    assert any("overflow" in note for note in from_trl({f"{IS}_clip_max": None}).notes)


def test_miles_settings_translate():
    mode, correction, notes = from_miles({"use_opsm": True})
    assert correction == preset("opsm", ratio="current/old") and any("staleness only" in note for note in notes)
    assert from_miles({"use_opsm": True, "use_rollout_logprobs": True}).correction.ratios == {"current/rollout"}
    _, correction, notes = from_miles({**MIS, "use_rs": True, "rs_level": "sequence", "tis_lower_bound": None})
    veto = preset("veto").gates
    assert correction.gates == (Gate.on_ratio(SUM, 0.5, 2.0), *veto) and correction.denominator == "original"
    assert any("those of tis" in note for note in notes) and any("README" in note for note in notes)
    _, correction, notes = from_miles({**MIS, "rs_veto_threshold": 1e-4})
    assert not correction.gates and any("rs_veto_threshold" in note for note in notes)
    mode, correction, notes = from_miles({"use_rs": True})
    assert (mode, correction) == ("recompute", Correction()) and any("without use_tis" in note for note in notes)
    _, correction, notes = from_miles({**MIS, "tis_mode": "mask", "tis_batch_normalize": True})
    assert correction.weight.outside == "keep" and any("micro-batch" in note for note in notes)


def test_miles_masks_and_normalises_as_mis_py_does():
    """Written out in numpy from compute_mis_weights: weights stay raw, their mean is over all tokens."""
    config = {**MIS, "tis_mode": "mask", "tis_lower_bound": 0.7, "tis_batch_normalize": True, "use_rs": True}
    correction = from_miles(
        {**config, "rs_level": "geometric", "rs_lower_bound": 0.8, "rs_upper_bound": 1.2}
    ).correction
    logprobs, advantages = log_probs()
    d, mask = (logprobs.old - logprobs.rollout).numpy(), logprobs.mask.numpy()
    weights = np.exp(d)
    geometric = np.exp(np.where(mask, d, 0).sum(1) / mask.sum(1))[:, None]
    keep = mask & (weights >= 0.7) & (weights <= 2.0) & (geometric >= 0.8) & (geometric <= 1.2)
    keep &= (np.where(mask, d, 0) >= math.log(1e-4)).all(1)[:, None]
    corrected = correction(logprobs, advantages)
    np.testing.assert_array_equal(corrected.keep, keep)
    np.testing.assert_allclose(corrected.weights[mask], (weights / weights[mask].mean())[mask], rtol=1e-6)
    assert 0.1 < keep[mask].mean() < 0.9


def test_trl_corrects_as_its_trainer_does():
    """Written out in numpy: exp of the masked sum, 0 outside [min, max]; OPSM from the sampling log-probs."""
    correction = from_trl({f"{IS}_clip_min": 0.5, f"{IS}_clip_max": 2.0, "off_policy_mask_threshold": 0.05}).correction
    logprobs, advantages = log_probs()
    mask, d = logprobs.mask.numpy(), (logprobs.old - logprobs.rollout).numpy()
    ratio = np.exp(np.where(mask, d, 0).sum(1))
    ratio[(ratio < 0.5) | (ratio > 2.0)] = 0
    kl = np.where(mask, (logprobs.rollout - logprobs.current).numpy(), 0).sum(1) / mask.sum(1)
    keep = (advantages.numpy() >= 0) | (kl <= 0.05)
    corrected = correction(logprobs, advantages)
    np.testing.assert_array_equal(corrected.keep, mask & keep[:, None])
    np.testing.assert_allclose(corrected.weights, np.where(mask, ratio[:, None], 0), rtol=1e-6)
    assert 0 < keep.mean() < 1 and 0 < (ratio == 0).mean() < 1


@pytest.mark.parametrize(
    ("read", "config", "message"),
    [
        (from_verl, {"rollout_iss": "token"}, "verl's rollout_correction has no rollout_iss"),
        (from_verl, {"rollout_is": "geometric"}, "rollout_is='geometric'; choose one of token, sequence"),
        (from_verl, {"rollout_rs": "geometric", "rollout_rs_threshold": 1.1}, "rollout_rs='geometric'"),
        (from_verl, {"rollout_rs": "token_k1"}, "rollout_rs_threshold=None"),
        (from_verl, {"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"}, "one for each of"),
        (from_verl, {"loss_type": "gspo"}, "loss_type='gspo'"),
        (from_trl, {"vllm_importance_sampling_max": 2.0}, "TRL has no vllm_importance_sampling_max"),
        (from_trl, {f"{IS}_mode": "token_clip"}, "choose one of token_truncate, token_mask"),
        (from_miles, {"tis_clip_high": 2.0}, "Miles has no tis_clip_high"),
        (from_miles, {"use_tis": True, "use_rollout_logprobs": True}, "Miles refuses use_tis together with"),
        (from_miles, {**MIS, "tis_level": "geometric", "tis_batch_normalize": True}, "refuses tis_batch_normalize"),
        (from_miles, {**MIS, "tis_mode": "zero"}, "choose one of truncate, clip, mask"),
        (from_miles, {"use_tis": True, "custom_tis_function_path": "a.b"}, "custom_tis_function_path='b'"),
    ],
)
def test_unknown_settings_are_refused(read, config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(config)


def test_modes_that_a_framework_lacks_are_refused():
    for write in (to_verl, to_trl, to_miles):
        with pytest.raises(ValueError, match="mode recompute"):
            write("recompute", preset("token_tis"))
        with pytest.raises(ValueError, match="bypass"):
            write("bypass", preset("token_tis"))
    with pytest.raises(ValueError, match="can't express"):
        to_verl("decoupled", preset("opsm", ratio="current/rollout"))
    with pytest.raises(ValueError, match="rejection without a weight"):
        to_miles("decoupled", preset("geo_rs"))
