"""What the server's processes need and this interpreter does not have: said in a second, before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPLETE = ("torch",)
"""Comes with the machine's image: what its metadata ask for may lie elsewhere."""
IMPORTS = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler.scheduler_process",
    "sglang.bench_serving",
)


def named_dependencies() -> list[str]:
    """Of pyproject.toml, which is read as text: Python 3.10 has no reader of TOML."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("\ndependencies = [", 1)[1].split("\n]", 1)[0]
    return re.findall(r'^\s*"(.+)",$', block, re.MULTILINE)


def missing(dependencies: list[str]) -> list[str]:
    """Distributions that are not there, each with the one that asks for it. By their metadata, which say little more
    than names: versions are pip's."""
    from packaging.requirements import Requirement

    lacking: list[str] = []
    seen: set[str] = set()
    waiting = [(Requirement(text), "sm120-sglang") for text in dependencies]
    while waiting:
        requirement, wanted_by = waiting.pop(0)
        extras = sorted(requirement.extras) or [""]
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{requirement.name} (of {wanted_by})")
            continue
        if name in COMPLETE:
            continue
        for text in found.requires or ():
            more = Requirement(text)
            if more.marker is None or any(more.marker.evaluate({"extra": extra}) for extra in extras):
                more.marker = None
                waiting.append((more, f"{name} {found.version}"))
    return lacking


def complaint(limit_s: float = 60.0) -> str:
    """Why servers will not start; empty: they will. Metadata first; what they lack counts if the imports fail too."""
    try:
        lacking = missing(named_dependencies())
    except ImportError:
        lacking = ["packaging"]
    if not lacking:
        return ""
    print(f"not installed: {', '.join(lacking)}; trying the imports", flush=True)
    command = [sys.executable, "-c", "; ".join(f"import {name}" for name in IMPORTS)]
    from served import checkout_env

    try:
        done = subprocess.run(command, env=checkout_env(), capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return f"{done.stderr.strip().splitlines()[-1]}; not installed: {', '.join(lacking)}" if done.returncode else ""
