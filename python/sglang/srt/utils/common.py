"""Small helpers that trainers import, by the module's name in SGLang."""

from __future__ import annotations

import importlib.metadata
import os
import resource
from contextlib import suppress
from typing import Any

OPEN_FILES = 65535


def kill_process_tree(pid: int | None = None, include_parent: bool = True, skip_pid: int | None = None) -> None:
    """Kills a process (this one for None) with all that it has started."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(os.getpid() if pid is None else pid)
        below = [each for each in process.children(recursive=True) if each.pid != skip_pid]
        for each in [*below, *([process] if include_parent else [])]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def set_ulimit(target_soft_limit: int = OPEN_FILES) -> None:
    """Raises the number of files that this process may have open, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def assert_pkg_version(pkg: str, min_version: str, message: str) -> None:
    """Raises an Exception with `message` where a package is missing or older."""
    from packaging.version import parse

    try:
        installed = importlib.metadata.version(pkg)
    except importlib.metadata.PackageNotFoundError:
        raise Exception(f"{pkg} is not installed. {message}") from None
    if parse(installed) < parse(min_version):
        raise Exception(f"{pkg} {installed} is older than {min_version}. {message}")


def set_prometheus_multiproc_dir() -> None:
    """Does nothing: metrics of this server come from one process."""


def add_prometheus_middleware(app: Any) -> None:
    """Does nothing: the server has its route of metrics by itself."""


def is_cuda() -> bool:
    """Returns whether torch sees an NVIDIA GPU."""
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None
