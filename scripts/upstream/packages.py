"""Which installed packages belong to this project, and which merely happen to be here.

What upstream's code can import decides what it does, so that a package that somebody installed beside ours must change
nothing. Ours are what `pip install` of this project brings, by the metadata of what is installed.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def project_distributions() -> frozenset[str]:
    """Normalized names of what is installed and required, in any number of steps, by pyproject.toml with extra `dev`.

    That is what `make install` brings, and so what every command of a developer can rely on.
    """
    project: dict[str, Any] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    pending = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    visited: set[tuple[str, frozenset[str]]] = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in visited:
            continue
        try:
            required = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:  # of another platform
            continue
        visited.add((name, frozenset(requirement.extras)))
        pending += [each for each in map(Requirement, required) if _applies(each, requirement.extras)]
    return frozenset(name for name, _ in visited)


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, ""))


def stray_modules(ours: frozenset[str]) -> frozenset[str]:
    """Top-level modules of installed packages none of which is in `ours`, normalized names of distributions."""
    return frozenset(
        module
        for module, distributions in metadata.packages_distributions().items()
        if ours.isdisjoint(map(canonicalize_name, distributions))
    )
