"""An engine behind HTTP, as a training loop sees it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedModel

from ..engine import RequestOutput, SamplingParams
from ..engine.weights import check_contract, gathering, specs_of
from ..model.checkpoint import resolve
from ..trainer.fsdp import together
from ..trainer.weight_sync import save_weights
from .client import Client

T = TypeVar("T")


class RemoteEngine:
    """The engine of a `Trainer` in a `samebits serve` elsewhere: Trainer(config, task, RemoteEngine(...)).

    Every FSDP rank makes one, of the same server. Rank 0 sends the weights, the others take part in gathering them.
    model: the checkpoint, for its tokenizer. folder: where weights go on their way, in a file system that the server
    sees too; by default they go over a process group. Requests run together in the next `step`, which returns when all
    of them are finished. Rollouts keep their bits: the contract is compared when training starts.
    """

    def __init__(self, client: Client, model: str | os.PathLike, folder: str | os.PathLike | None = None):
        self.client = client
        self.contract = client.contract
        self.path = resolve(model)
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.weight_version = int(client.weight_version)
        self.folder = folder
        self._queue: dict[str, tuple[Sequence[int], SamplingParams]] = {}
        self._count = 0

    def add_request(self, prompt: str | Sequence[int], sampling_params: SamplingParams) -> str:
        """Queue a prompt for the next `step`, and return the request's id."""
        self._count += 1
        request_id = f"request-{self._count}"
        self._queue[request_id] = self._ids(prompt), sampling_params
        return request_id

    def step(self) -> list[RequestOutput]:
        """Generate all that is queued, in one request to the server, and return the outputs."""
        queue = dict(self._queue)
        self._queue.clear()
        outputs = self.generate([p for p, _ in queue.values()], [s for _, s in queue.values()])
        return [replace(output, request_id=name) for name, output in zip(queue, outputs, strict=True)]

    def abort(self, request_id: str) -> bool:
        """Drop a queued request. False if it isn't queued."""
        return self._queue.pop(request_id, None) is not None

    def generate(self, prompts, sampling_params, use_tqdm: bool = False) -> list[RequestOutput]:
        """Return the outputs of prompts, as `LLM.generate` does."""
        return self.client.generate([self._ids(p) for p in prompts], sampling_params)

    def chat_prompt(self, conversation: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation by the model's chat template."""
        text = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def update_weights(self, source: PreTrainedModel, version: int | None = None) -> int:
        """Send a module's weights from rank 0 and return the version now in force, on all ranks."""
        if self.contract is not None:
            check_contract(source, self.contract)
        if self.folder is None:
            self.weight_version = _common(lambda first: self._send(source, version, first))
        else:
            folder = self.folder
            save_weights(source, folder)
            self.weight_version = _common(lambda first: int(self.client.load_weights(folder, version)) if first else 0)
        return self.weight_version

    def _send(self, source: PreTrainedModel, version: int | None, first: bool) -> int:
        state = source.state_dict()
        with gathering(state) as tensors:  # on all ranks
            return int(self.client.send_weights(specs_of(state), tensors, version)) if first else 0

    def sleep(self) -> int:
        """Free the server's KV cache and return its bytes; rank 0 asks, when all have their rollouts."""
        return _common(lambda first: self.client.post("/sleep?mode=keep")["freed_bytes"] if first else 0)

    def wake_up(self) -> None:
        """Wake the server from its sleep; rank 0 asks."""
        _common(lambda first: self.client.post("/wake_up") if first else None)

    def _ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


def _common(call: Callable[[bool], T]) -> T:
    """Rank 0's result of a call that all ranks make, and that is told who is rank 0. Where one fails, all raise."""
    with together():
        found = [call(dist.get_rank() == 0)]
    dist.broadcast_object_list(found, 0)
    return found[0]
