"""The HTTP server."""

from __future__ import annotations


def __getattr__(name: str):
    """Load `create_app` on first use: it needs the extra `server`."""
    if name == "create_app":
        from .app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["create_app"]
