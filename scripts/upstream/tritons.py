"""The Tritons that trees are compiled by: the one that is installed, and others from the package index.

path_of("3.6.0")    # a directory to put first on PYTHONPATH; None for the installed one
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from upstream.source import SourceError, cache_dir, staged

VERSIONS = ("3.6.0", "3.9.0")
"""The Tritons that serve SGLang's releases of 2026, from the oldest to the newest: no single one compiles all their
kernels."""


def path_of(version: str) -> Path | None:
    """Downloaded at most once, to `cache_dir()`. Raises SourceError if the package index does not have it."""
    if metadata.version("triton") == version:
        return None
    kept = cache_dir() / "tritons" / f"{version}-{sys.implementation.cache_tag}"
    if not kept.is_dir():
        with staged(kept) as directory:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory)]
            done = subprocess.run([*command, f"triton=={version}"], capture_output=True, text=True)
            if done.returncode != 0:
                raise SourceError(f"The package index has no triton=={version}: {done.stderr.strip()[-500:]}")
    return kept
