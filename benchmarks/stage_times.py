"""The time of a decode step in a stage of a pipeline, for the benchmarks."""

from __future__ import annotations

import time

import numpy as np
import torch

from samebits.engine.model_runner import ModelRunner
from samebits.engine.planner import Plan
from samebits.engine.sampler import SamplerOutput, SamplingMetadata
from samebits.kernels import ops


def decode_seconds(runner: ModelRunner, seqs: int, context: int, repeats: int = 7, tokens: int = 1) -> float:
    """Median time of a step in a stage that isn't the first, of `tokens` tokens for each of `seqs` sequences after
    `context` tokens."""
    model, config, kernels = runner.model, runner.model.config, ops.backend(runner.model.device)
    blocks = (context + tokens - 1) // kernels.BLOCK + 1
    positions = np.tile(np.arange(context, context + tokens, dtype=np.int32), seqs)
    tables = np.arange(seqs * blocks, dtype=np.int32)
    starts = tables[::blocks].copy()
    size = np.int32(kernels.BLOCK)
    slot_mapping = tables[np.repeat(starts, tokens) + positions // kernels.BLOCK] * size + positions % size
    items = kernels.work_items([tokens] * seqs, config.num_attention_heads // config.num_key_value_heads)
    layout = ops.PagedLayout([tokens] * seqs, positions, slot_mapping, tables, starts, items)
    none = np.zeros(seqs, np.int64)
    params = ops.RowParams.repeat(seqs)
    rows = np.arange(tokens - 1, seqs * tokens, tokens)
    sampling = SamplingMetadata(rows, none - 1, none.astype(np.uint64), none, none, params, [-1] * seqs, False)
    plan = Plan(none, layout, [], sampling)
    hidden = torch.randn(seqs * tokens, config.hidden_size).to(model.device, model.dtype)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = runner.run(plan, hidden)
        if isinstance(out, SamplerOutput):
            out.wait()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]
