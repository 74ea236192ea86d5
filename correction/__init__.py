"""Corrections for training-inference mismatch, and its diagnosis: plain tensors in and out.

Stands alone: torch is all it imports. `samebits.correction.calibration` chooses among corrections.
"""

from .actions import PRESETS, Corrected, Correction, Gate, Weight, preset
from .diagnose import Diagnosis
from .losses import PolicyLoss, contribution, effective_coefficients, policy_loss
from .metrics import correction_metrics, summarize
from .pruning import prune_logits, safe_set
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
    "policy_loss",
    "preset",
    "prune_logits",
    "safe_set",
    "summarize",
]
