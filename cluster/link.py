"""What stages of a pipeline send each other: plans from the first to all, hidden states to the next, tokens back."""

from __future__ import annotations

import pickle
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.executor import WorkerError
from ..engine.weights.group import new_backend

FRAME = 2**14  # bytes of a message's first part, which the receiver awaits without knowing how long the whole is
HIDDEN, PLANS, TOKENS = range(3)  # tags
FOREVER = timedelta(days=365)


class Mail:
    """A message on its way in."""

    def __init__(self, link: Link, source: int, tag: int):
        self._link = link
        self._source = source
        self._tag = tag
        self._frame = torch.empty(FRAME, dtype=torch.uint8)
        self._work = link.control.recv([self._frame], source, tag)

    def wait(self, limit: timedelta = FOREVER) -> Any:
        """Return the message. RuntimeError where it doesn't come in time, or the sender has died."""
        self._work.wait(limit)
        size = int(self._frame[:8].view(torch.int64))
        message = self._frame[8 : 8 + size]
        if size > FRAME - 8:
            rest = torch.empty(size - len(message), dtype=torch.uint8)
            self._link.control.recv([rest], self._source, self._tag).wait(limit)
            message = torch.cat((message, rest))
        return pickle.loads(message.numpy().data)


class Link:
    """A stage's connections to the others of its pipeline: gloo, and nccl for hidden states on GPUs.

    timeout: seconds that hidden states may take.
    """

    def __init__(self, address: str, port: int, rank: int, stages: int, timeout: float, device: torch.device):
        where = f"{address}:{port}"
        self.rank = rank
        self.timeout = timeout
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.control = new_backend(where, rank, stages, "pipeline", "gloo", timeout)
        self._hidden = new_backend(where, rank, stages, "hidden", "nccl", timeout) if self.on_gpu else self.control
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, message: Any, to: int, tag: int) -> None:
        """Send a message; returns at once."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        size = torch.tensor([len(data)]).view(torch.uint8)
        whole = torch.cat((size, torch.frombuffer(bytearray(data), dtype=torch.uint8)))
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        frame[: len(whole)] = whole[:FRAME]
        self._keep(self.control.send([frame], to, tag), frame)
        if len(whole) > FRAME:
            rest = whole[FRAME:].clone()
            self._keep(self.control.send([rest], to, tag), rest)

    def expect(self, source: int, tag: int) -> Mail:
        """Await the next message of a tag from another stage. Over gloo nothing is sent to one that awaits nothing."""
        return Mail(self, source, tag)

    def send_hidden(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage, which may still be busy; returns at once."""
        hidden = hidden.contiguous()
        self._keep(self._hidden.send([hidden], self.rank + 1, HIDDEN), hidden)

    def expect_hidden(self, room: Tensor) -> dist.Work:
        """Await hidden states from the stage before, to be written to `room`."""
        return self._hidden.recv([room], self.rank - 1, HIDDEN)

    def wait_hidden(self, work: dist.Work) -> None:
        """Wait for hidden states. Raises WorkerError where they don't come in time."""
        try:
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            what = f"hidden states of stage {self.rank - 1}"
            raise WorkerError(f"{what} did not come within {self.timeout:g} s, or its process died: {error}") from error

    def _keep(self, work: dist.Work, tensor: Tensor) -> None:
        """Keep a tensor until it is sent."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        self._sending.append((work, tensor))

    def close(self) -> None:
        """Cut the connections, which the other stages notice."""
        self.control.abort()
        if self.on_gpu:
            self._hidden.abort()
