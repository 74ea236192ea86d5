"""Corrections for training-inference mismatch, their diagnosis and their calibration: plain tensors in and out.

Stands alone: torch is all it imports.
"""

from .actions import PRESETS, Corrected, Correction, Gate, Weight, opsm_decomposition, preset
from .assess import Assessment, Traces
from .calibrate import Calibration, Verdict, calibrate, candidate_grid
from .diagnose import Diagnosis
from .losses import PolicyLoss, contribution, effective_coefficients, policy_loss
from .metrics import correction_metrics, summarize
from .pruning import bias_bound, coverage, prune_logits, safe_set
from .statistics import LogProbs, Statistic

__all__ = [
    "PRESETS",
    "Assessment",
    "Calibration",
    "Corrected",
    "Correction",
    "Diagnosis",
    "Gate",
    "LogProbs",
    "PolicyLoss",
    "Statistic",
    "Traces",
    "Verdict",
    "Weight",
    "bias_bound",
    "calibrate",
    "candidate_grid",
    "contribution",
    "correction_metrics",
    "coverage",
    "effective_coefficients",
    "opsm_decomposition",
    "policy_loss",
    "preset",
    "prune_logits",
    "safe_set",
    "summarize",
]
