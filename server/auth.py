"""Who may do what."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from fastapi import HTTPException, Request


class Guard:
    """Keys of the two kinds of routes.

    Control routes need `admin_key`; without one they answer this machine alone, and neither forwarded requests nor web
    pages from elsewhere that a browser here has open. The other routes need `api_key` or `admin_key`, if one is set.
    """

    def __init__(self, api_key: str | None = None, admin_key: str | None = None):
        self.api_key = api_key
        self.admin_key = admin_key

    def check_api(self, request: Request) -> None:
        """Raise a 401 unless the request has the API key or the admin key."""
        if self.api_key is not None and not self._has(request, self.api_key, self.admin_key):
            raise _unauthorized("this server needs its API key as 'Authorization: Bearer KEY'")

    def check_control(self, request: Request) -> None:
        """Raise a 401 without the admin key; where there is none, a 403 unless the request is this machine's."""
        if self.admin_key is not None:
            if not self._has(request, self.admin_key):
                raise _unauthorized("control routes need the admin key as 'Authorization: Bearer KEY'")
            return
        self.check_api(request)
        if not _is_local(request):
            raise HTTPException(403, "control routes answer this machine only; start the server with --admin-key")

    @staticmethod
    def _has(request: Request, *keys: str | None) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # all are compared, in constant time
        matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys if key is not None]
        return scheme.lower() == "bearer" and any(matches)


def _unauthorized(message: str) -> HTTPException:
    return HTTPException(401, message, {"WWW-Authenticate": "Bearer"})


def _is_local(request: Request) -> bool:
    headers = request.headers
    if request.client is None or not _is_loopback(request.client.host):
        return False
    if "forwarded" in headers or "x-forwarded-for" in headers or headers.get("sec-fetch-site") == "cross-site":
        return False
    host = urlsplit(f"//{headers.get('host', '')}")
    origin = urlsplit(headers.get("origin", f"//{host.netloc}"))
    return _is_loopback(host.hostname or "") and origin.netloc == host.netloc  # no name that DNS could turn to us


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
