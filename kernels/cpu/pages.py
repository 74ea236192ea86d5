"""Memory for weights and KV, which steps read whole: in huge pages where Linux gives them to who asks."""

import ctypes
import mmap

import torch

_HUGE = 2**21  # bytes
_LARGE = 2**18  # smaller tensors aren't worth the calls
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
_COLLAPSE = 25  # Linux's MADV_COLLAPSE, since 6.1; older ones refuse it


def new_memory(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a tensor of `like`'s dtype that nobody has written to: in huge pages if it is large."""
    out = like.new_empty(shape)
    _advise(out, _ADVICE, mmap.PAGESIZE)
    return out


def join_pages(written: torch.Tensor) -> None:
    """Have huge pages for the ends of a tensor, too: they lie in pages shared with neighbours, which are there now."""
    _advise(written, _COLLAPSE, _HUGE)


def _advise(tensor: torch.Tensor, advice: int | None, page: int) -> None:
    """Advise the kernel about the pages, of `page` bytes, that a large tensor lies in."""
    if _ADVICE is not None and tensor.device.type == "cpu" and tensor.nbytes >= _LARGE:
        first = tensor.data_ptr() // page * page
        size = -(-(tensor.data_ptr() + tensor.nbytes - first) // page) * page
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)
