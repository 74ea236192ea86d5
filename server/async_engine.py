"""The engine in a thread of its own, behind an asyncio front end.

That thread alone drives the engine; others read its attributes and `stats`, as `Engine` allows. It takes commands
between steps and hands each step's outputs to the event loop in one call, so that the loop wakes once per step, however
many requests run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from ..engine import LLM, RequestOutput, SamplingParams
from ..engine.request import Request
from .options import Limits
from .states import ConflictError, ServerState, UnavailableError
from .tokenization import Tokenization

logger = logging.getLogger(__name__)
T = TypeVar("T")
IDLE = 0.5  # seconds that the engine's thread waits for a command at a time
INLINE_PROMPT = 4096  # characters or tokens of a call that are cheaper to check at once than in another thread


class GenerationError(RuntimeError):
    """The engine failed while it worked on a request."""


class GenerateRequest(NamedTuple):
    """The request that every dialect's becomes: one prompt (text, token ids, or what makes them), sampled `n` times.

    request_id: tells the prompts of a call apart; None: it is the call's own.
    """

    prompt: str | list[int] | Callable[[], Awaitable[list[int]]]
    params: SamplingParams
    cache_salt: str | None = None
    request_id: str | None = None


class Generation:
    """The engine requests of one call, and the way back of their outputs.

    sizes: id of each -> its samples. admitted: the engine has them, or will before any later command. aborted: those
    that were aborted before.
    """

    def __init__(self, engine: AsyncEngine, request_id: str, sizes: dict[str, int]):
        self.engine = engine
        self.request_id = request_id
        self.index = {name: i for i, name in enumerate(sizes)}
        self.unfinished = dict(sizes)
        self.admitted = False
        self.aborted: set[str] = set()
        self.queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the request, output), as they come. Raises GenerationError where a step failed."""
        left = len(self.index)
        while left:
            item = await self.queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finished
            yield self.index[item.request_id], item

    async def final(self) -> list[RequestOutput]:
        """The last output of each request; `close`s in the end. Raises GenerationError where one failed."""
        try:
            last = {index: output async for index, output in self.outputs()}
        finally:
            self.close()
        for c in itertools.chain.from_iterable(output.completions for output in last.values()):
            if c.finish_reason == "error":
                raise GenerationError(str(c.stop_reason))
        return [last[i] for i in range(len(self.index))]

    def close(self) -> None:
        """Nobody waits any more: what still runs is aborted."""
        if self.unfinished:
            self.engine.abort([self.request_id])


class AsyncEngine:
    """An engine for coroutines: it admits, pauses and reports. `llm` belongs to its thread once `start` was called.

    limits: of each call, and of what may run and wait, if there are any; more of that is `UnavailableError`.
    """

    def __init__(self, llm: LLM, limits: Limits | None = None):
        self.llm = llm
        self.state = ServerState(llm)
        self.tokenization = Tokenization(llm)
        self.limits = limits or Limits()
        self.on_step: Callable[[float], None] = lambda seconds: None  # called by the engine's thread
        self.generations: dict[str, Generation] = {}
        self.by_engine_id: dict[str, Generation] = {}
        self.finished: Counter[str] = Counter()  # samples by finish_reason
        self.num_sequences = 0  # admitted and unfinished
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread; results go to the running event loop."""
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    async def stop(self) -> None:
        """End the engine thread; wait for it for at most ten seconds."""
        self._stopping = True
        self.call(lambda llm: None)
        await asyncio.to_thread(self.thread.join, 10)

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                while not self._stopping:  # inside, as another thread may raise an error here between two turns
                    self._turn()
            except BaseException as error:  # whatever ends a step, the thread must live
                logger.exception("the engine failed in a step; its requests fail with it")
                self._fail_all(error)

    def _turn(self) -> None:
        self.llm.engine.poll()
        self._take_commands(wait=not self._has_work())
        if self._stopping:
            return
        working = self._has_work()  # a command may have paused it, or put it to sleep
        begin = time.perf_counter()
        outputs = self.llm.step() if working else self.llm.take_outputs()
        if working and not self.llm.engine.steps_by_itself:
            self.on_step(time.perf_counter() - begin)
        if outputs:
            self.loop.call_soon_threadsafe(self._deliver, outputs)

    def _has_work(self) -> bool:
        unfinished = self.llm.has_unfinished_requests()
        return unfinished and (self.llm.failure is not None or (self.llm.ready and not self.state.paused))

    def _take_commands(self, wait: bool) -> None:
        while wait or not self._commands.empty():
            wait = False
            with contextlib.suppress(queue.Empty):  # a look at the replicas
                self._commands.get(timeout=IDLE)()

    def _fail_all(self, error: BaseException) -> None:
        """A step failed half-way: no request's state can be trusted, and none may wait for ever, nor for replicas."""
        self.loop.call_soon_threadsafe(self._deliver_failure, error)
        try:
            for request_id in list(self.llm.unfinished_request_ids):
                self.llm.abort(request_id)
            if self.llm.failure is None:
                self.llm.reset_prefix_cache()
            self.llm.take_outputs()
        except Exception:  # the thread must live
            logger.exception("the engine could not be cleared")

    def _add(self, generation: Generation, requests: list[Request]) -> None:
        try:
            for request in requests if generation.unfinished else ():  # a step may have failed since, and with it these
                self.llm.add_request(request)
            for name in generation.aborted:
                self.llm.abort(name)
        except Exception as error:
            logger.exception("a checked request was not admitted")
            for request in requests:
                self.llm.abort(request.request_id)
            self.loop.call_soon_threadsafe(self._end, generation, error)

    # --- the event loop ---------------------------------------------------------------------------------------------

    def call(self, function: Callable[[LLM], T]) -> Awaitable[T]:
        """Have the engine's thread run function(llm) between two steps."""
        future: Future[T] = Future()
        self._commands.put(lambda: fulfil(future, function, self.llm))
        self.llm.engine.wake()
        return asyncio.wrap_future(future)

    async def submit(self, requests: Sequence[GenerateRequest], request_id: str) -> Generation:
        """Admit all of them or none. ValueError and TypeError: they can't be served; UnavailableError: not now."""
        self.state.check_admits()
        self.limits.check_params([r.params for r in requests])
        count = sum(r.params.n for r in requests)
        if self.num_sequences + count > self.limits.sequences:
            raise UnavailableError(
                f"the queue is full: {self.num_sequences} sequences run or wait, {self.limits.sequences} may"
            )
        sizes = {request.request_id or request_id: request.params.n for request in requests}
        if len(sizes) < len(requests):
            raise ValueError("two prompts of the call have the same request_id")
        for name in (request_id, *sizes):
            if name in self.generations or name in self.by_engine_id:
                raise ValueError(f"request_id {name!r} is in use")
        generation = Generation(self, request_id, sizes)
        self.generations[request_id] = generation  # claims the ids and the room while prompts are tokenised
        self.by_engine_id.update(dict.fromkeys(sizes, generation))
        self.num_sequences += count
        self._idle.clear()
        try:
            checked = await self._checked(requests, sizes)
            self.limits.check_reply(checked)
            for request in checked:
                request.call = request_id
        except BaseException:
            for name in sizes:
                self._release(name)
            raise
        if generation.unfinished:  # or a step failed meanwhile, and with it this
            generation.admitted = True
            self.call(lambda llm: self._add(generation, checked))
        return generation

    async def _checked(self, requests: Sequence[GenerateRequest], names: Iterable[str]) -> list[Request]:
        """Check and tokenise a call's prompts, one after another, so that others get their turns in the threads."""
        prompts = [await r.prompt() if callable(r.prompt) else r.prompt for r in requests]
        for prompt in prompts:
            self.tokenization.check_length(prompt)
        inline = sum(map(len, prompts)) <= INLINE_PROMPT and all(r.params.structured_outputs is None for r in requests)
        process = self.llm.process
        checked = []
        for r, prompt, name in zip(requests, prompts, names, strict=True):
            arguments = {"prompt": prompt, "cache_salt": r.cache_salt}, r.params, name, self.tokenization.processor
            checked.append(process(*arguments) if inline else await self.tokenization.in_thread(process, *arguments))
        return checked

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            generation = self.by_engine_id.get(output.request_id)
            self.finished.update(c.finish_reason for c in output.completions if c.finish_reason)
            if output.finished:
                self._release(output.request_id)
            if generation is not None:
                generation.queue.put_nowait(output)

    def _release(self, engine_id: str) -> None:
        generation = self.by_engine_id.pop(engine_id, None)
        if generation is None:
            return
        self.num_sequences -= generation.unfinished.pop(engine_id)
        if not generation.unfinished:
            del self.generations[generation.request_id]
        if not self.generations:
            self._idle.set()
            self.state.note_idle()

    def _deliver_failure(self, error: BaseException) -> None:
        for generation in list(self.generations.values()):
            self._end(generation, error)

    def _end(self, generation: Generation, error: BaseException) -> None:
        for engine_id in list(generation.unfinished):
            self._release(engine_id)
        generation.queue.put_nowait(GenerationError(f"{type(error).__name__}: {error}"))

    def abort(self, request_ids: Sequence[str] = ()) -> Awaitable[int]:
        """End calls or single prompts of calls, or all, with finish_reason "abort" and what they have.

        Await the number of prompts that were ended.
        """
        ids: set[str] = set()
        for name in request_ids or self.generations:
            call = self.generations.get(name)
            ids.update(call.unfinished if call else [name])
        early = [name for name in ids if name in self.by_engine_id and not self.by_engine_id[name].admitted]
        for name in early:
            self.by_engine_id[name].aborted.add(name)
        return self.call(lambda llm: len(early) + sum(map(llm.abort, sorted(ids.difference(early)))))

    async def pause(self, mode: str, refuse: bool) -> None:
        """Stop between two steps; return when nothing runs.

        mode: "abort" ends what is there; "wait" lets it finish; "keep" leaves it as it is, to go on after `resume` (and
        across a weight update, on the old KV); "retract" takes its KV, to be recomputed. refuse: turn new requests
        away until `resume`, instead of queueing them. Raises ConflictError where a resume came first, or where what
        "wait" waits for can't end.
        """
        if mode == "wait" and self.generations:
            await self.state.begin_pausing(refuse).wait()
        else:
            self.state.pause(mode, refuse)
            if mode == "abort":
                await self.abort()
        await self._tell_replicas()
        if mode == "retract":
            await self.call(lambda llm: llm.reset_prefix_cache(reset_running_requests=True))
        if not self.state.paused or (mode == "wait" and self.generations):
            raise ConflictError(f"the pause ({mode}) was ended by another call; the server is {self.state.name}")

    async def resume(self) -> None:
        """Take and run requests again after a pause."""
        self.state.resume()
        await self._tell_replicas()

    async def _tell_replicas(self) -> None:
        """Have those that step by themselves stop or go on, as it is when the call reaches them."""
        await self.call(lambda llm: llm.engine.pause(self.state.paused))

    async def release_memory(self, tags: Sequence[str]) -> int:
        """Free what the tags name; return the bytes freed. Requests stay."""
        self.state.end_pausing()
        return await self.call(lambda llm: llm.release_memory(tags))

    async def wait_idle(self, seconds: float) -> bool:
        """Wait at most so long until nothing runs or waits; return whether it is so."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()

    async def drain(self, deadline: float) -> None:
        """Take no more requests; let the rest finish for `deadline` seconds, then abort it."""
        if self.state.paused or not self.llm.ready:
            deadline = 0
        self.state.stopping = True
        if not await self.wait_idle(deadline):
            logger.warning("aborting %d requests at the deadline", len(self.by_engine_id))
            await self.abort()
            await self._idle.wait()


def fulfil(future: Future[T], function: Callable[..., T], *args: Any) -> None:
    """Give a future what a function returns or raises. What is no Exception goes on, too: the thread is meant."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except BaseException as error:
        said = error if isinstance(error, Exception) else GenerationError(f"{type(error).__name__}: {error}")
        if not future.done():
            future.set_exception(said)
        if said is not error:
            raise
