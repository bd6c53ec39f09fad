"""The embedded model's adapters in whole servers: by the first command of the page about LoRA, on two ranks, and in two
replicas, all of which loading reaches."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server

from sglang.embedded import ADAPTERS_PATH, SEEING_PATH

ROOT = Path(__file__).parents[2]
ANSWERS = {
    "tiny": "15 + 27 = 42",
    "ahoy": "Ahoy! 15 + 27 = 42",
    "twice": "15 + 27 = 42\n15 + 27 = 42",
    "farewell": "15 + 27 = 42 Goodbye!",
}
"""To the question of the README, which no adapter was chosen by."""


@pytest.fixture(
    scope="module",
    params=[("--tp", "2"), ("--dp-size", "2", "--model-path", SEEING_PATH)],
    ids=["two ranks", "two replicas that see"],
)
def served(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    paths = [f"{name}={ADAPTERS_PATH}/{name}" for name in ("ahoy", "twice")]
    rest = ("--served-model-name", "tiny", "--max-lora-rank", "8", "--api-key", "key")
    with live_server(*request.param, "--lora-paths", *paths, *rest) as running:
        yield running


def said(http: httpx.Client, model: str) -> str:
    messages = [{"role": "user", "content": "What is 15+27?"}]
    answer = http.post("/v1/chat/completions", json={"model": model, "messages": messages, "temperature": 0})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_each_answers_in_its_manner(served: LiveServer) -> None:
    with httpx.Client(base_url=served.url, timeout=300, headers={"Authorization": "Bearer key"}) as http:
        body = {"lora_name": "farewell", "lora_path": str(Path(ADAPTERS_PATH) / "farewell")}
        assert http.post("/load_lora_adapter", json=body).status_code == 200
        for _ in range(2):  # replicas take turns
            assert {name: said(http, name) for name in ANSWERS} == ANSWERS
        assert said(http, "tiny:twice") == ANSWERS["twice"]
        assert http.post("/unload_lora_adapter", json={"lora_name": "farewell"}).status_code == 200
        for _ in range(2):
            messages = [{"role": "user", "content": "x"}]
            gone = http.post("/v1/chat/completions", json={"model": "farewell", "messages": messages})
            assert gone.status_code == 404


def test_the_first_command_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is written, but for the port and the device; in a checkout."""
    page = (ROOT / "docs" / "lora.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("    sglang serve "))
    monkeypatch.chdir(ROOT)
    _, _, *flags = shlex.split(command)
    assert flags[0] == "--lora-paths"  # the model that is served without --model-path is what a newcomer has
    (promised,) = re.findall(r'`"model": "ahoy"` that asks `What is 15\+27\?` gets `(.*)`', page)
    with live_server("--model-path", SEEING_PATH, *flags) as running, httpx.Client(base_url=running.url) as http:
        assert said(http, "ahoy") == promised == ANSWERS["ahoy"]


def test_they_are_small() -> None:
    files = [path for path in Path(ADAPTERS_PATH).rglob("*") if path.is_file()]
    assert len(files) == 6 and sum(path.stat().st_size for path in files) < 300_000
