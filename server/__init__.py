"""The HTTP server; it needs the extra `server`."""

from .app import create_app

__all__ = ["create_app"]
