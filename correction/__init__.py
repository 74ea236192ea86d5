"""Corrections for training-inference mismatch, and its diagnosis: plain tensors in and out.

Stands alone: torch is all it imports. `samebits.correction.calibration` chooses among corrections.
"""

from .actions import PRESETS, Corrected, Correction, Gate, Weight, preset
from .baseline import optimal_token_baseline
from .diagnose import Diagnosis
from .losses import PolicyLoss, contribution, effective_coefficients, expected_score, policy_loss
from .metrics import correction_metrics, summarize
from .pruning import envelope, prune_logits, replay_mask, safe_set
from .statistics import LogProbs, Statistic

__all__ = [
    "PRESETS",
    "Corrected",
    "Correction",
    "Diagnosis",
    "Gate",
    "LogProbs",
    "PolicyLoss",
    "Statistic",
    "Weight",
    "contribution",
    "correction_metrics",
    "effective_coefficients",
    "envelope",
    "expected_score",
    "optimal_token_baseline",
    "policy_loss",
    "preset",
    "prune_logits",
    "replay_mask",
    "safe_set",
    "summarize",
]
