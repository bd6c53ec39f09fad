"""Files and names that the pages speak of exist: pages are read beside the code."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from docs.commands import PAGES, ROOT

MADE_OR_GIVEN = {
    "adapter_config.json": "of a LoRA adapter",
    "build/site": "what `make site` makes",
    "config.json": "of a model",
    "opencode.json": "of a program",
    "hf_quant_config.json": "of a model",
    "build-contract.json": "of a container with compressed scales",
    "modules.json": "of an embedding model",
    "preprocessor_config.json": "of a model",
    "processor_config.json": "of a model",
    "sentence_bert_config.json": "of an embedding model",
    "margins.json": "what an evaluation writes",
    "training.json": "what a training writes",
    "sglang/srt/sm120/": "in a tree of SGLang that the changes were made in",
    "intel/auto-round": "a method of quantization in configs",
    "step_downs.json": "what a server writes into its cache",
}
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|json|jsonl|md|toml|txt|sh|yml|cuh|cu)|/)|[\w-]+(?:/[\w-]+)+")
NAME = re.compile(r"[A-Z]\w*[a-z]\w*(?:\.\w+)*|[a-z]+(?:_[a-z0-9]+)+")
"""Of classes with their members, and of functions and fields."""


@cache
def files() -> str:
    """Every file and folder, each on a line that begins with "/" and, of a folder, ends with one."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    paths = set(listed.stdout.splitlines())
    folders = {path[: i + 1] for path in paths for i, letter in enumerate(path) if letter == "/"}
    return "".join(f"/{path}\n" for path in paths | folders)


@cache
def source() -> str:
    kinds = ("*.py", "*.cu*", "*.json", "*.txt", "*.js", "Makefile", "*.toml", "*.yml")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *kinds], cwd=ROOT, capture_output=True)
    paths = (
        path for path in listed.stdout.decode().splitlines() if not path.endswith(".lock.json") and path[:5] != "test/"
    )
    return "\n".join((ROOT / path).read_text() for path in paths)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_exist(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = {text for text in re.findall(r"`([^`\s]+)`", prose) if FILE.fullmatch(text)} - set(MADE_OR_GIVEN)
    named = {text for text in named if "X_Y_Z" not in text and text[0] != "_"}  # any version, an ending
    missing = [
        text
        for text in sorted(named)
        if not any(f"/{form.removeprefix('../')}\n" in files() for form in (text, f"{text}.py", f"{text.rstrip('/')}/"))
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_in_diagrams_exist(page: Path) -> None:
    diagrams = [block for block in re.findall(r"```.*?```", page.read_text(), flags=re.DOTALL) if "──" in block]
    named = {text for block in diagrams for text in re.findall(r"(?<![\w/.-])[a-z_]+(?:/[a-z_]+)+(?![\w/.-])", block)}
    missing = [text for text in sorted(named) if not any(f"/{text}{end}\n" in files() for end in (".py", "/", ""))]
    assert missing == []


def test_names_of_the_architecture_are_in_the_source() -> None:
    pages = ("architecture", "glossary", "caches", "outputs", "extending", "adding_a_model")
    text = "\n".join((ROOT / "docs" / f"{page}.md").read_text() for page in pages)
    words = {word for word in re.findall(r"`([^`\s()\[\]:]+)`", text) if NAME.fullmatch(word)}
    assert len(words) > 40
    assert [word for word in sorted(words) if word.rpartition(".")[2] not in source()] == []


def test_the_terms_of_the_glossary_are_in_order() -> None:
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    terms = [term.lower() for term in rows[1:]]
    assert len(terms) > 40 and terms == sorted(set(terms))
