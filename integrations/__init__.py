"""Other programs' sides: rollout files and settings of other frameworks, and a trainer's client of `samebits serve`."""

from __future__ import annotations

import importlib

_HOMES = {"Client": "client", "RemoteEngine": "remote_engine", "ServerError": "client"}


def __getattr__(name: str):
    """Loads on first use: files and settings of others need none of them, and they need the extra `server`."""
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Client", "RemoteEngine", "ServerError"]
