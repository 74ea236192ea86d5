"""Libraries beside torch that a GPU may have: references for comparisons. None decides a bit."""

from __future__ import annotations

import logging
import warnings
from importlib import metadata


def xformers_state() -> str:
    """Return xformers' version, and whether its C library loads or why not; "not installed" without it."""
    try:
        version = metadata.version("xformers")
    except metadata.PackageNotFoundError:
        return "not installed"
    logging.getLogger("xformers").setLevel(logging.ERROR)  # it warns of what is reported here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from xformers import _cpp_lib
    except Exception as error:  # what an import of another torch's extension may raise
        return f"{version}; does not import: {type(error).__name__}: {error}"
    problem = getattr(_cpp_lib, "_cpp_library_load_exception", None)
    if problem is None:
        return f"{version}; C library loaded"
    reason = " ".join(" ".join(str(problem).split("\n")[:2]).split())  # the rest says how to install
    return f"{version}; C library does not load: {reason or type(problem).__name__}"
