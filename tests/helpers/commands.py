"""`samebits` as a command, in this process."""

import contextlib
import gc
import io
import subprocess
import sys

import pytest
from rich.console import Console

from samebits.cli import main


def samebits(*args, input=""):
    """Return what a process of this command would: this one has its imports behind it, which cost more than most."""
    command = ["samebits", *map(str, args)]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setenv("COLUMNS", "120")
        patch.setattr(main, "console", Console())
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "stdin", io.StringIO(input))
        try:
            main.main()
        except SystemExit as end:
            code = end.code
    gc.collect()  # an engine's KV pool
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())
