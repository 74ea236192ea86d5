"""A part that crashes, hangs or finds no memory is reported with its case, and the others go on."""

import pathlib
import sys
import time

import psutil
import pytest

import isolate
from helpers import faulty_parts

SCRIPT = pathlib.Path(faulty_parts.__file__)


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(isolate.__file__).parent))
    return [sys.executable, str(SCRIPT)]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_part_that_fails_spoils_no_other(ahead, command, tmp_path):
    deadline = time.monotonic() + 100
    replies = {p.name: r for p, r in isolate.run_parts(faulty_parts.PARTS, command, tmp_path, deadline, ahead)}
    errors = {name: r.error for name, r in replies.items() if r.error}
    assert {name: (e["kind"], e["case"]) for name, e in errors.items()} == {
        "crash": ("died of SIGSEGV", "tile 128x256, 17 rows"),
        "hang": ("no reply in 1 s", "waits for a lost arrival"),
        "no memory": ("out of memory", "batch 256, context 32768"),
        "missing": ("ZeroDivisionError", ""),
    }
    assert errors["no memory"]["message"] == "tried to allocate 90 GiB"
    assert errors["crash"]["repeat"].endswith(f"{SCRIPT} --part crash")
    assert replies["hang"].seconds < 10
    assert replies["wrong bit"].found["differ"] == ["bfloat16 qkv: 17 rows"]
    assert replies["last"].found["known"] == sorted(p.name for p in faulty_parts.PARTS[:-1]), (
        "each part gets what was found"
    )


def test_no_part_starts_after_the_deadline_and_none_is_left(command, tmp_path):
    parts = [faulty_parts.PARTS[2], faulty_parts.PARTS[0]]
    replies = [r for _, r in isolate.run_parts(parts, command, tmp_path, time.monotonic() + 2, ahead=1)]
    assert [r.error["kind"] for r in replies] == ["no reply in 1 s", "no time left"]
    running = [each.cmdline() for each in psutil.Process().children(recursive=True)]
    assert not [line for line in running if str(tmp_path) in line]
