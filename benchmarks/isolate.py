"""Parts of a long run, each in a process of its own: one that crashes, hangs or finds no memory spoils no other.

The parent calls `run_parts`; the command that it starts for a part calls `answer`. Processes for the next parts start
early and do their imports while the part before them runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_case_file: int | None = None


@dataclass(frozen=True)
class Part:
    """One gate or measurement.

    run: called with what the parts before it found, by name; returns what can be written as JSON. seconds: its time
    limit. optional: its failure is no failure of the whole.
    """

    group: str
    name: str
    seconds: float
    run: Callable[[dict[str, Any]], Any]
    optional: bool = False


@dataclass(frozen=True)
class Reply:
    """The findings of a part, or its error: kind, case, message, trace and what repeats it. One of them is None."""

    found: Any
    error: dict[str, str] | None
    seconds: float


def note(case: str) -> None:
    """Say which case runs next: a report of a crash names the last one."""
    if _case_file is not None:
        os.pwrite(_case_file, case[:200].ljust(200).encode(), 0)


def answer(part: Part, folder: pathlib.Path) -> None:
    """Run the part once the parent asks for it on standard input, and write the reply to the folder."""
    global _case_file
    if not sys.stdin.readline():
        return  # the parent has no time left for it
    _case_file = os.open(_path(folder, part.name, "case"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        reply = {"found": part.run(json.loads(_path(folder, part.name, "known").read_text()))}
    except Exception as error:
        no_memory = "OutOfMemoryError" in type(error).__name__ or isinstance(error, MemoryError)
        kind = "out of memory" if no_memory else type(error).__name__
        reply = {"kind": kind, "message": str(error)[-2000:], "trace": traceback.format_exc()[-4000:]}
    scratch = _path(folder, part.name, "reply.part")
    scratch.write_text(json.dumps(reply))
    scratch.rename(_path(folder, part.name, "reply"))


def run_parts(
    parts: list[Part], command: list[str], folder: pathlib.Path, deadline: float, ahead: int = 0
) -> Iterator[tuple[Part, Reply]]:
    """Yield each part with its reply, one after the other.

    command: of a process that answers; `--part NAME --folder FOLDER` is added. deadline: by `time.monotonic`; parts for
    which it leaves no time get an error for a reply. ahead: processes that are started early.
    """
    known: dict[str, Any] = {}
    children: dict[str, _Child] = {}
    try:
        for index, part in enumerate(parts):
            left = deadline - time.monotonic()
            if left < min(5.0, part.seconds):
                yield part, Reply(None, {"kind": "no time left", "message": "the whole run's time is used up"}, 0.0)
                continue
            for each in parts[index : index + 1 + ahead]:
                if each.name not in children:
                    children[each.name] = _Child([*command, "--part", each.name], each.name, folder)
            reply = children[part.name].ask(known, min(part.seconds, left))
            known[part.name] = reply.found
            yield part, reply
    finally:
        for child in children.values():
            child.stop()


class _Child:
    """A process that waits to be asked for its part."""

    def __init__(self, command: list[str], name: str, folder: pathlib.Path):
        self._command, self._name, self._folder = command, name, folder
        self._log, self._stopped = _path(folder, name, "log"), False
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--folder", str(folder)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def ask(self, known: dict[str, Any], limit: float) -> Reply:
        """Return the part's reply, in `limit` seconds at most."""
        begin, late = time.monotonic(), False
        assert self._process.stdin is not None
        _path(self._folder, self._name, "known").write_text(json.dumps(known))  # a pipe could be full
        with contextlib.suppress(BrokenPipeError):  # it died early: its log says why
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
        self.stop()
        took, path = time.monotonic() - begin, _path(self._folder, self._name, "reply")
        reply = json.loads(path.read_text()) if path.exists() else {}
        if "found" in reply:
            return Reply(reply["found"], None, took)
        return Reply(None, self._error(reply, f"no reply in {limit:.0f} s" if late else ""), took)

    def _error(self, reply: dict[str, str], late: str) -> dict[str, str]:
        code, case = self._process.returncode, _path(self._folder, self._name, "case")
        ended = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code} and no reply"
        error = {"kind": late or ended, "message": self._log.read_text(errors="replace")[-2000:], **reply}
        error["case"] = case.read_text().strip() if case.exists() else ""
        error["repeat"] = "CUDA_LAUNCH_BLOCKING=1 " + shlex.join(self._command)
        return error

    def stop(self) -> None:
        """End it and all that it has started."""
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _path(folder: pathlib.Path, name: str, kind: str) -> pathlib.Path:
    return folder / f"{name.replace(' ', '_')}.{kind}"
