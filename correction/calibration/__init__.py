"""The choice of a correction and its threshold: candidates' updates against those of exact rollouts."""

from .assess import Assessment, Scores, Traces
from .calibrate import Calibration, calibrate
from .grid import candidate_grid
from .verdict import Verdict

__all__ = ["Assessment", "Calibration", "Scores", "Traces", "Verdict", "calibrate", "candidate_grid"]
