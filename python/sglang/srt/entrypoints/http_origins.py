"""Check of the web pages that may use the server.

A browser lets every page that it shows send requests to this machine, and says in the header `Origin` whose page it is.
A server with an API key need not care: the page would need the key. One without a key answers its own pages, those of
this machine and those that --allowed-origins names; clients that are no browsers send no `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.http_errors import ApiError, error_response

ANY = "*"
_THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
_MAX_SHOWN = 100


def with_origins_checked(app: ASGIApp, api_key: str | None, allowed: Iterable[str]) -> ASGIApp:
    """`app` with CORS headers; without `api_key` foreign pages are refused. `allowed`: origins, or `*` for all."""
    allowed = list(allowed)
    if api_key is not None or ANY in allowed:
        return CORSMiddleware(app, allow_origins=[ANY], allow_methods=["*"], allow_headers=["*"])
    local = f"(?i:{_THIS_MACHINE})"
    cors = CORSMiddleware(
        app, allow_origins=allowed, allow_origin_regex=local, allow_methods=["*"], allow_headers=["*"]
    )
    return _OriginGate(cors, frozenset(allowed), re.compile(local))


class _OriginGate:
    """Refuses the requests of pages that are neither of this machine nor allowed, preflight requests as well."""

    def __init__(self, app: ASGIApp, allowed: frozenset[str], local: re.Pattern[str]) -> None:
        self._app, self._allowed, self._local = app, allowed, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
            foreign = next((origin for origin in origins if not self._may_ask(origin, scope)), None)
            if foreign is not None:
                await error_response(scope["path"], _refusal(foreign))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _may_ask(self, origin: str, scope: Scope) -> bool:
        return origin in self._allowed or bool(self._local.fullmatch(origin)) or _is_own_page(origin, scope)


def _is_own_page(origin: str, scope: Scope) -> bool:
    """Returns whether the page comes from the address that it sends requests to. A name in place of an
    address does not count: its owner may let it point here."""
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    if origin not in (f"http://{host}", f"https://{host}"):
        return False
    address = re.sub(r":\d+$", "", host) if not host.endswith("]") else host
    try:
        ipaddress.ip_address(address.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _refusal(origin: str) -> ApiError:
    shown = origin if len(origin) <= _MAX_SHOWN else origin[:_MAX_SHOWN] + "..."
    return ApiError(
        403,
        f"the server has no API key and does not answer web pages of {shown!r}, only those of this machine. Start it "
        "with --allowed-origins and the page's origin, or with --api-key",
    )
