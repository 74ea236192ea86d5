"""`samebits train`: its options, its live lines, its log and its plots."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console

TINY = "tiny"
LOG = "log.jsonl"
PANELS = (
    ("reward", "validation"), ("max_difference",), ("length",), ("entropy",), ("grad_norm",),
    ("rollout_tokens_per_second", "train_tokens_per_second"),
)  # fmt: skip


def train(
    model: Annotated[str, typer.Option(help="Checkpoint, hub id, 'smollm2', or 'tiny': made from scratch.")],
    task: Annotated[str, typer.Option(help="arithmetic, sorting, brackets, or a .jsonl of prompts and answers.")],
    output_dir: Annotated[Path, typer.Option(help="Log, checkpoints and plots; an earlier run there is resumed.")],
    algorithm: Annotated[str, typer.Option(help="grpo, dr_grpo, dapo, gspo, cispo, rloo or reinforce.")] = "grpo",
    mode: Annotated[str, typer.Option(help="recompute, bypass or decoupled.")] = "bypass",
    correction: Annotated[str | None, typer.Option(help="A preset such as token_tis or k3_mean_rs.")] = None,
    verifier: Annotated[
        str | None, typer.Option(help="Of a .jsonl task: exact (as is unless said) or math-verify.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the whole run.")] = 200,
    groups_per_step: Annotated[
        int | None, typer.Option(help="Prompts a step: 16, or 64 for a tiny model.", show_default=False)
    ] = None,
    group_size: Annotated[int, typer.Option("--group-size", "-n", help="Samples of each prompt.")] = 8,
    minibatches: Annotated[int, typer.Option(help="Optimizer updates a step.")] = 1,
    staleness: Annotated[int, typer.Option(help="Start rollouts so many steps early; 0 is on policy.")] = 0,
    filter_uniform: Annotated[bool, typer.Option(help="Leave out groups of equal rewards.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a completion.")] = 64,
    temperature: Annotated[float, typer.Option()] = 1.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option()] = 0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    lr: Annotated[float | None, typer.Option(help="1e-6, or 3e-4 for a tiny model.", show_default=False)] = None,
    warmup: Annotated[int, typer.Option(help="Updates until lr is reached.")] = 0,
    kl_coef: Annotated[float, typer.Option(help="Weight of the KL to the initial model.")] = 0.0,
    kl: Annotated[str, typer.Option(help="k3 (in the loss) or k1 (in the advantages).")] = "k3",
    device: Annotated[str, typer.Option(help="Of engine and trainer.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; master weights are float32.")] = "float32",
    chat: Annotated[bool, typer.Option(help="Put prompts through the chat template.")] = False,
    activation_checkpointing: Annotated[bool, typer.Option()] = False,
    sleep: Annotated[bool, typer.Option(help="The engine frees its KV cache while the trainer works.")] = False,
    max_tokens_per_pack: Annotated[int, typer.Option(help="Tokens of a micro-batch.")] = 4096,
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
    exact: Annotated[bool, typer.Option(help="--no-exact: torch's own ops on both sides, a control.")] = True,
    check: Annotated[str, typer.Option(help="Compare bits at 'every' step, the 'first', or 'off'.")] = "every",
    supervise_until: Annotated[
        float | None,
        typer.Option(help="A tiny model first learns from solved problems, until it gets so many right: 0.2."),
    ] = None,
    evaluate_every: Annotated[int, typer.Option(help="Steps between validations; 0 is never.")] = 20,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0 saves at the end only.")] = 50,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Trains a model on a verifiable task with exact rollouts; under torchrun, with FSDP2 over all its processes."""
    import torch
    import torch.distributed as dist

    from ..correction import Correction, preset
    from ..engine import SamplingParams
    from ..kernels import ops
    from ..trainer import save_weights
    from ..trainer.fsdp import init_process_group
    from ..trainer.rl import TrainConfig, Trainer, make_task

    ops.backend(torch.device(device))  # or there are no kernels for it
    init_process_group(device)
    if verifier is not None and not task.endswith(".jsonl"):
        raise ValueError(f"--verifier is for .jsonl tasks; {task} has its own")
    problems = make_task(task, **({} if verifier is None else {"verifier": verifier}), seed=seed)
    if evaluate_every:
        try:
            problems.problem(0, "validation")
        except ValueError as error:
            raise ValueError(f"{error}; --evaluate-every 0 trains without validation") from error
    if kv_cache_gib is not None and engine_url is not None:
        raise ValueError("--kv-cache-gib is of an engine in this process; the server at --engine-url has its own")
    if sync_dir is not None and engine_url is None:
        raise ValueError("--sync-dir needs --engine-url")
    engine: dict[str, Any] = {"exact": exact}
    if kv_cache_gib is not None:
        engine["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    tiny = model == TINY
    config = TrainConfig(
        model=str(output_dir / TINY) if tiny else model, device=device, dtype=dtype, algorithm=algorithm, mode=mode,  # type: ignore[arg-type]
        correction=preset(correction) if correction else Correction(), kl=kl, kl_coef=kl_coef,  # type: ignore[arg-type]
        steps=steps, groups_per_step=(64 if tiny else 16) if groups_per_step is None else groups_per_step,
        group_size=group_size, minibatches=minibatches, staleness=staleness, filter_uniform=filter_uniform, chat=chat,
        sampling=SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
        ),
        lr=lr if lr is not None else 3e-4 if tiny else 1e-6, warmup=warmup, max_tokens_per_pack=max_tokens_per_pack,
        activation_checkpointing=activation_checkpointing, sleep=sleep, seed=seed, check=check,  # type: ignore[arg-type]
        save_every=save_every, output_dir=output_dir, engine=engine,
    )  # fmt: skip
    console = Console(quiet=dist.get_rank() > 0)
    if tiny:
        _make_tiny(output_dir / TINY, problems, 0.2 if supervise_until is None else supervise_until, seed, console)
    elif supervise_until is not None:
        raise ValueError("--supervise-until is for --model tiny")
    llm = None
    if engine_url is not None:
        from ..integrations import Client, RemoteEngine

        llm = RemoteEngine(Client(engine_url, key=engine_key), config.model, sync_dir)
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
