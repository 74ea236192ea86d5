"""Memory for weights and KV, which steps read whole: in huge pages where Linux gives them to who asks."""

import ctypes
import mmap

import torch

_HUGE = 2**21  # bytes; smaller tensors hardly hold a whole one
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it


def new_memory(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a tensor of `like`'s dtype that nobody has written to: in huge pages if it is large."""
    out = like.new_empty(shape)
    if _ADVICE is not None and out.device.type == "cpu" and out.nbytes >= _HUGE:
        first = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (out.data_ptr() + out.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _ADVICE)
    return out
