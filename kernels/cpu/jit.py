"""How the CPU kernels are compiled: numba, cached on disk, never with fast-math.

Without fast-math LLVM may vectorise a loop only where that changes no bit, so the source's order of IEEE-754
operations *is* the reduction tree. The cache folder is keyed by a hash of every kernel source: numba itself looks at
one file only, and a stale object file must not outlive a change to a function that was inlined into it. Processes take
turns at a kernel and its types, so that each is compiled once: the others find it in the cache.
"""

import atexit
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import tempfile
import threading
from contextlib import contextmanager
from functools import wraps

import numba
import numpy as np
import torch
from filelock import FileLock
from numba.core.compiler_lock import global_compiler_lock

from .callees import CalleeCompiler

SOURCES = sorted(pathlib.Path(__file__).parent.glob("*.py"))
SOURCE_HASH = hashlib.sha256(b"".join(p.read_bytes() for p in SOURCES)).hexdigest()[:16]

CALLEE = {"error_model": "numpy", "nogil": True, "pipeline_class": CalleeCompiler}  # options of what kernels call

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.uint16}

logger = logging.getLogger(__name__)

_pool = threading.Lock()  # numba's fallback pool (workqueue) aborts the process on concurrent launches
_thread = threading.local()


@functools.cache
def _writable(folder: pathlib.Path, setting: str) -> pathlib.Path:
    """Return the folder, or one for this process where it can't be written.

    There numba would cache beside the sources, by the stamp of a single one. setting: the variable that named it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        logger.warning("each process compiles the kernels anew: %s; set %s to a folder to write in", error, setting)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="samebits-kernels-"))
        atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: pathlib.Path, owner: int) -> None:
    if os.getpid() == owner:  # no fork of it
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _cache_folder():
    before = numba.config.CACHE_DIR
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "samebits"
    setting = "NUMBA_CACHE_DIR" if before else "XDG_CACHE_HOME"
    numba.config.CACHE_DIR = str(_writable(pathlib.Path(before or root) / f"kernels-{SOURCE_HASH}", setting))
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def _compile(function, **options):
    with _cache_folder():
        compiled = numba.njit(cache=True, error_model="numpy", nogil=True, **options)(function)
    cache = compiled._cache  # numba has no hook for what follows
    path = pathlib.Path(cache.cache_path) / function.__qualname__
    compile_or_load, save = compiled.compile, cache.save_overload

    def compile_in_turn(signature):
        types = hashlib.sha256(str(signature).encode()).hexdigest()[:16]
        with global_compiler_lock, FileLock(f"{path}-{types}.lock"):  # in this order: compilations nest
            return compile_or_load(signature)

    def save_in_turn(signature, result):
        with FileLock(f"{path}.lock"):  # of all signatures: their index is read, then written with one more
            save(signature, result)
        for env in result._find_referenced_environments():  # of callees; numba does it for what it loads
            result.library.codegen.set_env(env.env_name, env)

    compiled.compile, cache.save_overload = compile_in_turn, save_in_turn
    return compiled


def storage(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of a tensor that others own. numba has no halves: bf16's bits are int16 to it, fp16's uint16.

    Not `tensor.numpy()`: that pins the storage's size for good, and FSDP frees a parameter by resizing it.
    """
    bits = _BITS.get(tensor.dtype)
    return np.from_dlpack(tensor if bits is None else tensor.view(bits))


def own_storage(tensor: torch.Tensor) -> np.ndarray:
    """Return the same as `storage`, in a third of the time, for a tensor that nobody resizes."""
    bits = _BITS.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()


def inline(function):
    """Compile a helper into its callers. Python can't call it."""
    return numba.njit(**CALLEE)(function)


def serial(function):
    """Compile a kernel that runs on the calling thread."""
    return _compile(function)


def parallel(function):
    """Compile a kernel whose `prange` runs on as many threads as torch uses (`torch.set_num_threads`)."""
    return _kernel(function, 0)


def region(function):
    """Compile a helper whose `prange` runs on the threads of the `composed` kernel that calls it; Python can't."""
    return numba.njit(parallel=True, **CALLEE)(function)


def composed(function):
    """Compile a kernel that runs on the calling thread but for the regions that it calls, one after the other."""
    return _kernel(function, 0, parallel=False)


def elementwise(function):
    """Compile as `parallel` does, but run on one thread where the first array is small: waking others costs more."""
    return _kernel(function, 1 << 16)


def _set_numba_threads(count):
    try:
        numba.set_num_threads(count)  # the first call starts them
    except ValueError as error:
        layer = numba.config.THREADING_LAYER
        raise RuntimeError(f"numba's threads don't start with NUMBA_THREADING_LAYER={layer}: {error}") from error


def _kernel(function, serial_below, parallel=True):
    compiled = _compile(function, parallel=parallel)

    @wraps(function)
    def launch(*args):
        small = args[0].size < serial_below
        threads = 1 if small else min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        with _pool:
            if getattr(_thread, "count", None) != threads:  # numba keeps the count per thread
                wanted = torch.get_num_threads()
                _set_numba_threads(threads)
                torch.set_num_threads(wanted)  # numba's first call sets OpenMP's count, which is torch's, too
                _thread.count = threads
            return compiled(*args)

    return launch
