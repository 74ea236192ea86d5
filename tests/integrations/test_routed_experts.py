"""Routed experts in the rollouts of other engines and trainers."""

import base64
import io

import numpy as np
import orjson
import pytest
import torch

from samebits.engine.expert_wire import int32_parts, npy_text, parse_ids, shape_ids
from samebits.integrations.rollouts import Rollout, RolloutFormatError, read_rollouts, write_rollouts

PROMPT, TOKENS = [5, 6, 7], [8, 9]
LAYERS, K = 3, 2
IDS = np.random.default_rng(0).permuted(np.tile(np.arange(7), (5, LAYERS, 1)), axis=-1)[..., :K]


def read_lines(tmp_path, *records):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, records)))
    return [rollout.routed_experts for rollout in read_rollouts(path)]


def vllm_reply(ids):
    logprobs = {"token_logprobs": [-1.0, -2.0], "tokens": ["token_id:8", "token_id:9"], "top_logprobs": [None, None]}
    choice = {"token_ids": TOKENS, "prompt_token_ids": PROMPT, "logprobs": logprobs, "routed_experts": ids}
    return {"id": "x", "choices": [choice]}


def sglang_reply(ids):
    meta = {"output_token_logprobs": [[-1.0, 8, None], [-2.0, 9, None]], "routed_experts": ids}
    return {"output_ids": TOKENS, "prompt_token_ids": PROMPT, "meta_info": meta}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_vllm_replies(tmp_path, dtype):
    file = io.BytesIO()
    np.save(file, IDS[:4].astype(dtype))
    (found,) = read_lines(tmp_path, vllm_reply(base64.b64encode(file.getvalue()).decode()))
    assert found.dtype == dtype and np.array_equal(found, IDS[:4])
    assert read_lines(tmp_path, vllm_reply(None)) == [None]


@pytest.mark.parametrize("rows", [4, 5])  # with the last token, and without it
def test_sglang_replies(tmp_path, rows):
    (found,) = read_lines(tmp_path, sglang_reply(base64.b64encode(IDS[:rows].astype("<i4").tobytes()).decode()))
    assert np.array_equal(shape_ids(found, 5, LAYERS, K), IDS[:4])


def test_plain_records(tmp_path):
    record = {"token_ids": TOKENS, "prompt_token_ids": PROMPT, "rollout_logprobs": [-1.0, -2.0]}
    found = read_lines(tmp_path, record | {"routed_experts": IDS.tolist()}, record | {"routed_experts": npy_text(IDS)})
    assert all(np.array_equal(ids, IDS) for ids in found)
    path = tmp_path / "written.jsonl"
    write_rollouts(path, [Rollout(np.array(TOKENS), np.array([-1.0, -2.0]), routed_experts=IDS.astype(np.uint8))])
    (read,) = read_rollouts(path)
    assert read.routed_experts.dtype == np.uint8 and np.array_equal(read.routed_experts, IDS)


@pytest.mark.parametrize("bad", ["!", [[0.5]], "AAA", base64.b64encode(b"\x93NUMPY").decode()])
def test_what_are_no_experts_is_refused_with_its_line(tmp_path, bad):
    with pytest.raises(RolloutFormatError, match=r"jsonl:1.*routed experts"):
        read_lines(tmp_path, sglang_reply(bad))


def test_a_pickle_is_not_read():
    file = io.BytesIO()
    np.save(file, np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        parse_ids(base64.b64encode(file.getvalue()).decode())


def test_verl_dumps(tmp_path):
    """Prompts are padded on the left, responses on the right; what wasn't recorded is 0."""
    attention = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]])
    routed = torch.zeros(2, 7, LAYERS, K, dtype=torch.uint8)
    routed[0, 1:5] = torch.from_numpy(IDS[:4])
    routed[1, 1:6] = torch.from_numpy(IDS)
    batch = {
        "prompts": torch.arange(8).view(2, 4), "responses": torch.arange(6).view(2, 3),
        "response_mask": attention[:, 4:], "attention_mask": attention, "rollout_log_probs": -torch.ones(2, 3),
        "routed_experts": routed,
    }  # fmt: skip
    torch.save(batch, tmp_path / "dump.pt")
    first, second = (rollout.routed_experts for rollout in read_rollouts(tmp_path / "dump.pt"))
    assert np.array_equal(shape_ids(first, 5, LAYERS, K), IDS[:4])
    assert (second[[0, 6]] == -1).all() and np.array_equal(second[1:6], IDS)


def test_rollout_data_of_slime_and_miles(tmp_path):
    sample = {
        "tokens": [*PROMPT, *TOKENS], "response_length": 2, "rollout_log_probs": [-1.0, -2.0], "loss_mask": [1, 0],
        "group_index": 3, "rollout_routed_experts": IDS[:4].astype(np.int32),
    }  # fmt: skip
    torch.save({"rollout_id": 0, "samples": [sample]}, tmp_path / "rollout_0.pt")
    (read,) = read_rollouts(tmp_path / "rollout_0.pt")
    assert (read.prompt_token_ids.tolist(), read.token_ids.tolist()) == (PROMPT, TOKENS)
    assert read.mask.tolist() == [True, False] and read.group == "3"
    assert np.array_equal(read.routed_experts, IDS[:4])


def test_both_texts_hold_the_array():
    assert np.array_equal(parse_ids(npy_text(IDS)), IDS)
    assert np.array_equal(parse_ids(b"".join(int32_parts(IDS))).reshape(IDS.shape), IDS)
    first = IDS - IDS.flat[0] + 147  # whose first byte is that of a .npy file
    assert np.array_equal(parse_ids(b"".join(int32_parts(first))).reshape(IDS.shape), first)
    with pytest.raises(ValueError, match=r"shape \[30\], expected \[8, 3, 2\]"):
        shape_ids(IDS.reshape(-1), 9, LAYERS, K)
