"""Weight updates: one `WeightUpdate` from any source to all workers, and the process groups that tensors come over."""

from .group import TransferError, WeightGroup
from .spec import TensorSpec, specs_of
from .table import WeightTable, WeightUpdateError, check_contract
from .update import WeightUpdate
from .workers import WorkerError, Workers

__all__ = [
    "TensorSpec",
    "TransferError",
    "WeightGroup",
    "WeightTable",
    "WeightUpdate",
    "WeightUpdateError",
    "WorkerError",
    "Workers",
    "check_contract",
    "specs_of",
]
