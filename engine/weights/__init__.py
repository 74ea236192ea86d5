"""Weight updates: one `WeightUpdate` from any source to all workers, and the process groups that tensors come over."""

from .group import DEFAULT_GROUP_NAME, DEFAULT_TIMEOUT, WHOLE, TransferError, WeightGroup, free_port
from .spec import (
    DEFAULT_LABEL,
    TensorSpec,
    buckets,
    checksum,
    full_tensors,
    gathering,
    join_bucket,
    parse_specs,
    specs_of,
)
from .table import Source, WeightTable, WeightUpdateError, check_contract
from .update import WeightUpdate
from .workers import PerWorker, WorkerError, Workers, arguments_of

__all__ = [
    "DEFAULT_GROUP_NAME",
    "DEFAULT_LABEL",
    "DEFAULT_TIMEOUT",
    "WHOLE",
    "PerWorker",
    "Source",
    "TensorSpec",
    "TransferError",
    "WeightGroup",
    "WeightTable",
    "WeightUpdate",
    "WeightUpdateError",
    "WorkerError",
    "Workers",
    "arguments_of",
    "buckets",
    "check_contract",
    "checksum",
    "free_port",
    "full_tensors",
    "gathering",
    "join_bucket",
    "parse_specs",
    "specs_of",
]
