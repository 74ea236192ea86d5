"""Bridges to other frameworks: their rollouts and settings, and an engine behind HTTP."""

from __future__ import annotations

import importlib

_HOMES = {"Client": "client", "RemoteEngine": "remote_engine", "ServerError": "client"}
_HOMES |= {"Trace": "turns", "Turn": "turns", "join_turns": "turns"}


def __getattr__(name: str):
    """Load a public name on first use: the client needs the extra `server`, and the readers need nothing."""
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Client", "RemoteEngine", "ServerError", "Trace", "Turn", "join_turns"]
