"""The page at `/`: static files of this package, which need no API key and load nothing from other servers."""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_errors import ApiError

router = APIRouter(include_in_schema=False)

STATIC = Path(__file__).parent / "static"
ASSETS = "/page/"
"""Path prefix of the page's files. The page itself is at `/`."""
INDEX = "index.html"

_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": _CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # revalidated each time, and sent only when it has changed
}

mimetypes.add_type("text/javascript", ".js")  # some systems map .js to a type that browsers refuse


class _StaticFile:
    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._etag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'
        self._media_type = mimetypes.guess_type(path.name)[0]

    def response(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self._etag}
        if request.headers.get("if-none-match") == self._etag:
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers=headers, media_type=self._media_type)


_FILES = {path.name: _StaticFile(path) for path in sorted(STATIC.iterdir())}


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    return _FILES[INDEX].response(request)


@router.api_route(ASSETS + "{name}", methods=["GET", "HEAD"])
async def asset(name: str, request: Request) -> Response:
    """Serves a file of the page. Only names of files that existed at the start are served: no path leads elsewhere."""
    file = _FILES.get(name)
    if file is None:
        raise ApiError(404, f"there is no route {request.url.path}")
    return file.response(request)
