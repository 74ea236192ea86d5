"""Proves the promise on this machine's GPU, then measures what it costs: probes, gates of bits, speed. Ten minutes at
most, under eight with a kept compile cache. See docs/gpu.md.

usage: python benchmarks/gpu.py [--only probes bits speed] [--part NAME ...] [--out FOLDER] [--golden FOLDER]
                                [--cache FILE] [--seconds 560] [--device cuda] [--tiny]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import gpu_report
from isolate import Part, Reply, answer, run_parts

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
ROOT = HERE.parent
GROUPS = "probes", "bits", "speed"
PARTS = [  # group, name, most seconds; in the order of their worth
    ("probes", "versions", 60),
    ("probes", "probe compiler", 60),
    ("probes", "probe tiles", 40),
    ("probes", "probe predicted", 40),
    ("probes", "probe decode_row", 40),
    ("probes", "probe gradients", 60),
    ("probes", "probe repeats", 30),
    ("probes", "probe split_k", 30),
    ("probes", "probe streams", 30),
    ("probes", "probe ragged", 60),
    ("probes", "probe graphs", 30),
    ("probes", "probe cublas", 20),
    ("bits", "linear", 100),
    ("bits", "attention", 60),
    ("bits", "rows", 40),
    ("bits", "ops", 40),
    ("bits", "accuracy", 40),
    ("bits", "engine", 120),
    ("bits", "experts", 60),
    ("speed", "rates", 20),
    ("speed", "decode", 60),
    ("speed", "prefill", 40),
    ("speed", "profile", 40),
    ("speed", "large batch", 60),
    ("speed", "training", 50),
    ("speed", "attention layer", 40),
    ("speed", "shared prompt", 40),
    ("speed", "experts layer", 40),
    ("speed", "linears", 40),
    ("bits", "schedules", 200),
    ("speed", "hf continuous batching", 60),
    ("speed", "workload", 60),
    ("bits", "two gpus", 90),
    ("speed", "vllm", 120),
]
OPTIONAL = "attention layer", "hf continuous batching", "vllm", "profile"  # of speed: comparisons, which fail no run
LOADED = ".cubin", ".json", ".so"  # what a launch needs of Triton's cache; the rest are steps on the way there
ON_GPUS = (  # have no short form on a CPU; the tests hold the engine against the trainer there
    "probe predicted", "probe gradients", "probe streams", "probe graphs", "probe cublas",
    "engine", "schedules", "two gpus", "linears", "profile", "hf continuous batching", "vllm",
)  # fmt: skip


def parts(args: argparse.Namespace) -> list[Part]:
    """Return the parts that were asked for, each with what it runs."""
    folder = args.folder or "."

    def run(group: str, name: str, known: dict[str, Any]) -> Any:
        import gpu_parts  # torch and all of samebits: for the processes that run a part

        return gpu_parts.run(group, name, args.device, folder, args.tiny, known)

    found = []
    for group, name, seconds in PARTS:
        wanted = name in args.part if args.part else group in args.only
        if (wanted or name == "versions") and (args.device != "cpu" or name not in ON_GPUS):
            call = lambda known, group=group, name=name: run(group, name, known)  # noqa: E731
            optional = group == "speed" and name in OPTIONAL
            found.append(Part(group, name, seconds * (4 if args.tiny else 1), call, optional))
    return found


def precompile(device: str, tiny: bool) -> list[subprocess.Popen]:
    """Start processes that compile the kernels, one per core; on a CPU they bind the kernels' arguments, no more."""
    count = os.cpu_count() or 1
    command = ["nice", sys.executable, str(HERE / "gpu_precompile.py")]
    options = [*["--tiny"][:tiny], *["--dry"][: device == "cpu"]]
    shares = [[*command, str(i), str(count), *options] for i in range(count)]
    return [subprocess.Popen(s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for s in shares]


def finish(compilers: list[subprocess.Popen], deadline: float, result: dict[str, Any]) -> None:
    """Wait for them; keep what they say, and as an error what fails."""
    result["compiled"] = []
    for process in compilers:
        try:
            said = process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0].strip()
        except subprocess.TimeoutExpired:
            process.kill()
            said = "a process that compiles was still at it"
        if process.returncode:
            repeat = shlex.join(process.args)  # type: ignore[arg-type]
            result["errors"]["precompile"] = {"kind": "failed", "message": said, "case": said[-200:], "repeat": repeat}
        result["compiled"].append(said.rpartition("\n")[2])
    print("compiled ahead:", *result["compiled"], sep="\n  ", flush=True)


def restore_cache(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Unpack a kept compile cache, if there is one. Triton keeps whole paths: they become this folder's."""
    folder.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        return
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    for group in folder.rglob("__grp__*.json"):
        names = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.with_name(name)) for name in names}}))


def keep_cache(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Pack what a launch loads of the compile cache: a tenth of it. Gzip's fastest level: a tenth of the time of xz."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    scratch = archive.with_name(archive.name + ".part")
    with tarfile.open(scratch, "w:gz", compresslevel=1) as tar:
        for file in filter(pathlib.Path.is_file, folder.rglob("*")):
            if file.suffix in LOADED:
                tar.add(file, file.relative_to(folder))
    scratch.rename(archive)


def golden(report: dict[str, Any], kept: pathlib.Path, out: pathlib.Path, compiler: str) -> list[str]:
    """Return the hashes that differ from those kept of the same kind of GPU and compiler; write all, new ones too."""
    before = json.loads(kept.read_text()) if kept.exists() else {}
    now = {f"{part}: {name}": h for part, r in report.items() for name, h in r.get("hashes", {}).items()}
    mine = before.setdefault(compiler, {})
    changed = [name for name, found in now.items() if mine.get(name, found) != found]
    mine.update({name: found for name, found in now.items() if name not in changed})
    out.write_text(json.dumps(before, indent=1, sort_keys=True) + "\n")
    return changed


def say(part: Part, reply: Reply) -> None:
    """Print one part's line, and below it what is wrong, each with the case that repeats it."""
    found = reply.found if isinstance(reply.found, dict) else {}
    verdict = f"{found['compared']} compared, {len(found['differ'])} differ" if "compared" in found else "done"
    verdict = found.get("skipped", verdict) if reply.error is None else reply.error["kind"]
    print(f"{part.name}: {verdict} ({reply.seconds:.0f} s)", flush=True)
    for line in found.get("differ", [])[:10]:
        print("  DIFFERS", line)
    if "stop" in found:
        print("  STOP:", found["stop"])
    if reply.error is not None and reply.error.get("case"):
        print(f"  in: {reply.error['case']}")
    if reply.error is not None and reply.error.get("repeat"):
        print("  " + reply.error["message"].strip().rpartition("\n")[2])
        print(f"  repeat: {reply.error['repeat']}")


def collect(replies: Iterable[tuple[Part, Reply]], result: dict[str, Any], after: Callable[[Part], None]) -> str | None:
    """Keep each part's reply in the result; return why the run has to stop early, if it has to.

    after: called once a part has replied, before the next one runs.
    """
    for part, reply in replies:
        say(part, reply)
        result["seconds"][part.name] = round(reply.seconds, 1)
        if reply.error is not None:
            result["skipped" if part.optional else "errors"][part.name] = reply.error
        elif part.name == "versions":
            result["versions"] = reply.found
        else:
            result[part.group][part.name] = reply.found
        reason = (reply.found or {}).get("stop") if isinstance(reply.found, dict) else None
        if reason or (reply.error is not None and part.name in ("versions", "probe compiler")):
            return reason or f"{part.name} failed"
        after(part)
    return None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="where results go")
    parser.add_argument("--golden", type=pathlib.Path, default=RESULTS, help="where kept hashes of bits are")
    cache = ROOT / "build/triton_cache.tar.gz"
    parser.add_argument("--cache", type=pathlib.Path, default=cache, help="kept compile cache, read and written")
    parser.add_argument("--seconds", type=float, default=560, help="of the whole run: no part goes on for longer")
    parser.add_argument("--part", nargs="+", help="only these parts, by name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: checks these scripts, measures nothing")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # one part's process
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.folder:
        part = next(p for p in parts(args) if p.name == args.part[0])
        importlib.import_module("gpu_parts").load(part.group, args.device)  # while the part before this one runs
        return answer(part, pathlib.Path(args.folder))
    deadline = time.monotonic() + args.seconds
    result: dict[str, Any] = {"versions": {}, "probes": {}, "bits": {}, "speed": {}, "errors": {}, "skipped": {}}
    result["seconds"] = {}
    ahead = 1 if args.tiny else min(3, (os.cpu_count() or 1) // 4)
    command = [sys.executable, str(HERE / "gpu.py"), "--device", args.device, *["--tiny"][: args.tiny]]
    with tempfile.TemporaryDirectory() as folder:
        compiled = pathlib.Path(os.environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton"))
        restore_cache(args.cache, compiled)
        kept = sum(1 for _ in compiled.rglob("*"))
        compilers: list[subprocess.Popen] = []
        wanted = parts(args)
        last_probe = [part for part in wanted if part.group == "probes"][-1]

        def after(part: Part) -> None:
            if part.name == "versions" and not args.part:
                compilers.extend(precompile(args.device, args.tiny))  # beside the probes
            if part is last_probe and compilers:
                finish(compilers, deadline, result)
            write(args.out, result)

        replies = run_parts(wanted, command, pathlib.Path(folder), deadline, ahead)
        try:
            stopped = collect(replies, result, after)
        finally:
            replies.close()
            for process in compilers:
                process.kill()
        if sum(1 for _ in compiled.rglob("*")) > kept:
            keep_cache(args.cache, compiled)
    sys.exit(conclude(args, result, stopped))


def write(out: pathlib.Path, result: dict[str, Any]) -> str:
    """Write what is known so far, so that a run that is cut short loses nothing; return the file's name, less .json."""
    name = "gpu_" + re.sub(r"\W+", "_", result["versions"].get("gpu", "unknown").lower())
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1).replace(f"{ROOT}/", "").replace(sys.executable, "python")  # of any machine
    (out / f"{name}.json").write_text(text + "\n")
    return name


def conclude(args: argparse.Namespace, result: dict[str, Any], stopped: str | None) -> str | int:
    """Compare hashes with kept ones, compute the bars, write JSON and the page; return the exit code or a reason."""
    name = write(args.out, result)
    versions = result["versions"]
    compiler = f"triton {versions.get('triton')}" + (", tiny" if args.tiny else "")
    kind = "compute capability", "multiprocessors"  # the second decides what torch's generator draws
    hashes = "_".join(["gpu_hashes", *(versions.get(key, "none").replace(".", "_") for key in kind)]) + ".json"
    if result["bits"]:
        for line in golden(result["bits"], args.golden / hashes, args.out / hashes, compiler):
            result["errors"][line] = {"kind": "changed since the last run on such a GPU", "case": line}
            print("CHANGED since the last run on such a GPU:", line)
    result["bars"] = [] if args.tiny else gpu_report.bars(result["speed"])
    write(args.out, result)
    page = gpu_report.markdown(result)
    (args.out / f"{name}.md").write_text(page)
    print(page)
    if stopped:
        return f"stopped: {stopped}"
    gates = [*result["probes"].values(), *result["bits"].values()]
    return int(bool(result["errors"]) or any(gate.get("differ") for gate in gates))


if __name__ == "__main__":
    main()
