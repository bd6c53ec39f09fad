"""The embedded model with other weights, for tests that put them into a running server."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from sglang.embedded import DEFAULT_MODEL_PATH


def write_other_weights(folder: Path) -> Path:
    """Writes the model into a new folder, and returns it."""
    shutil.copytree(DEFAULT_MODEL_PATH, folder)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: t.roll(1, -1) if name.endswith("proj.weight") else t for name, t in tensors.items()}
    save_file({name: t.contiguous() for name, t in changed.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder
