"""Checks which web pages may use the server, and under which host names it answers.

A browser lets every page send requests to this machine; the header `Origin` names the page's server. A server with an
API key need not check it, as the page would need the key. One without a key answers its own pages, those of this
machine and those that --allowed-origins names; clients that are not browsers send no `Origin`.

A page's GET to its own server has no `Origin` either, and its owner may make that server's name point to this machine
(DNS rebinding). So a server without a key answers only under addresses, under names that no public name server has, and
under the hosts of --allowed-origins.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.http_errors import ApiError, error_response
from sglang.srt.entrypoints.http_middleware import is_open

ANY = "*"
_THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
_MAX_SHOWN = 100


_PRIVATE_DOMAINS = (".localhost", ".local", ".internal", ".home.arpa")
"""Reserved domains, whose names never lead out of the network (RFC 6761, 6762, 8375, and ICANN's `internal`)."""


def with_origins_checked(
    app: ASGIApp, api_key: str | None, allowed: Iterable[str], own_names: Iterable[str] = ()
) -> ASGIApp:
    """Returns `app` with CORS headers; without `api_key`, other pages and hosts are refused. `allowed`: origins, or `*`
    for all. own_names: of this machine."""
    allowed = list(allowed)
    if api_key is not None or ANY in allowed:
        return CORSMiddleware(app, allow_origins=[ANY], allow_methods=["*"], allow_headers=["*"])
    local = f"(?i:{_THIS_MACHINE})"
    cors = CORSMiddleware(
        app, allow_origins=allowed, allow_origin_regex=local, allow_methods=["*"], allow_headers=["*"]
    )
    names = {_host_name(origin.partition("://")[2]) for origin in allowed} | {name.lower() for name in own_names}
    return _OriginGate(cors, frozenset(allowed), re.compile(local), frozenset(names))


def refuse_other_pages(request: Request) -> None:
    """Raises ApiError 403 for a GET that changes something and comes from a web page: a browser sends those of any
    page, such as of a picture's address, without its `Origin`."""
    if request.method == "GET" and request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "a web page may not do this by GET; clients that are not browsers may")


class _OriginGate:
    """Refuses requests (and preflight requests) of pages that are neither of this machine nor allowed, and those to
    other host names."""

    def __init__(
        self, app: ASGIApp, allowed: frozenset[str], local: re.Pattern[str], host_names: frozenset[str]
    ) -> None:
        self._app, self._allowed, self._local, self._host_names = app, allowed, local, host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
            foreign = next((origin for origin in origins if not self._may_ask(origin, scope)), None)
            if foreign is not None:
                await error_response(scope["path"], _refusal(foreign))(scope, receive, send)
                return
            other = next((host for host in _hosts(scope) if not self._is_ours(host)), None)
            if other is not None and not is_open(scope["path"]):
                await error_response(scope["path"], _host_refusal(other))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        name = _host_name(host)
        is_private = "." not in name or name.endswith(_PRIVATE_DOMAINS)
        return _is_address(host) or is_private or name in self._host_names

    def _may_ask(self, origin: str, scope: Scope) -> bool:
        return origin in self._allowed or bool(self._local.fullmatch(origin)) or _is_own_page(origin, scope)


def _is_own_page(origin: str, scope: Scope) -> bool:
    """Returns whether the page comes from the address that it sends requests to. A name does not count, as its owner
    may make it point here."""
    host = next(iter(_hosts(scope)), "")
    return origin in (f"http://{host}", f"https://{host}") and _is_address(host)


def _hosts(scope: Scope) -> list[str]:
    return [value.decode("latin-1").strip() for name, value in scope["headers"] if name == b"host"]


def _host_name(host: str) -> str:
    """Returns the name or address in a `Host` header, without port and brackets."""
    name = host if host.endswith("]") else re.sub(r":\d*$", "", host)
    return name.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(_host_name(host))
    except ValueError:
        return False
    return True


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")


def _refusal(origin: str) -> ApiError:
    return ApiError(
        403,
        f"the server has no API key and does not answer web pages of {_shown(origin)}, only those of this machine."
        " Start it with --allowed-origins and the page's origin, or with --api-key",
    )


def _host_refusal(host: str) -> ApiError:
    return ApiError(
        403,
        f"the server has no API key and does not answer under the name {_shown(host)}: the owner of a web page may let"
        " a name of his point here. Ask under the address, start the server with --allowed-origins and"
        " http://NAME, or with --api-key",
    )
