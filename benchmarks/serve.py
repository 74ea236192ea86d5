"""The HTTP server, measured: latency beside vLLM's, overhead over the engine alone, and many requests.

usage: python benchmarks/serve.py [--peers vllm] [--checkouts FOLDER ...] [--parts latency overhead many] [--out FILE]
vLLM runs under the interpreter that VLLM_PYTHON names (an environment with its CPU build). --checkouts: other versions
of samebits, each a folder called samebits; they take part in the latency. Servers run one at a time, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from samebits import LLM, SamplingParams
from samebits.cli.bench import VOCAB, WORKLOADS
from samebits.model import resolve

SAMEBITS = pathlib.Path(sys.executable).with_name("samebits")
OUTPUT = 64  # tokens of a request in the latency part
PER_CLIENT = {1: 6, 8: 3, 32: 2}  # clients -> requests each


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def entry_point(checkout: pathlib.Path) -> list[str]:
    """The command of another version, whose command line may be elsewhere in it."""
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["samebits"].partition(":")
    return [sys.executable, "-c", f"import {module} as main; main.{function}()"]


@contextlib.contextmanager
def server(engine: str, model: str, *options: str) -> Iterator[tuple[int, psutil.Process]]:
    """Starts a server, waits until it answers, stops it. engine: vLLM, samebits, or the folder of another checkout."""
    port, environment = free_port(), dict(os.environ)
    if engine == "vLLM":
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        command = [os.environ["VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model", model,
                   "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "128", "--enforce-eager",
                   "--no-enable-log-requests"]  # fmt: skip
    else:
        command = [str(SAMEBITS)]
        if engine == "samebits":
            options = (*options, "--control-port", str(port))
        else:  # versions before there were two ports know no such option
            command = entry_point(pathlib.Path(engine))
            environment["PYTHONPATH"] = str(pathlib.Path(engine).parent)
        command += ["serve", model, "--kv-cache-memory-bytes", str(2**30), *options]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                if process.poll() is not None:
                    break
                time.sleep(0.5)
            if process.poll() is not None:
                log.seek(0)
                sys.exit(f"{engine} failed:\n{log.read().decode()[-3000:]}")
            yield port, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def post(port: int, body: dict, reader_writer=None) -> tuple[list[tuple[float, int]], dict | None, tuple]:
    """One request on a kept-alive connection: (time and new tokens of each event), the reply if it wasn't streamed."""
    reader, writer = reader_writer or await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if not headers.startswith("http/1.1 200"):
        raise RuntimeError(headers)
    if "content-length" in headers:
        length = int(headers.split("content-length:")[1].split("\r\n")[0])
        return [], json.loads(await reader.readexactly(length)), (reader, writer)
    events, rest = [], b""
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size + 2)
        now = time.perf_counter()
        *lines, rest = (rest + chunk[:size]).split(b"\n\n")  # an event may come in two chunks
        for line in lines:
            if line.startswith(b"data: {"):
                events.append((now, len(json.loads(line[6:])["choices"][0]["token_ids"] or ())))
    await reader.readline()
    return events, None, (reader, writer)


def body_of(rng: random.Random, model: str, length: int, max_tokens: int, **more) -> dict:
    prompt = [rng.randrange(10, VOCAB) for _ in range(length)]
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1.0} | more


async def latency(port: int, model: str, clients: int) -> dict:
    """Streams from clients that each send one request after another; seconds."""
    first, between = [], []

    async def client(number: int) -> None:
        rng, connection = random.Random(number), None
        for _ in range(PER_CLIENT[clients]):
            wanted = {"stream": True, "logprobs": 0, "return_token_ids": True}
            body = body_of(rng, model, rng.randint(32, 128), OUTPUT, **wanted)
            begin = time.perf_counter()
            events, _, connection = await post(port, body, connection)
            events = [(t, n) for t, n in events if n]
            assert sum(n for _, n in events) == OUTPUT, events
            first.append(events[0][0] - begin)
            between.extend(b[0] - a[0] for a, b in itertools.pairwise(events))

    begin = time.perf_counter()
    await asyncio.gather(*map(client, range(clients)))
    seconds = time.perf_counter() - begin
    found = {"output_tok_s": clients * PER_CLIENT[clients] * OUTPUT / seconds}
    for name, values in (("ttft", first), ("itl", between)):
        found |= {f"{name}_p{q}": float(np.percentile(values, q)) for q in (50, 99)}
    return found


def latencies(model: str, engines: list[str], rounds: int) -> dict:
    """The medians of the rounds' cells, by engine and number of clients. Every second round goes the other way."""
    cells: dict[str, dict[str, list[dict]]] = {e: {str(c): [] for c in PER_CLIENT} for e in engines}
    for number in range(rounds):
        for engine in engines[:: (-1) ** number]:
            with server(engine, model) as (port, _):
                asyncio.run(latency(port, model, 1))  # warm up
                for clients in PER_CLIENT:
                    cells[engine][str(clients)].append(asyncio.run(latency(port, model, clients)))
    return {engine: {c: medians(found) for c, found in by_clients.items()} for engine, by_clients in cells.items()}


def medians(cells: list[dict]) -> dict:
    return {key: statistics.median(cell[key] for cell in cells) for key in cells[0]}


def overhead(model: str, rounds: int) -> dict:
    """The mixed workload through the server, all requests at once, and through `generate`, in turn."""
    work = WORKLOADS["mixed"]()
    pairs = list(zip(work["prompts"], work["output_lens"], strict=True))
    tokens = sum(work["output_lens"])
    params = [SamplingParams(max_tokens=m, ignore_eos=True) for _, m in pairs]
    llm = LLM(model, kv_cache_memory_bytes=2**30, skip_tokenizer_init=True)

    async def through(port: int, stream: bool) -> None:
        more = {"logprobs": 0, "return_token_ids": True, "stream": stream}
        base = {"model": model, "ignore_eos": True, "temperature": 1.0} | more
        await asyncio.gather(*(post(port, base | {"prompt": p, "max_tokens": m}) for p, m in pairs))

    rates: dict[str, list[float]] = {"generate": [], "server": [], "server, streamed": []}
    with server("samebits", model) as (port, _):
        for number in range(-1, rounds):  # the first warms up
            for name, run in (
                ("generate", lambda: llm.generate(work["prompts"], params, use_tqdm=False)),
                ("server", lambda: asyncio.run(through(port, False))),
                ("server, streamed", lambda: asyncio.run(through(port, True))),
            ):
                llm.reset_prefix_cache()
                flush(port)
                begin = time.perf_counter()
                run()
                if number >= 0:
                    rates[name].append(tokens / (time.perf_counter() - begin))
    ratios = {
        name: statistics.median(a / b for a, b in zip(values, rates["generate"], strict=True))
        for name, values in rates.items()
    }
    return {"output_tok_s": rates, "of_generate": ratios}


def flush(port: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/flush_cache", b"", method="POST")
    urllib.request.urlopen(request).read()


def tiny_model(folder: str) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def many(requests: int = 10_000, clients: int = 64) -> dict:
    """Requests of a tiny model, half of them streamed; errors, and what the server's process holds meanwhile."""
    errors: list[str] = []

    async def run(port: int, model: str, process: psutil.Process) -> list[dict]:
        left, samples = iter(range(requests)), []

        async def client(number: int) -> None:
            rng, connection = random.Random(number), None
            for i in left:
                body = body_of(rng, model, rng.randint(1, 40), rng.randint(1, 12), stream=i % 2 == 0, logprobs=0,
                               return_token_ids=True)  # fmt: skip
                try:
                    events, reply, connection = await post(port, body, connection)
                    count = sum(n for _, n in events) if reply is None else len(reply["choices"][0]["token_ids"])
                    if count != body["max_tokens"]:
                        errors.append(f"request {i}: {count} tokens")
                except (RuntimeError, OSError, EOFError) as error:
                    errors.append(f"request {i}: {error!r}")
                    connection = None
                if i % (requests // 10) == requests // 20:
                    samples.append({"request": i, "resident_mb": process.memory_info().rss >> 20,
                                    "descriptors": process.num_fds(), "threads": process.num_threads()})  # fmt: skip

        await asyncio.gather(*map(client, range(clients)))
        return samples

    small = ("--kv-cache-memory-bytes", str(2**24))  # all of it is touched soon, so what grows then is a leak
    with tempfile.TemporaryDirectory() as folder, server("samebits", tiny_model(folder), *small) as (port, process):
        begin = time.perf_counter()
        samples = asyncio.run(run(port, folder, process))
        seconds = time.perf_counter() - begin
        loads = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/loads"))
        descriptors = process.num_fds()
    return {
        "requests": requests,
        "clients": clients,
        "errors": len(errors),
        "first_errors": errors[:3],
        "requests_per_second": requests / seconds,
        "process": samples,
        "descriptors_after": descriptors,
        "kv_blocks_used_after": loads["engine"]["kv_blocks_used"],
    }


def show(found: dict) -> None:
    console = Console()
    if "latency" in found:
        table = Table("engine", "clients", "TTFT p50 ms", "p99", "between tokens p50 ms", "p99", "tok/s")
        for engine, cells in found["latency"].items():
            for clients, cell in cells.items():
                times = [f"{1000 * cell[k]:.1f}" for k in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")]
                table.add_row(engine, clients, *times, f"{cell['output_tok_s']:.0f}")
        console.print(table)
    if "overhead" in found:
        console.print({k: f"{100 * v:.1f} % of generate" for k, v in found["overhead"]["of_generate"].items()})
    if "many" in found:
        console.print(found["many"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--peers", nargs="*", default=[], choices=["vllm"])
    parser.add_argument("--parts", nargs="*", default=["latency", "overhead", "many"])
    parser.add_argument("--checkouts", nargs="*", default=[], metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5, help="of the overhead")
    parser.add_argument("--latency-rounds", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if "vllm" in args.peers and "VLLM_PYTHON" not in os.environ:
        sys.exit("set VLLM_PYTHON to the python of an environment with vLLM's CPU build")
    model = str(resolve(args.model))
    found: dict = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if args.out and args.out.is_file():
        found = json.loads(args.out.read_text()) | found
    if "latency" in args.parts:
        engines = ["samebits", *args.checkouts, *(["vLLM"] if "vllm" in args.peers else [])]
        found["latency"] = latencies(model, engines, args.latency_rounds)
    if "overhead" in args.parts:
        found["overhead"] = overhead(model, args.rounds)
    if "many" in args.parts:
        found["many"] = many()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
