"""Which correction, and which threshold: candidates' updates against those of exact rollouts."""

from .assess import Assessment, Traces
from .calibrate import Calibration, Verdict, calibrate, candidate_grid

__all__ = ["Assessment", "Calibration", "Traces", "Verdict", "calibrate", "candidate_grid"]
