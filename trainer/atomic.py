"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import pathlib
import shutil


def publish(draft: pathlib.Path, target: pathlib.Path) -> None:
    """Give a finished folder its name. An older one of this name is moved aside first, and removed at the end.

    A crash between the two renames leaves it as .NAME.old, and nothing of its name.
    """
    old = target.with_name(f".{target.name}.old")
    sync(draft)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(draft, target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: pathlib.Path) -> None:
    """Write a file, or the entries of a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
