"""Records what trainers' own code makes of every option that corrects: gradients of their losses on fixed log-probs.

usage: python record_trainers.py verl                 where verl is installed
       python record_trainers.py trl                  where TRL is installed
       python record_trainers.py miles CHECKOUT COMMIT
       python record_trainers.py slime CHECKOUT COMMIT

Writes recorded/NAME.json, which `test_recorded.py` holds our translations against. It needs neither samebits nor a GPU.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
import pathlib
import random
import sys
import textwrap
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

LENGTHS = (3, 2, 1, 3, 3, 2, 3)
WIDTH = max(LENGTHS)
SEQUENCES = len(LENGTHS)


def inputs() -> dict[str, list]:
    """Log-probs of three policies that differ by a few tenths of a nat, and advantages of both signs; 0 in padding."""
    rng = random.Random(3)
    rows: dict[str, list] = {"mask": [], "rollout": [], "old": [], "current": []}
    for length in LENGTHS:
        real = [position < length for position in range(WIDTH)]
        rollout = [-0.3 - 2 * rng.random() for _ in real]
        old = [min(-0.01, lp + rng.gauss(0, 0.35)) for lp in rollout]
        current = [min(-0.01, lp + rng.gauss(0, 0.2)) for lp in old]
        rows["mask"].append(real)
        for name, values in (("rollout", rollout), ("old", old), ("current", current)):
            rows[name].append([round(v, 4) if kept else 0.0 for v, kept in zip(values, real, strict=True)])
    return {**rows, "advantages": [0.7, -1.3, 0.9, -0.4, -0.8, 1.1, -0.6]}


def tensors() -> Namespace:
    """The inputs, fp64 [7, 3]; `current` with a gradient."""
    data = {name: torch.tensor(values, dtype=torch.float64) for name, values in inputs().items()}
    data["current"].requires_grad_()
    data["advantages"] = data["advantages"][:, None].expand(-1, WIDTH)
    return Namespace(**data)


def gradient(loss: torch.Tensor, data: Namespace) -> list[float]:
    (found,) = torch.autograd.grad(loss, data.current)
    return [float(f"{v:.7g}") for v in found[data.mask.bool()].tolist()]


def grid(**options: Any) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


# --- verl ------------------------------------------------------------------------------------------------------------

VERL_RS = {
    "token_k1": ("0.5_2.0", "0.8_1.3"), "token_k2": (0.02, 0.1), "token_k3": (0.02, 0.1),
    "seq_sum_k1": ("0.5_2.0", "0.7_1.5"), "seq_sum_k2": (0.1, 0.3), "seq_sum_k3": (0.1, 0.3),
    "seq_mean_k1": ("0.8_1.25", "0.9_1.05"), "seq_mean_k2": (0.03, 0.1), "seq_mean_k3": (0.03, 0.1),
    "seq_max_k2": (0.05, 0.2), "seq_max_k3": (0.05, 0.2),
}  # fmt: skip
VERL_IS = tuple(
    {"rollout_is": level, "rollout_is_threshold": threshold}
    for level, thresholds in {"token": (2.0, 1.2, "0.7_1.4"), "sequence": (2.0, 1.2, "0.4_2.5")}.items()
    for threshold in thresholds
)
VERL_DPPO = {"dppo_tv": ((0.05, 0.05), (0.02, 0.1)), "dppo_kl": ((0.005, 0.005), (0.001, 0.01))}


def verl() -> tuple[str, list[dict]]:
    import verl
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import FSDPActorConfig

    def actor(**settings: Any) -> Any:
        config = FSDPActorConfig(
            rollout_n=1, use_dynamic_bsz=True, ppo_mini_batch_size=1, clip_ratio=0.2, clip_ratio_low=0.2,
            clip_ratio_high=0.28, clip_ratio_c=3.0,
        )  # fmt: skip
        config.global_batch_info.update(dp_size=1, global_batch_size=SEQUENCES, loss_scale_factor=1)
        for name, value in settings.items():
            object.__setattr__(config, name, value)
        return config

    def loss(name: str, config: dict[str, Any], **settings: Any) -> dict:
        data = tensors()
        corrections = {key: value for key, value in config.items() if key not in ("bypass_mode", "loss_type")}
        weights, mask = None, data.mask
        old = data.rollout if config.get("bypass_mode") else data.old
        if config.get("bypass_mode") and name == "vanilla":
            name = "bypass_mode"
            policy = OmegaConf.create({"rollout_correction": config, "loss_mode": name})
            settings = {**settings, "policy_loss": policy}
        elif corrections:
            found, mask, _ = compute_rollout_correction_and_rejection_mask(old, data.rollout, data.mask, **corrections)
            weights = None if found is None else found.batch["rollout_is_weights"]
        value, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=old, log_prob=data.current, advantages=data.advantages, response_mask=mask,
            loss_agg_mode="seq-mean-token-sum", config=actor(**settings), rollout_is_weights=weights,
        )  # fmt: skip
        return {"loss": name, "config": config, "gradient": gradient(value * SEQUENCES, data)}

    cases = []
    modes = ({"bypass_mode": False}, {"bypass_mode": True, "loss_type": "ppo_clip"},
             {"bypass_mode": True, "loss_type": "reinforce"})  # fmt: skip
    for mode in modes:
        singles = [(option, threshold) for option, thresholds in VERL_RS.items() for threshold in thresholds]
        pairs = [(f"{a},{b}", f"{VERL_RS[a][0]},{VERL_RS[b][0]}") for a, b in itertools.combinations(VERL_RS, 2)]
        gates = [{"rollout_rs": option, "rollout_rs_threshold": threshold} for option, threshold in singles + pairs]
        weights = [
            {**weight, "rollout_is_batch_normalize": normalize}
            for weight, normalize in itertools.product(VERL_IS, (False, True))
        ]
        both = [{**w, **g} for w, g in itertools.product(weights[::4], gates[: len(singles)])]
        cases += [loss("vanilla", {**mode, **config}) for config in [{}, *weights, *gates, *both]]
    for name, config in itertools.product(("gspo", "sapo", "cispo"), ({}, *VERL_IS)):
        cases.append(loss(name, config, tau_pos=1.0, tau_neg=1.05))
    for name, (low, high) in ((name, bounds) for name, several in VERL_DPPO.items() for bounds in several):
        case = loss(name, {"bypass_mode": True}, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=20.0)
        cases.append({**case, "low": low, "high": high})
    return f"verl {verl.__version__}", cases


# --- TRL -------------------------------------------------------------------------------------------------------------


def trl() -> tuple[str, list[dict]]:
    import trl
    from trl.trainer.grpo_trainer import GRPOTrainer

    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    start = source.index("per_token_logps_diff = (old")
    end = source.index("# Compute the per-token log probabilities for the reference model", start)
    lines = source[source.rindex("\n", 0, start) + 1 : end]
    ratio = compile(textwrap.dedent(lines), "grpo_trainer.py", "exec")

    def loss(config: dict[str, Any], kind: str, level: str) -> dict:
        data = tensors()
        trainer: Any = Namespace(
            **config, loss_type=kind, importance_sampling_level=level, use_vllm=True, beta=0.0, epsilon_low=0.2,
            epsilon_high=1.28 if kind == "cispo" else 0.28, top_entropy_quantile=1.0, aux_loss_enabled=False,
            _entropy_bonus_enabled=False, max_completion_length=WIDTH, current_gradient_accumulation_steps=1,
            model=Namespace(training=True), _metrics=defaultdict(lambda: defaultdict(list)),
            accelerator=Namespace(num_processes=1, gather=lambda v: v, reduce=lambda v, reduction: v),
            args=Namespace(
                delta=None, steps_per_generation=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
                use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
                vespo_lambda_neg=2.0,
            ),
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask, get_gamma_weights=GRPOTrainer.get_gamma_weights,
        )  # fmt: skip
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (data.current, torch.zeros_like(data.mask), None)
        seen = {
            "self": trainer, "torch": torch, "math": math, "old_per_token_logps": data.old, "tool_mask": None,
            "sampling_per_token_logps": data.rollout, "mask": data.mask,
        }  # fmt: skip
        ids = torch.zeros(SEQUENCES, WIDTH, dtype=torch.long)
        batch = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
            "completion_mask": data.mask, "advantages": data.advantages[:, 0], "old_per_token_logps": data.old,
            "sampling_per_token_logps": data.rollout, "num_items_in_batch": data.mask.sum(),
        }  # fmt: skip
        if trainer.vllm_importance_sampling_correction:
            exec(ratio, seen)
            batch["importance_sampling_ratio"] = seen["vllm_importance_sampling_ratio"]
        value = GRPOTrainer._compute_loss(trainer, None, batch)
        return {"loss": kind, "level": level, "config": config, "gradient": gradient(value, data)}

    name = "vllm_importance_sampling"
    cases = []
    for c in grid(
        correction=(True, False), mode=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        bounds=((None, 3.0), (None, 1.2), (0.8, 1.3), (0.6, None)), threshold=(None, 0.05),
        kind=("grpo", "dapo", "cispo", "sapo", "vespo"), level=("token", "sequence"),
    ):  # fmt: skip
        if c["kind"] == "vespo" and c["mode"].startswith("sequence"):
            continue  # TRL refuses it
        if c["level"] == "sequence" and c["kind"] not in ("grpo", "dapo"):
            continue  # of the others' sequence forms TRL refuses VESPO's; CISPO's and SAPO's are no published methods
        if not c["correction"] and (c["mode"], c["bounds"]) != ("token_truncate", (None, 3.0)):
            continue  # they mean nothing then
        config = {
            f"{name}_correction": c["correction"], f"{name}_mode": c["mode"], f"{name}_clip_min": c["bounds"][0],
            f"{name}_clip_max": c["bounds"][1], "off_policy_mask_threshold": c["threshold"],
        }  # fmt: skip
        cases.append(loss(config, c["kind"], c["level"]))
    return f"TRL {trl.__version__}", cases


# --- Miles and slime -------------------------------------------------------------------------------------------------

FILES = {
    "miles": (
        "miles/backends/training_utils/loss_hub/corrections.py",
        "miles/backends/training_utils/loss_hub/math_utils.py",
        "examples/infra_features/train_infer_mismatch_helper/mis.py",
    ),
    "slime": (
        "slime/backends/megatron_utils/loss.py",
        "slime/utils/ppo_utils.py",
        "examples/train_infer_mismatch_helper/mis.py",
    ),
}
NEEDED = {
    "vanilla_tis_function", "icepop_function", "compute_opsm_mask", "compute_policy_loss", "compute_mis_weights",
}  # fmt: skip


def functions_of(paths: list[pathlib.Path]) -> dict[str, Any]:
    """The functions of these files, without their decorators and without the imports that only clusters have."""
    space: dict[str, Any] = {"torch": torch, "Namespace": Namespace, "Any": Any}
    for path in paths:
        tree = ast.parse(path.read_text())
        body: list[ast.stmt] = []
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []
                body.append(node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                body.append(node)
        future = ast.parse("from __future__ import annotations").body
        exec(compile(ast.Module([*future, *body], []), str(path), "exec"), space)
    return space


def miles(name: str, checkout: str, commit: str) -> tuple[str, list[dict]]:
    root = pathlib.Path(checkout)
    space = functions_of([root / file for file in FILES[name]])
    assert space.keys() >= NEEDED
    pieces = list(LENGTHS)

    def loss(config: dict[str, Any]) -> dict:
        data = tensors()
        real = data.mask.bool()
        args = Namespace(**{"use_tis": False, "use_rollout_logprobs": False, "use_opsm": False, **config})
        rollout, old, current, advantages = (
            list(values[real].split(pieces)) for values in (data.rollout, data.old, data.current, data.advantages)
        )
        masks = [torch.ones(n) for n in pieces]
        before = rollout if args.use_rollout_logprobs else old
        kl = torch.cat(before) - torch.cat(current)
        value, _ = space["compute_policy_loss"](kl, torch.cat(advantages), 0.2, 0.28, None)
        if args.use_opsm:
            kept, _ = space["compute_opsm_mask"](
                args=args, full_log_probs=current, full_old_log_probs=before, advantages=advantages, loss_masks=masks
            )
            value = value * kept
        if args.use_tis and "tis_level" in config:
            weights, masks, _ = space["compute_mis_weights"](
                args, train_log_probs=old, rollout_log_probs=rollout, loss_masks=masks
            )
            value = value * torch.cat(weights)
        elif args.use_tis:
            function = space["icepop_function" if config.get("custom_tis_function_path") else "vanilla_tis_function"]
            value, masks, _ = function(
                args, pg_loss=value, train_log_probs=old, rollout_log_probs=rollout, loss_masks=masks
            )
        return {"loss": "ppo", "config": config, "gradient": gradient((value * torch.cat(masks)).sum(), data)}

    icepop = {
        "miles": "miles.backends.training_utils.loss_hub.corrections.icepop_function",
        "slime": "slime.backends.megatron_utils.loss.icepop_function",
    }[name]
    cases = [loss({})]
    cases += [
        loss({"use_opsm": True, "opsm_delta": delta, "use_rollout_logprobs": bypass})
        for delta, bypass in itertools.product((0.01, 0.1), (False, True))
    ]
    cases += [
        loss({"use_tis": True, "tis_clip_low": low, "tis_clip": high, "custom_tis_function_path": path, **opsm})
        for (low, high), path, opsm in itertools.product(
            ((0.0, 2.0), (0.0, 1.2), (0.8, 1.3)), (None, icepop), ({}, {"use_opsm": True, "opsm_delta": 0.05})
        )
    ]
    levels = ("token", "sequence", "geometric")
    bounds = {"token": (0.7, 1.3), "sequence": (0.5, 1.5), "geometric": (0.9, 1.1)}
    for c in grid(
        level=levels, mode=("truncate", "clip", "mask"), normalize=(False, True), rs=(None, *levels), veto=(None, 0.6)
    ):
        if c["normalize"] and c["level"] == "geometric":
            continue  # both refuse it
        if c["rs"] is None and c["veto"] is not None:
            continue  # it acts with use_rs alone
        low, high = bounds[c["level"]]
        rs_low, rs_high = bounds[c["rs"] or "token"]
        cases.append(loss({
            "use_tis": True, "tis_level": c["level"], "tis_mode": c["mode"], "tis_lower_bound": low,
            "tis_upper_bound": high, "tis_batch_normalize": c["normalize"], "use_rs": c["rs"] is not None,
            "rs_level": c["rs"] or "token", "rs_lower_bound": rs_low, "rs_upper_bound": rs_high,
            "rs_veto_threshold": c["veto"],
        }))  # fmt: skip
    return f"{name} {commit}", cases


def main() -> None:
    name, *rest = sys.argv[1:]
    version, cases = {"verl": verl, "trl": trl}[name]() if not rest else miles(name, *rest)
    lines = ",\n".join(json.dumps(case) for case in cases)
    path = pathlib.Path(__file__).parent / "recorded" / f"{name}.json"
    path.write_text(f'{{"version": {json.dumps(version)}, "inputs": {json.dumps(inputs())}, "cases": [\n{lines}\n]}}\n')
    print(f"{version}: {len(cases)} cases in {path.name}")


if __name__ == "__main__":
    main()
