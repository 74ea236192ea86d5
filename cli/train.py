"""`samebits train`: its options, its live lines, its log and its plots."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .options import ENGINE, SAMPLING, Options, with_options

if TYPE_CHECKING:
    from ..engine import LLM
    from ..trainer.rl import Task, Trainer

TINY = "tiny", "tiny-moe"
LOG = "log.jsonl"
TINY_DEFAULTS = {"lr": 3e-4, "groups_per_step": 64}
TRAINING = Options.of("trainer/rl/config.py", "TrainConfig", {"group_size": "-n"})
TRAINING = TRAINING.without("model", "output_dir").with_defaults(save_every=50)


@with_options(
    training=TRAINING,
    sampling=SAMPLING.without("n", "seed").with_defaults(max_tokens=64),
    engine=ENGINE.without("dtype", "device"),
)
def train(
    training: dict[str, Any],
    sampling: dict[str, Any],
    engine: dict[str, Any],
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="Checkpoint, hub id, 'smollm2', or 'tiny' or 'tiny-moe': made from scratch.")
    ],
    task: Annotated[
        str, typer.Option(help="arithmetic, sorting, brackets, counting, or a .jsonl of prompts and answers.")
    ],
    output_dir: Annotated[Path, typer.Option(help="Log, checkpoints and plots; an earlier run there is resumed.")],
    correction: Annotated[
        str, typer.Option(help="A preset such as token_tis, or JSON as calibrate's --candidates have it.")
    ] = "none",
    verifier: Annotated[str | None, typer.Option(help="Of a .jsonl task: exact or math-verify.")] = None,
    num_problems: Annotated[
        int | None, typer.Option(help="Problems of a built-in task, which repeat; unset, all are new.")
    ] = None,
    engine_url: Annotated[str | None, typer.Option(help="Server of the same model, to sample with.")] = None,
    sync_dir: Annotated[Path | None, typer.Option(help="Directory through which it gets weights.")] = None,
    supervise_until: Annotated[float | None, typer.Option(help="Share of right answers to begin with.")] = None,
    evaluate_every: Annotated[int, typer.Option(help="Steps between validations; 0 is never.")] = 20,
) -> None:
    """Train a model on a verifiable task with exact rollouts; under torchrun, with FSDP2 over all its processes.

    A tiny model has 64 groups per step and a learning rate of 3e-4 unless those are given. It first learns from solved
    problems, until the share --supervise-until of its answers is right, by default 0.2.

    --engine-url is a `samebits serve` that takes the place of an engine in this process. Weights go to it over a
    process group, or through the directory --sync-dir. If it has an admin key, the environment variable
    SAMEBITS_ADMIN_KEY holds it.
    """
    import torch.distributed as dist

    from ..correction import preset
    from ..engine import SamplingParams
    from ..integrations.corrections import from_plain
    from ..kernels import ops
    from ..trainer import save_weights
    from ..trainer.fsdp import init_process_group
    from ..trainer.rl import TrainConfig, Trainer
    from . import plots

    ops.backend(ops.parse_device(training["device"]))  # or there are no kernels for it
    init_process_group(training["device"])
    problems = _make_problems(task, verifier, num_problems, training["seed"], validated=evaluate_every > 0)
    tiny = model in TINY
    if tiny:
        sources = {name: context.get_parameter_source(name) for name in TINY_DEFAULTS}
        training |= {
            name: TINY_DEFAULTS[name] for name, source in sources.items() if source and source.name == "DEFAULT"
        }
    config = TrainConfig(
        model=str(output_dir / model) if tiny else model,
        correction=from_plain(json.loads(correction)) if correction.startswith("{") else preset(correction),
        sampling=SamplingParams(**sampling),
        output_dir=output_dir,
        engine=ENGINE.changed(engine),
        **training,
    )
    console = Console(quiet=dist.get_rank() > 0)
    if tiny:
        until = 0.2 if supervise_until is None else supervise_until
        _make_tiny(output_dir / model, problems, until, config.seed, console)
    elif supervise_until is not None:
        raise ValueError("--supervise-until is for --model tiny and tiny-moe")
    trainer = Trainer(config, problems, _remote_llm(config.model, engine_url, sync_dir))
    if trainer.resume():
        console.print(f"resumed after step {trainer.steps_done}")
    log = output_dir / LOG
    if trainer.rank == 0:
        _trim(log, trainer.steps_done)
    trainer.fit(functools.partial(_tell, log, trainer, console, evaluate_every))
    save_weights(trainer.model, output_dir / "model")
    if trainer.rank == 0:
        with contextlib.suppress(ImportError):  # no matplotlib
            (output_dir / "curves.png").write_bytes(plots.curves(read_log(log)))
    console.print(f"done: {output_dir}", highlight=False)
    dist.destroy_process_group()


def _make_problems(task: str, verifier: str | None, num_problems: int | None, seed: int, validated: bool) -> Task:
    """The problems of a task. ValueError for an option of the other kind of task, or without problems to validate."""
    from ..trainer.rl import make_task

    if verifier is not None and not task.endswith(".jsonl"):
        raise ValueError(f"--verifier is for .jsonl tasks; {task} has its own")
    if num_problems is not None and task.endswith(".jsonl"):
        raise ValueError("--num-problems is for built-in tasks; a .jsonl has those of its lines")
    chosen = {"verifier": verifier, "num_problems": num_problems}
    options = {name: value for name, value in chosen.items() if value is not None}
    problems = make_task(task, **options, seed=seed)
    if validated:
        try:
            problems.problem(0, "validation")
        except ValueError as error:
            raise ValueError(f"{error}; --evaluate-every 0 trains without validation") from error
    return problems


def _remote_llm(model: str, engine_url: str | None, sync_dir: Path | None) -> LLM | None:
    """The engine at --engine-url; None to sample with one in this process."""
    if engine_url is None:
        if sync_dir is not None:
            raise ValueError("--sync-dir needs --engine-url")
        return None
    from ..engine import LLM
    from ..integrations import Client, RemoteEngine

    client = Client(engine_url, key=os.environ.get("SAMEBITS_ADMIN_KEY"))
    return LLM(model, engine=RemoteEngine(client, model, sync_dir))


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
        make_tiny_model(draft, task.alphabet, seed, experts=folder.name == "tiny-moe")
        model = exact_model(draft)
        tokenizer = AutoTokenizer.from_pretrained(draft)
        with console.status("learning from solved problems") as status:
            lessons = fine_tune(model, tokenizer, task, until, seed=seed) if until > 0 else ()
            for number, chance in enumerate(lessons, 1):
                status.update(f"learning from solved problems: step {number}, {chance:.0%} right")
        save_weights(model, folder)


def _trim(log: Path, steps_done: int) -> None:
    """Forget the steps that a resumed run does again."""
    log.parent.mkdir(parents=True, exist_ok=True)
    rows = read_log(log) if log.exists() else []
    log.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] < steps_done))


def _tell(log: Path, trainer: Trainer, console: Console, evaluate_every: int, metrics: dict[str, float]) -> None:
    """Validate when due (all ranks); then, on rank 0, print and write a step's metrics."""
    last = trainer.steps_done == trainer.config.steps
    if evaluate_every and (trainer.steps_done % evaluate_every == 0 or last):
        metrics["validation"] = trainer.evaluate()
    console.print(live_line(metrics), highlight=False, soft_wrap=True)
    if trainer.rank == 0:
        with log.open("a") as file:
            file.write(json.dumps(metrics) + "\n")


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
