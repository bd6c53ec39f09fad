"""The page's files as the server hands them out; what a browser does with them is in test_browser.py."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.entrypoints.http_app import create_app
from sglang.srt.entrypoints.http_state import ServerState
from sglang.srt.entrypoints.page.routes import ASSETS, STATIC
from sglang.srt.server_args import ServerArgs

FILES = sorted(path.name for path in STATIC.iterdir())
ADDRESS = re.compile(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"'`)]*""")
NAMESPACES = {"http://www.w3.org/2000/svg"}
INLINE = re.compile(r"""<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|javascript:""", re.IGNORECASE)


@pytest.fixture(scope="module", params=[None, "secret"], ids=["open", "with key"])
def client(request: pytest.FixtureRequest) -> httpx.Client:
    """A server that is still starting: its page is there already."""
    args = ServerArgs(model_path=DEFAULT_MODEL_PATH, device="cpu", api_key=request.param)
    return TestClient(create_app(ServerState(args)))


@pytest.mark.parametrize("path", ["/", *(ASSETS + name for name in FILES)])
def test_files_are_served_without_the_key_under_a_strict_policy(path: str, client: httpx.Client) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.content == (STATIC / (path.removeprefix(ASSETS) if path != "/" else "index.html")).read_bytes()
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["img-src"] == "'self' data:"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in str(policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("main.js", "text/javascript"),
        ("style.css", "text/css"),
        ("icon.svg", "image/svg+xml"),
        ("index.html", "text/html"),
    ],
)
def test_browsers_get_the_types_that_they_insist_on(name: str, media_type: str, client: httpx.Client) -> None:
    assert client.get(ASSETS + name).headers["content-type"].startswith(media_type)


def test_what_has_not_changed_is_not_sent_again(client: httpx.Client) -> None:
    etag = client.get("/").headers["etag"]
    again = client.get("/", headers={"if-none-match": etag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)


@pytest.mark.parametrize("path", ["nothing.js", "..%2froutes.py", "%2e%2e/routes.py", "../routes.py", "static/main.js"])
def test_nothing_else_is_served(path: str, client: httpx.Client) -> None:
    response = client.get(ASSETS + path)
    assert response.status_code in (401, 404)
    assert b"import" not in response.content


def test_only_the_page_needs_no_key() -> None:
    client = TestClient(create_app(ServerState(ServerArgs(model_path=DEFAULT_MODEL_PATH, device="cpu", api_key="k"))))
    assert client.get("/v1/models").status_code == 401
    assert client.get("/page").status_code == 401
    assert client.post("/").status_code == 405


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_loaded_from_elsewhere_and_nothing_is_inline(name: str) -> None:
    text = (STATIC / name).read_text("utf-8")
    assert set(ADDRESS.findall(text)) <= NAMESPACES
    assert INLINE.findall(text) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".js", ".html"))])
def test_what_a_file_refers_to_is_there(name: str) -> None:
    text = (STATIC / name).read_text("utf-8")
    imported = re.findall(r'from "\./([\w.-]+)"', text) + re.findall(r'"page/([\w.-]+)"', text)
    assert set(imported) <= set(FILES)
    for identity in re.findall(r'byId\("([\w-]+)"\)', text):
        if not identity.startswith("live-"):
            assert f'id="{identity}"' in (STATIC / "index.html").read_text("utf-8"), identity


def test_every_file_is_part_of_the_package() -> None:
    """Package data is found by patterns: each file must match one."""
    import tomllib

    root = Path(__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = root / "python" / "sglang" / "srt"
    packed = {path for pattern in data["sglang.srt"] for path in package.glob(pattern)}
    assert set(STATIC.iterdir()) <= packed
