"""The command line: `samebits serve | train | generate | chat | rollout | diagnose | calibrate | verify | ...`."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import statistics
import sys
from dataclasses import asdict, astuple
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from .options import ENGINE, SAMPLING, SERVER, with_options
from .train import train

if TYPE_CHECKING:
    from ..engine import RequestOutput

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut names of options off
)
console = Console()
app.command()(train)

NUMERICS = ENGINE.only("dtype", "device").with_defaults(device="cpu")
DISTRIBUTION = SAMPLING.only("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids")

Settings = dict[str, Any]  # of one configuration, by field
Model = Annotated[str, typer.Argument(help="Checkpoint directory, hub id, or 'smollm2'.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"samebits {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Rollouts whose log-probs are, bit for bit, the trainer's."""


@app.command()
@with_options(sampling=SAMPLING.with_defaults(max_tokens=64), engine=ENGINE)
def generate(
    sampling: Settings,
    engine: Settings,
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The prompt, used as it is; '-' reads standard input.")],
    as_json: AsJson = False,
) -> None:
    """Complete a prompt, and show the mean of its tokens' log-probs; with --json, each of them."""
    from ..engine import LLM, SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(**sampling)  # checked before the model loads
    out = LLM(model, **engine).generate(text, params)[0]
    if as_json:
        print(json.dumps(asdict(out)))
    else:
        for c in out.completions:
            mean = f", mean log-prob {statistics.fmean(c.logprobs):.4f}" if c.logprobs else ""
            console.print(f"[dim]#{c.index}: {len(c.token_ids)} tokens, {c.finish_reason}{mean}[/dim]")
            _write(f"{c.token_ids if c.text is None else c.text}\n")
    failures = [f"sample {c.index}: {c.stop_reason}" for c in out.completions if c.finish_reason == "error"]
    if failures:
        raise RuntimeError(failures[0])


@app.command()
@with_options(sampling=SAMPLING.without("n").with_defaults(temperature=0.7, max_tokens=512), engine=ENGINE)
def chat(sampling: Settings, engine: Settings, model: Model) -> None:
    """Talk with a model. An empty line, 'exit' or Ctrl-D ends it; Ctrl-C stops an answer."""
    from ..engine import LLM, SamplingParams
    from ..engine.input_processor import load_tokenizer, need_chat_template
    from ..engine.sampling_params import RequestOutputKind
    from ..model import resolve

    params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
    path = resolve(model)
    tokenizer = None if engine["skip_tokenizer_init"] else load_tokenizer(path)
    need_chat_template(tokenizer, path)  # a model that can't chat says so before its weights load
    llm = LLM(path, **engine)
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = console.input("[bold]you>[/bold] ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if line in ("", "exit", "quit"):
            break
        messages.append({"role": "user", "content": line})
        request = llm.add_request(llm.chat_prompt(messages), params)
        answer = ""
        try:
            while llm.has_unfinished_requests():
                answer += _show(llm.step())
        except KeyboardInterrupt:
            llm.abort(request)
            answer += _show(llm.take_outputs())  # the interrupted step's token, or the next answer would begin with it
        console.print()
        messages.append({"role": "assistant", "content": answer})


def _write(text: str) -> None:
    """Write a model's text as it is: rich would turn :smile: into an emoji and tabs into spaces."""
    console.file.write(text)
    console.file.flush()


def _show(outputs: list[RequestOutput]) -> str:
    """Print the new text of an answer, and why it failed if it did. Return the text."""
    shown = ""
    for completion in itertools.chain.from_iterable(out.completions for out in outputs):
        text = completion.text or ""
        _write(text)
        shown += text
        if completion.finish_reason == "error":
            reason = escape(str(completion.stop_reason))
            console.print(f"\n[red]error:[/red] {reason}", end="", highlight=False, soft_wrap=True)
    return shown


@app.command()
@with_options(server=SERVER, engine=ENGINE.with_defaults(max_num_batched_tokens=256))  # how long streams wait
def serve(
    server: Settings,
    engine: Settings,
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Holds the key for all routes.")] = None,
    admin_key_file: Annotated[Path | None, typer.Option(help="Holds the key to control it.")] = None,
    control_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of control without an admin key; 0: a free one.")
    ] = 0,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds for requests to finish after SIGTERM.")] = 30.0,
) -> None:
    """Serve a model over HTTP, in the dialects of OpenAI, vLLM and SGLang.

    The environment variables SAMEBITS_API_KEY and SAMEBITS_ADMIN_KEY may hold the keys instead of files. Without an
    admin key, the routes that control the server answer this machine only, on a port of their own (--control-port; with
    the number of --port, on that one: not behind a proxy).
    """
    import logging
    from concurrent.futures import ThreadPoolExecutor

    from ..engine import LLM
    from ..server import serve as http
    from ..server.auth import Guard, read_key
    from ..server.options import ServerOptions

    guard = Guard(read_key(api_key_file, "SAMEBITS_API_KEY"), read_key(admin_key_file, "SAMEBITS_ADMIN_KEY"))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ServerOptions(**server)  # checked before the model loads, as are the addresses
    listeners = [http.take_address(host, port)]
    if guard.admin_key is None and (control_port != port or not port):  # two free ones are not one
        listeners.append(http.take_address("127.0.0.1", control_port))
    # The OpenMP team of a thread ends with it. One left idle in this thread would be two threads too many for the CPUs,
    # and libgomp then puts the engine's threads to sleep at every barrier: 25 ms a step.
    with ThreadPoolExecutor(1) as loader:
        llm = loader.submit(LLM, model, **engine).result()
    try:
        http.serve(llm, served_model_name or model, listeners, guard, shutdown_timeout, **server)
    finally:
        llm.close()


@app.command()
@with_options(engine=ENGINE.only("dtype", "device", "adapter").with_defaults(device="cpu"))
def verify(
    engine: Settings,
    model: Model,
    seed: Annotated[int, typer.Option(help="Seed of the random schedules.")] = 0,
    plant_fault: Annotated[
        str | None, typer.Option(help="Falsify this module's output in its last bits, to see it fail.")
    ] = None,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Print how the model's modules compute instead; a config is enough.")
    ] = False,
) -> None:
    """Prove on this machine that engine and trainer agree on every bit; exit code 1 if they don't."""
    if coverage:
        given = {"--adapter": engine["adapter"], "--seed": seed, "--plant-fault": plant_fault}
        unused = [option for option, value in given.items() if value]
        if unused:
            raise ValueError(f"--coverage prints a table of the model's modules alone; leave out {', '.join(unused)}")
        _print_coverage(model, engine)
        return
    from ..trainer.verify import verify as run
    from .report import number

    report = run(model, seed=seed, plant_fault=plant_fault, **engine)
    header = ("sampling", "seqs", "chunk", "CPUs", "tokens", "preempt", "hits", "differ", "max diff")
    table = Table(*header, padding=(0, 0))
    for r in report.rounds:
        table.add_row(*map(number, astuple(r)), style="red" if r.differing else None)
    console.print(table)
    if report.ok:
        console.print(f"max |rollout - trainer| = 0 over {report.tokens} tokens, bitwise equal")
        console.print(f"contract {report.contract_hash}", highlight=False)
        return
    worst = max(r.max_difference for r in report.rounds)
    console.print(f"[red]max |rollout - trainer| = {worst:.3g}: NOT equal[/red]")
    console.print(f"first difference: {report.fault}", markup=False)
    raise typer.Exit(1)


def _print_coverage(model: str, engine: Settings) -> None:
    """Print how each class of a model's modules computes. Exit code 1 if something isn't covered."""
    from ..model.survey import survey

    found = survey(model, engine["dtype"], engine["device"])
    if found.problem is not None:
        console.print(f"{found.model_type}: not covered. {found.problem}", markup=False)
        raise typer.Exit(1)
    table = Table("class", "modules", "computes as")
    for kind, count, how in found.rows:
        table.add_row(kind, str(count), how)
    console.print(table)
    known = "" if found.tested else ", though the tests don't cover this family"
    console.print(f"{found.model_type}: covered{known}", highlight=False)


@app.command()
@with_options(engine=NUMERICS)
def contract(engine: Settings, as_json: AsJson = False) -> None:
    """Print the numerics contract of this installation, and its hash."""
    import torch

    from ..kernels.contract import Contract
    from ..kernels.libraries import xformers_state
    from ..model.exact import parse_dtype

    dtype = parse_dtype(engine["dtype"], engine["device"])
    found = Contract.of(dtype, torch.device(engine["device"]))
    if as_json:
        print(json.dumps({**asdict(found), "hash": found.hash, "xformers": xformers_state()}))
        return
    for name, value in asdict(found).items():
        console.print(f"{name}: {value}", highlight=False)
    console.print(f"hash {found.hash}", highlight=False)
    console.print(f"beside it, deciding no bit: xformers {xformers_state()}", highlight=False)


@app.command()
@with_options(engine=ENGINE.without("exact").with_defaults(kv_cache_memory_bytes=2**30, skip_tokenizer_init=True))
def bench(
    engine: Settings,
    model: Model = "smollm2",
    workload: Annotated[Literal["mixed", "grouped", "short"], typer.Option(help="Kind of prompts.")] = "mixed",
    repeats: Annotated[int, typer.Option(help="Timed runs per engine; the median counts.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Time the engine on a workload, with its exact ops and with torch's."""
    from .bench import WORKLOADS, measure

    results = [measure(model, WORKLOADS[workload](), repeats, exact=exact, **engine) for exact in (True, False)]
    if as_json:
        print(json.dumps(results))
        return
    shown = {"start_seconds": "start s", "resident_mb": "resident MB"}
    if engine["speculative_config"] is not None:  # of the last run
        shown |= {"draft_tokens": "drafted", "accepted_tokens": "accepted", "tokens_per_step": "tokens a step"}
    table = Table("engine", "workload", "output tok/s", *shown.values())
    for r in results:
        rate = statistics.median(r["output_tok_s"])
        table.add_row(r["engine"], r["workload"], f"{rate:.0f}", *(str(r[name]) for name in shown))
    console.print(table)


@app.command()
@with_options(sampling=SAMPLING.with_defaults(n=8, max_tokens=256), engine=ENGINE)
def rollout(
    sampling: Settings,
    engine: Settings,
    model: Model,
    prompts: Annotated[Path, typer.Argument(help='JSONL with "prompt", "prompt_token_ids" or "messages" per line.')],
    out: Annotated[Path, typer.Option(help="The rollouts, JSONL, as diagnose and calibrate read them.")],
) -> None:
    """Sample exact rollouts: the reference that calibrate compares other engines with."""
    from ..engine import LLM, SamplingParams
    from . import mismatch, report

    if out.resolve() == prompts.resolve():
        raise ValueError(f"--out {out} is the file of the prompts; name another")
    report.check_target(out)
    params = SamplingParams(**sampling)
    count = mismatch.write_exact(LLM(model, **engine), prompts, out, params)
    console.print(f"{count} rollouts in {out}", highlight=False)


# --- mismatch ---------------------------------------------------------------------------------------------------------

Rollouts = Annotated[str, typer.Argument(help="JSONL, parquet, npz, replies of vLLM or SGLang, trainers' dumps.")]
Scorer = Annotated[str | None, typer.Option("--model", help="Score the tokens exactly with this model.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a self-contained page with plots here.")]


def _scorer(model: str | None, engine: Settings, sampling: Settings):
    """(the exact model or None, a decoder of token ids or None). ValueError for options that nothing would use."""
    if model is None:
        if given := sorted(NUMERICS.changed(engine) | DISTRIBUTION.changed(sampling)):
            raise ValueError(f"{', '.join(given)}: say how a model scores the tokens; give --model, too")
        return None, None
    from ..engine.input_processor import load_tokenizer
    from ..model import exact_model
    from ..model.checkpoint import resolve

    tokenizer = load_tokenizer(resolve(model))
    return exact_model(model, **engine), tokenizer and tokenizer.decode


@app.command()
@with_options(sampling=DISTRIBUTION, engine=NUMERICS)
def diagnose(
    sampling: Settings,
    engine: Settings,
    rollouts: Rollouts,
    model: Scorer = None,
    ratio: Annotated[
        Literal["old/rollout", "current/rollout", "current/old"], typer.Option(help="The policies to compare.")
    ] = "old/rollout",
    page: Html = None,
    as_json: AsJson = False,
) -> None:
    """Measure an engine's mismatch: its log-probs against exact ones, or against the trainer's that the file holds.

    The sampling options are those that the rollouts were made with.
    """
    from ..engine import SamplingParams
    from . import mismatch, report

    params = SamplingParams(**sampling, max_tokens=None)
    report.check_target(page)
    scorer, decode = _scorer(model, engine, sampling)
    result = mismatch.diagnose(rollouts, scorer, params, ratio=ratio)
    rest = {name: getattr(result, name) for name in ("worst", "trainer_gap", "replay", "warnings")}
    title = f"Mismatch of {Path(rollouts).name}"
    report.give(console, title, report.diagnosis(result, decode), page, result.summary | rest if as_json else None)


@app.command()
@with_options(sampling=DISTRIBUTION, engine=NUMERICS)
def calibrate(
    sampling: Settings,
    engine: Settings,
    rollouts: Rollouts,
    reference: Annotated[str | None, typer.Option(help="Exact rollouts of the same prompts and weights.")] = None,
    model: Scorer = None,
    mode: Annotated[Literal["decoupled", "bypass"], typer.Option(help="Mode of the loss.")] = "decoupled",
    batch_size: Annotated[int, typer.Option(help="Sequences in a training batch.")] = 256,
    margin: Annotated[float, typer.Option(help="Difference of expected cosines that is none in practice.")] = 0.01,
    max_bias: Annotated[float, typer.Option(help="Direction bias that is none in practice.")] = 0.05,
    candidates: Annotated[Path | None, typer.Option(help="JSON with corrections of your own, by name.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap and of the projections.")] = 0,
    page: Html = None,
    as_json: AsJson = False,
) -> None:
    """Choose a correction and its threshold for an engine's rollouts, against exact ones.

    Records need advantages, or a reward and a group; a recommendation needs a model, for its gradients. `samebits
    rollout` makes exact rollouts.
    """
    from ..engine import SamplingParams
    from . import calibration, mismatch, report

    params = SamplingParams(**sampling, max_tokens=None)
    report.check_target(page)
    scorer, _ = _scorer(model, engine, sampling)
    found = calibration.calibrate_files(
        rollouts, reference, scorer, params, mode, batch_size, seed, candidates, margin, max_bias
    )
    chosen = found.result.verdict.recommended
    snippets = {} if chosen is None else mismatch.snippets(mode, found.candidates[chosen])
    numbers = report.calibration_numbers(found, snippets) if as_json else None
    report.give(console, f"Calibration for {Path(rollouts).name}", report.calibration(found, snippets), page, numbers)


def main() -> None:
    """Run the command line; what is wrong with the input is one line, not a traceback."""
    try:
        app()
    except (ValueError, TypeError, RuntimeError, OSError, ArithmeticError, ImportError, MemoryError) as error:
        extra = _extra_with(error.name) if isinstance(error, ModuleNotFoundError) else None
        hint = f"; pip install 'samebits[{extra}]'" if extra else ""
        console = Console(stderr=True)
        console.print(
            f"[red]error:[/red] {type(error).__name__}: {escape(str(error) + hint)}", highlight=False, soft_wrap=True
        )
        sys.exit(2)


def _extra_with(module: str | None) -> str | None:
    """The extra of this package that installs a module."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("samebits") or ():
            found = re.match(r"""([\w.-]+).*extra == ['"]([\w-]+)['"]""", line)
            if found and found[1].replace("-", "_").lower() == (module or "").partition(".")[0].lower():
                return found[2]
    return None
