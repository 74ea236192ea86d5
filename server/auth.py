"""Keys, and the routes that each of them opens."""

from __future__ import annotations

import hmac
import ipaddress
import os
import pathlib
from urllib.parse import urlsplit

from fastapi import HTTPException, Request

FORWARDED = ("forwarded", "x-forwarded-", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-", "x-original-")


class Guard:
    """Keys of the two kinds of routes, and the port of the stricter kind.

    Control routes need `admin_key`. Without one they answer this machine alone, on `control_port` alone (None: on any),
    and neither web pages from elsewhere that a browser here has open nor requests that say that they were forwarded. A
    proxy may not say so: it must not be given the control port. The other routes need `api_key` or `admin_key`, if one
    is set.

    Raises ValueError for a key that no client could send.
    """

    def __init__(self, api_key: str | None = None, admin_key: str | None = None, control_port: int | None = None):
        for key in (api_key, admin_key):
            if key is not None and not (key.isascii() and key.isprintable() and key.split() == [key]):
                raise ValueError("a key is empty, or has blanks or non-ASCII characters, which no client can send")
        self.api_key = api_key
        self.admin_key = admin_key
        self.control_port = control_port

    async def check_api(self, request: Request) -> None:
        """Raise a 401 unless the request has the API key or the admin key."""
        if self.api_key is not None and not self._has(request, self.api_key, self.admin_key):
            raise _unauthorized("this server needs its API key as 'Authorization: Bearer KEY'")

    async def check_control(self, request: Request) -> None:
        """Raise a 401 without the admin key; where there is none, a 403 unless this machine asks at the right port."""
        if self.admin_key is not None:
            if not self._has(request, self.admin_key):
                raise _unauthorized("control routes need the admin key as 'Authorization: Bearer KEY'")
            return
        await self.check_api(request)
        if not _is_local(request):
            raise HTTPException(403, "control routes answer this machine only; start the server with an admin key")
        if self.control_port not in (None, request.scope["server"][1]):
            raise HTTPException(
                403,
                f"control routes answer at http://127.0.0.1:{self.control_port} alone. To have them here, start the "
                "server with an admin key, or, if no proxy leads here, with --control-port and the number of --port",
            )

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
    if request.client is None or not is_loopback(request.client.host):
        return False
    if any(name.startswith(FORWARDED) for name in headers):
        return False
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    host = urlsplit(f"//{headers.get('host', '')}")
    origin = urlsplit(headers.get("origin", f"//{host.netloc}"))
    return is_loopback(host.hostname or "") and origin.netloc == host.netloc  # no name that DNS could turn to us


def is_loopback(host: str) -> bool:
    """True for an address of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_key(file: pathlib.Path | None, variable: str) -> str | None:
    """Return the key in a file, or that in an environment variable; None where neither is given."""
    return os.environ.get(variable) if file is None else file.read_text().strip()
