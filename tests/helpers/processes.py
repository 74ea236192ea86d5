"""Servers and routers as processes of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import httpx

from helpers.serving import free_port, wait_for


@contextlib.contextmanager
def started(command, port, seconds=60):
    """A process that answers /health on a port."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:

        def answers():
            assert process.poll() is None, process.stdout.read()
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/health", verify=False).status_code == 200

        wait_for(answers, seconds)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def command_line(path, *options, seconds=60, kv_bytes=2**22):
    port = free_port()
    command = [Path(sys.executable).with_name("samebits"), "serve", path, "--port", str(port), *options]
    with started([*map(str, command), "--kv-cache-memory-bytes", str(kv_bytes)], port, seconds) as process:
        yield process, f"http://127.0.0.1:{port}"
