"""Parts that fail in each way a GPU's may: faulty_parts.py --part NAME --folder FOLDER; see test_isolate.py."""

import ctypes
import pathlib
import sys
import time

import isolate


class OutOfMemoryError(RuntimeError):
    """As torch's is called."""


def crash(known):
    isolate.note("tile 128x256, 17 rows")
    ctypes.string_at(0)


def hang(known):
    isolate.note("waits for a lost arrival")
    time.sleep(60)


def no_memory(known):
    isolate.note("batch 256, context 32768")
    raise OutOfMemoryError("tried to allocate 90 GiB")


def wrong_bit(known):
    return {"compared": 9, "differ": ["bfloat16 qkv: 17 rows"]}


PARTS = [
    isolate.Part("bits", "first", 20, lambda known: {"compared": 1, "differ": []}),
    isolate.Part("bits", "crash", 20, crash),
    isolate.Part("bits", "hang", 1, hang),
    isolate.Part("bits", "no memory", 20, no_memory),
    isolate.Part("bits", "wrong bit", 20, wrong_bit),
    isolate.Part("speed", "missing", 20, lambda known: 1 / 0, optional=True),
    isolate.Part("speed", "last", 20, lambda known: {"known": sorted(known)}),
]


if __name__ == "__main__":
    name, folder = sys.argv[2], pathlib.Path(sys.argv[4])
    isolate.answer(next(part for part in PARTS if part.name == name), folder)
