"""The page in headless Chromium, beside a live server with the embedded model.

`CHROMIUM` names the browser if it is not one of the usual commands; `SCREENSHOTS` a directory for pictures of the page.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server

from sglang.embedded import SEEING_PATH

API_KEY = "a key for this test"
FLAGS = (
    *("--served-model-name", "tiny", "--max-total-tokens", "4096"),
    *("--preferred-sampling-params", '{"temperature": 0}'),
)
WAIT_LIMIT_S = 30.0
COMMANDS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def served() -> Iterator[LiveServer]:
    with live_server(*FLAGS, "--tool-call-parser", "auto", "--reasoning-parser", "auto") as running:
        yield running


@pytest.fixture(scope="session")
def seeing() -> Iterator[LiveServer]:
    """A server with the embedded model that sees."""
    running = LiveServer("--model-path", SEEING_PATH, *FLAGS)
    try:
        yield running.wait_up()
    finally:
        running.end()


@pytest.fixture(scope="session")
def guarded() -> Iterator[LiveServer]:
    """A server with an API key."""
    with live_server(*FLAGS, "--api-key", API_KEY) as running:
        yield running


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser that can resolve no name: what is not on this machine does not exist."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, COMMANDS)), None)
    assert path, "no Chromium: install it (Debian: apt install chromium), or set CHROMIUM to its path"
    flags = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


class Watched:
    """A fresh page, with everything that it asked for and complained about."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_LIMIT_S * 1000)
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._on_console)

    def _on_console(self, message: Any) -> None:
        """The browser itself notes each answer that is no 2xx, which some tests provoke."""
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(message.text)

    def open(self, url: str) -> Any:
        self.page.goto(url)
        until(self.page, "document.activeElement?.id === 'prompt'")
        return self.page


@pytest.fixture
def watched(chromium: Any) -> Iterator[Callable[..., Watched]]:
    """Makes pages with the given context options. At the end none may have left this machine or complained."""
    pages: list[Watched] = []

    def make(**options: Any) -> Watched:
        pages.append(Watched(chromium, **options))
        return pages[-1]

    yield make
    for each in pages:
        each.context.close()
        assert each.requests
        assert [url for url in each.requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))] == []
        assert each.problems == []


def until(page: Any, condition: str) -> None:
    """Waits for `condition`; the page's policy forbids the browser's own way, which evaluates it in the page."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"waited in vain for {condition}"
        page.wait_for_timeout(20)


def picture(page: Any, name: str) -> None:
    """Keeps how the page looks, if somebody wants to see it."""
    directory = os.environ.get("SCREENSHOTS")
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(directory) / f"{name}.png"))
