"""The server's states and every transition between them, in one place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from ..engine import LLM, WeightUpdate


class ConflictError(RuntimeError):
    """Something else is in the way of what was asked."""


class UnavailableError(RuntimeError):
    """The server takes no request now; the client may try again later."""


class ServerState:
    """The state of the server. The event loop alone changes it; no transition waits, so none meets another half-way.

    | call | from | to |
    |---|---|---|
    | a pause that waits | serving, with requests | pausing; paused when the last request ends |
    | | serving, without any; paused, without any | paused |
    | | paused or asleep, with requests, which can't end | 409 |
    | any other pause | serving, pausing, paused | paused; pauses that still wait are over: 409 unless nothing runs |
    | a resume | pausing | serving; the pauses that wait are over: 409 |
    | | paused | serving |
    | | updating | 409; tensors that came in part are forgotten, so that the next resume is served |
    | a weight update | any but updating | updating, and back; also between the calls that bring its tensors |
    | | updating, by another call | 409 |
    | memory is released | any | asleep; the pauses that wait are over: 409 |
    | memory is taken back | asleep | what was there before; vLLM's wake_up resumes, too, unless updating lies below |
    | SIGTERM | any | stopping, for good |

    updating and asleep lie over the other three, which go on below them. One name is told: the topmost.

    pause_mode: of the pause in force, if there is one. refuses: it turns new requests away, and doesn't keep them.
    update: what the call that updates weights does. pending: the update whose tensors have come in part.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self.pause_mode: str | None = None  # the engine's thread reads it
        self.refuses = False
        self.stopping = False
        self.update: str | None = None
        self.pending: WeightUpdate | None = None
        self._waiting: asyncio.Event | None = None  # set when the pauses that wait are over

    @property
    def paused(self) -> bool:
        """True while a pause is in force."""
        return self.pause_mode is not None

    @property
    def name(self) -> str:
        """The topmost state: serving, pausing, paused, updating, asleep or stopping."""
        if self.stopping:
            return "stopping"
        if not (self.llm.has_weights and self.llm.has_kv_cache):
            return "asleep"
        if self.update is not None or self.pending is not None:
            return "updating"
        if self.paused:
            return "paused"
        return "serving" if self._waiting is None else "pausing"

    def check_admits(self) -> None:
        """Raise UnavailableError where new requests are turned away."""
        if self.llm.failure is not None:
            raise UnavailableError(f"the engine is broken: {self.llm.failure}; restart the server")
        if self.stopping or self.refuses:
            raise UnavailableError(f"the server is {'shutting down' if self.stopping else 'paused'}")
        if not self.llm.ready and not self.paused:
            raise UnavailableError("the engine sleeps or has no weights; wake it up, or update its weights")

    # --- transitions ------------------------------------------------------------------------------------------------

    def begin_pausing(self, refuses: bool) -> asyncio.Event:
        """Begin a pause that waits for running requests; return what is set when it is over, in either way."""
        if self.paused or not self.llm.ready:
            raise ConflictError(f"the server is {self.name}: its requests can't end; resume it, or pause with abort")
        self.refuses = refuses
        self._waiting = self._waiting or asyncio.Event()
        return self._waiting

    def note_idle(self) -> None:
        """Put the pauses in force that wait for the last request."""
        if self._waiting is not None:
            self.pause("wait", self.refuses)

    def end_pausing(self) -> None:
        """End the pauses that wait, and what they refuse."""
        if self._waiting is not None:
            self._waiting.set()
            self._waiting = None
            self.refuses = False

    def pause(self, mode: str | None, refuses: bool) -> None:
        """Pause now; None: end all pauses."""
        self.end_pausing()
        self.pause_mode = mode
        self.refuses = refuses

    def resume(self) -> None:
        """End all pauses."""
        self.pause(None, refuses=False)

    @contextlib.contextmanager
    def updating(self, what: str) -> Iterator[None]:
        """Be in a call that updates weights. Raises ConflictError in another one."""
        self.check_no_update()
        self.update = what
        try:
            yield
        finally:
            self.update = None

    def check_no_update(self) -> None:
        """Raise ConflictError, naming it, while a call updates weights."""
        if self.update is not None:
            raise ConflictError(f"a weight update is in progress ({self.update}); wait until it has ended")
