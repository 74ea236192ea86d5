"""Which correction another engine's rollouts need, found by comparing policy gradients with an exact reference."""

from .assess import Assessment, Traces
from .calibrate import Calibration, Verdict, calibrate, candidate_grid

__all__ = ["Assessment", "Calibration", "Traces", "Verdict", "calibrate", "candidate_grid"]
