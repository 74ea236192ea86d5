"""`samebits train`: its options, its live lines, its log and its plots."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console

from .options import Options, with_options

TINY = "tiny"
LOG = "log.jsonl"
PANELS = (
    ("reward", "validation"), ("max_difference",), ("length",), ("entropy",), ("grad_norm",),
    ("rollout_tokens_per_second", "train_tokens_per_second"),
)  # fmt: skip


TINY_DEFAULTS = {"lr": 3e-4, "groups_per_step": 64}
TRAINING = Options.of("trainer/rl/config.py", "TrainConfig", {"group_size": ["-n"]})
TRAINING = TRAINING.without("model", "correction", "sampling", "engine", "output_dir").with_defaults(save_every=50)
SAMPLING = Options.of("engine/sampling_params.py", "SamplingParams", {}).with_defaults(max_tokens=64)
ENGINE = Options.of("engine/config.py", "EngineConfig", {"pipeline_parallel_size": ["--pp"]})


@with_options(
    training=TRAINING,
    sampling=SAMPLING.only(
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"
    ),
    engine=ENGINE.without("dtype", "device"),
)
def train(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="Checkpoint, hub id or 'smollm2'; 'tiny' is made from scratch, for 64 groups per step at a learning "
            "rate of 3e-4 unless those are given."
        ),
    ],
    task: Annotated[str, typer.Option(help="arithmetic, sorting, brackets, or a .jsonl of prompts and answers.")],
    output_dir: Annotated[Path, typer.Option(help="Log, checkpoints and plots; an earlier run there is resumed.")],
    correction: Annotated[str, typer.Option(help="A preset such as token_tis or k3_mean_rs.")] = "none",
    verifier: Annotated[
        str | None, typer.Option(help="Verifier of a .jsonl task: exact (the default) or math-verify.")
    ] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="The engine's KV pool.")] = None,
    engine_url: Annotated[
        str | None, typer.Option(help="A `samebits serve` of the same model, instead of an engine in this process.")
    ] = None,
    engine_key: Annotated[
        str | None, typer.Option(help="That server's admin key.", envvar="SAMEBITS_ADMIN_KEY")
    ] = None,
    sync_dir: Annotated[
        Path | None, typer.Option(help="Weights go to that server through this directory, not a process group.")
    ] = None,
    supervise_until: Annotated[
        float | None,
        typer.Option(help="A tiny model first learns from solved problems, until this share of answers is right: 0.2."),
    ] = None,
    evaluate_every: Annotated[int, typer.Option(help="Steps between validations; 0 is never.")] = 20,
    *,
    training: dict[str, Any],
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Train a model on a verifiable task with exact rollouts; under torchrun, with FSDP2 over all its processes."""
    import torch
    import torch.distributed as dist

    from ..correction import preset
    from ..engine import SamplingParams
    from ..kernels import ops
    from ..trainer import save_weights
    from ..trainer.fsdp import init_process_group
    from ..trainer.rl import TrainConfig, Trainer, make_task

    ops.backend(torch.device(training["device"]))  # or there are no kernels for it
    init_process_group(training["device"])
    if verifier is not None and not task.endswith(".jsonl"):
        raise ValueError(f"--verifier is for .jsonl tasks; {task} has its own")
    problems = make_task(task, **({} if verifier is None else {"verifier": verifier}), seed=training["seed"])
    if evaluate_every:
        try:
            problems.problem(0, "validation")
        except ValueError as error:
            raise ValueError(f"{error}; --evaluate-every 0 trains without validation") from error
    tiny = model == TINY
    if tiny:
        training |= {name: value for name, value in TINY_DEFAULTS.items() if _is_default(context, name)}
    config = TrainConfig(
        model=str(output_dir / TINY) if tiny else model,
        correction=preset(correction),
        sampling=SamplingParams(**sampling),
        output_dir=output_dir,
        engine=_engine_settings(ENGINE.changed(engine), kv_cache_gib, engine_url, sync_dir),
        **training,
    )
    console = Console(quiet=dist.get_rank() > 0)
    if tiny:
        until = 0.2 if supervise_until is None else supervise_until
        _make_tiny(output_dir / TINY, problems, until, config.seed, console)
    elif supervise_until is not None:
        raise ValueError("--supervise-until is for --model tiny")
    llm = None
    if engine_url is not None:
        from ..engine import LLM
        from ..integrations import Client, RemoteEngine

        remote = RemoteEngine(Client(engine_url, key=engine_key), config.model, sync_dir)
        llm = LLM(config.model, engine=remote)
    trainer = Trainer(config, problems, llm)
    if trainer.load():
        console.print(f"resumed after step {trainer.steps_done}")
    with _Log(output_dir, trainer, console, evaluate_every) as log:
        trainer.fit(log)
    save_weights(trainer.model, output_dir / "model")
    if trainer.rank == 0:
        plot(output_dir / LOG, output_dir / "curves.png")
    console.print(f"done: {output_dir}", highlight=False)
    dist.destroy_process_group()


def _is_default(context: typer.Context, name: str) -> bool:
    """True for an option that wasn't given."""
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def _engine_settings(
    given: dict[str, Any], kv_cache_gib: float | None, engine_url: str | None, sync_dir: Path | None
) -> dict[str, Any]:
    """The settings of the engine in this process, which is not there with an `engine_url`."""
    if kv_cache_gib is not None:
        given["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    if engine_url is None and sync_dir is not None:
        raise ValueError("--sync-dir needs --engine-url")
    local = [f"--{name.replace('_', '-')}" for name in given if name != "exact"]
    if engine_url is not None and local:
        raise ValueError(f"{', '.join(local)}: for an engine in this process; the server at --engine-url has its own")
    return given


def _make_tiny(folder: Path, task, until: float, seed: int, console: Console) -> None:
    """Rank 0 makes the model, unless a run to resume has made it; the others wait."""
    import torch.distributed as dist
    from transformers import AutoTokenizer

    from ..trainer import exact_model, save_weights
    from ..trainer.fsdp import together
    from ..trainer.rl.tiny import fine_tune, make_tiny_model

    if not hasattr(task, "alphabet"):
        raise ValueError("a tiny model is for the built-in tasks; give --model a checkpoint")
    with together():
        if dist.get_rank() > 0:
            return
        if (folder / "config.json").exists():
            if missing := set(task.alphabet) - AutoTokenizer.from_pretrained(folder).get_vocab().keys():
                raise ValueError(f"{folder} was made for another task: it lacks {''.join(sorted(missing))}")
            return
        draft = folder.with_name(f".{folder.name}.untrained")
        make_tiny_model(draft, task.alphabet, seed)
        model, tokenizer = exact_model(draft), AutoTokenizer.from_pretrained(draft)
        with console.status("learning from solved problems") as status:
            lessons = fine_tune(model, tokenizer, task, until, seed=seed) if until > 0 else ()
            for number, chance in enumerate(lessons, 1):
                status.update(f"learning from solved problems: step {number}, {chance:.0%} right")
        save_weights(model, folder)


class _Log:
    """Called with each step's metrics: validates when due (all ranks), then, on rank 0, prints and writes a line."""

    def __init__(self, folder: Path, trainer, console: Console, evaluate_every: int):
        self.trainer, self.console, self.evaluate_every = trainer, console, evaluate_every
        self.path = folder / LOG if trainer.rank == 0 else None
        self.file: IO[str] | None = None

    def __enter__(self) -> Callable[[dict[str, float]], None]:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rows = read_log(self.path) if self.path.exists() else []
            kept = [json.dumps(row) + "\n" for row in rows if row["step"] < self.trainer.steps_done]
            self.path.write_text("".join(kept))  # a resumed run does the later steps again
            self.file = self.path.open("a")
        return self._step

    def __exit__(self, *exception) -> None:
        if self.file is not None:
            self.file.close()

    def _step(self, metrics: dict[str, float]) -> None:
        last = self.trainer.steps_done == self.trainer.config.steps
        if self.evaluate_every and (self.trainer.steps_done % self.evaluate_every == 0 or last):
            metrics["validation"] = self.trainer.evaluate()
        self.console.print(live_line(metrics), highlight=False)
        if self.file is not None:
            self.file.write(json.dumps(metrics) + "\n")
            self.file.flush()


def live_line(m: dict[str, float]) -> str:
    """One step in one line."""
    difference = f"{m['max_difference']:.3g}" if m["compared_tokens"] else "not compared"
    color = "red" if m["max_difference"] else "green"
    text = (
        f"step {m['step']:4.0f}  v{m['version']:<4.0f} reward {m['reward']:.3f}  length {m['length']:6.1f}  "
        f"entropy {m.get('entropy', 0.0):.3f}  grad {m['grad_norm']:.2e}  "
        f"[{color}]max|rollout - trainer| {difference}[/{color}]  "
        f"{m['rollout_tokens_per_second']:6.0f} + {m['train_tokens_per_second']:6.0f} tok/s"
    )
    if m["max_staleness"]:
        text += f"  staleness {m['staleness']:.2f} (max {m['max_staleness']:.0f})"
    return text + (f"  [bold]validation {m['validation']:.3f}[/bold]" if "validation" in m else "")


def read_log(path: Path) -> list[dict[str, float]]:
    """The steps of a run; half a line at the end, of a run that was killed, is dropped."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def plot(log: Path, target: Path) -> None:
    """The run's curves as a picture; needs the extra `train`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    rows = read_log(log)
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, names in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                axes.plot(*zip(*points, strict=True), label=name.replace("_", " "), marker="." * (len(points) < 30))
        axes.set_xlabel("step")
        axes.legend(frameon=False)
    figure.savefig(target, dpi=110)
