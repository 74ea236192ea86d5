"""The command line and the HTTP server."""

from __future__ import annotations

import importlib

_HOMES = {"Client": "client", "RemoteEngine": "remote", "ServerError": "client", "create_app": "app"}


def __getattr__(name: str):
    """Loads on first use: the command line needs none of them, and they need the extra `server`."""
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Client", "RemoteEngine", "ServerError", "create_app"]
