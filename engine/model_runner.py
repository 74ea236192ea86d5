"""One step of a model: tokens in, through HF's own forward over the paged cache, tokens out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels import ops
from ..model import attention
from ..model.exact import LMHead
from ..model.paged import group_size, hidden_states, new_kv_caches, random_input
from ..model.rollout import forget_steps, prepare_rollout
from ..model.routing import RoutedExperts, new_routing_cache
from .cuda_graphs import StepGraphs
from .planner import Plan
from .sampler import SAMPLED_ROWS, SamplerOutput, sample


class ModelRunner:
    """A model, or a pipeline stage's slice of one, with the KV cache of its layers.

    graph_limits: max_num_seqs, max_num_batched_tokens and max_model_len, for CUDA graphs; None: no graphs.
    """

    def __init__(self, model: PreTrainedModel, num_blocks: int, graph_limits: tuple[int, int, int] | None = None):
        self.model = model
        model.set_attn_implementation(attention.PACKED)  # paged KV has no other
        self.num_blocks = num_blocks
        self.take_kv_cache()
        prepare_rollout(model)
        self._last_token_ids = torch.empty(0, dtype=torch.long)  # that the last step sampled
        self.graphs: StepGraphs | None = None
        if graph_limits is not None:
            self.graphs = StepGraphs(self._forward, model.device, group_size(model.config), *graph_limits)

    @property
    def head(self) -> LMHead | None:
        """The lm_head, on the last stage."""
        return self.model.get_output_embeddings()

    @staticmethod
    def block_bytes(model: PreTrainedModel) -> int:
        """Return the bytes of one KV block over all layers."""
        caches = [cache for pair in new_kv_caches(model, 1) for cache in pair]
        experts = new_routing_cache(model, 1)
        return sum(cache.nbytes for cache in caches) + (0 if experts is None else experts[0].nbytes)

    def take_kv_cache(self) -> None:
        """Allocate the KV cache, empty."""
        self.kv_caches = new_kv_caches(self.model, self.num_blocks)
        self.routing_cache = new_routing_cache(self.model, self.num_blocks)

    def free_kv_cache(self) -> None:
        """Give the KV cache's memory back."""
        self.kv_caches = []
        if self.routing_cache is not None:
            self.routing_cache = self.routing_cache[:0].clone()
        self.release()

    def release(self) -> None:
        """Give free memory back to the device, and forget launches and graphs, whose KV or weights have gone."""
        forget_steps(self.model)
        if self.graphs is not None:
            self.graphs.clear()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole KV blocks, source to destination, in every layer."""
        if copies:
            source, destination = ops.to_device(np.array(copies, np.int64), self.model.device).unbind(1)
            caches = [cache for pair in self.kv_caches for cache in pair]
            for cache in caches if self.routing_cache is None else [*caches, self.routing_cache]:
                cache[destination] = cache[source]

    @torch.inference_mode()
    def run(self, plan: Plan, hidden: Tensor | None = None) -> Tensor | SamplerOutput:
        """Compute the plan's KV. Return the tokens that it samples and scores, or [T, hidden] for the next stage.

        hidden: what the stage before this one returned, if there is one.
        """
        self.copy_blocks(plan.block_copies)
        given = self._token_ids(plan.token_ids) if hidden is None else hidden
        replayed = None if self.graphs is None else self.graphs.run(plan.layout, given)
        hidden = self._forward(given, plan.layout) if replayed is None else replayed
        if self.head is None:
            return hidden if replayed is None else hidden.clone()  # sent while the next step runs
        output = sample(self.head, hidden, plan.sampling)
        self._last_token_ids = output.token_ids
        return output

    def _token_ids(self, token_ids: np.ndarray) -> Tensor:
        """Return the ids on the device, those below 0 from the step before, which may still run."""
        count = len(token_ids)
        last = self._last_token_ids
        if token_ids.min() >= 0:
            return ops.to_device(token_ids, self.model.device)
        if np.array_equal(token_ids, -1 - np.arange(count)):  # it sampled all of them, in this order
            return last[:count]
        places = np.where(token_ids < 0, -1 - token_ids, len(last) + np.arange(count))
        uploaded = ops.to_device(np.concatenate((token_ids, places)), self.model.device)
        return torch.cat((last, uploaded[:count]))[uploaded[count:]]

    def _forward(self, given: Tensor, layout: ops.PagedLayout) -> Tensor:
        """Return the hidden states of token ids [T], or of hidden states [T, hidden] of the stage before."""
        if self.routing_cache is None:
            return hidden_states(self.model, given, layout, self.kv_caches)
        slots = layout.on(self.model.device).slot_mapping.long()  # -1, the last block, where a graph has no token
        routed = RoutedExperts(noted=self.routing_cache.flatten(0, 1), at=slots)
        return hidden_states(self.model, given, layout, self.kv_caches, routed_experts=routed)

    def read_experts(self, slots: np.ndarray) -> np.ndarray:
        """Return the experts of the tokens in these KV slots, integers [slots, layers, k]; k is 0 in a dense stage."""
        if self.routing_cache is None:
            return np.empty((len(slots), self.model.config.num_hidden_layers, 0), np.uint8)
        rows = self.routing_cache.flatten(0, 1)[torch.from_numpy(slots).to(self.model.device)]
        return rows.cpu().numpy()

    @staticmethod
    def peak_bytes(model: PreTrainedModel, tokens: int) -> int:
        """Return the bytes that a step of `tokens` tokens takes on a GPU beside weights and KV, as measured."""
        device = model.device
        config = model.config
        most = config.max_position_embeddings
        lengths = [most] * (tokens // most) + [tokens % most] * (tokens % most > 0)
        layout = ops.packed_layout(lengths, group_size(config), device)
        first = random_input(model, tokens)
        before = torch.cuda.memory_allocated(device)
        for _ in range(2):  # products that are proven at their first use take memory for it
            out = logits = None
            torch.cuda.reset_peak_memory_stats(device)
            with torch.inference_mode():
                out = hidden_states(model, first, layout)
                if (head := model.get_output_embeddings()) is not None:
                    logits = head.logits(out[:SAMPLED_ROWS])
                    ops.sample(logits, ops.RowParams.repeat(len(logits)), torch.full((len(logits),), -1, device=device))
        peak = torch.cuda.max_memory_allocated(device) - before
        del out, logits, first, layout
        torch.cuda.empty_cache()
        return peak
