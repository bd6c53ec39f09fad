"""What a machine's copy of a checkpoint contains, for a comparison with the copies of other machines."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sglang.srt.configs.checkpoint_header import header_bytes
from sglang.srt.errors import UserError
from sglang.srt.plan.plan_items import Items

TEXTS = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})
"""Files that are compared whole: configuration, index of the weights, tokenizer and chat template."""
WEIGHTS = ".safetensors"
"""Files of which size and header are compared; to read the weights would take minutes."""


def checkpoint_contents(folder: Path, with_weights: bool = True) -> Items:
    """Returns what identifies each file of a checkpoint's directory, by name. with_weights: False where the weights are
    not loaded. Does not raise, as the other machines wait for the result."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    contents = {name: _contents(folder / name) for name in names}
    return {name: text for name, text in contents.items() if text and (with_weights or WEIGHTS not in name)}


def _contents(path: Path) -> str:
    """Returns size and digest of a file, or why it cannot be read; "" for one that does not matter."""
    try:
        if path.suffix == WEIGHTS:
            return f"{path.stat().st_size:,} bytes, header {_digest(header_bytes(path))}"
        return f"{path.stat().st_size:,} bytes, digest {_digest(path.read_bytes())}" if path.suffix in TEXTS else ""
    except (OSError, UserError) as error:
        return f"cannot be read: {error}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
