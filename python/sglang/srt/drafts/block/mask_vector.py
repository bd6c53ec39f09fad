"""The embedding of mask tokens that a block draft brings in a file of its own, because the row of its target's table
was never trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sglang.srt.configs.model_path import MASK_VECTOR_FILE
from sglang.srt.drafts.block.spec import Block
from sglang.srt.drafts.parts import DraftParts
from sglang.srt.errors import UserError

_NAMES = ("mask_embedding", "embedding")
"""Names of the vector in files that hold more than a tensor."""
_MAX_BYTES = 1 << 20


class MaskVector:
    """The embedding [H] of a draft's mask tokens, complete on every rank. `dummy`: no file is read."""

    def __init__(self, parts: DraftParts, form: Block, dummy: bool) -> None:
        self.size, self.mask_token = form.size, form.mask_token
        self.path = Path(parts.paths[0]) / MASK_VECTOR_FILE
        self.vector = parts.scope.sub("mask_vector").param("weight", (parts.model.hidden_size,), {}).zero_()
        if not dummy:
            parts.finish.append(self._read)

    def put(self, embedded: torch.Tensor) -> None:
        """Puts the vector into the rows of mask tokens: all rows of a block of embedded [R * B, H] but the first."""
        embedded.unflatten(0, (-1, self.size))[:, 1:] = self.vector

    def _read(self) -> None:
        self.vector.copy_(read_mask_vector(self.path, len(self.vector), self.mask_token))


def read_mask_vector(path: Path, size: int, mask_token: int) -> torch.Tensor:
    """Returns the vector [size] of a file of torch.save: a tensor, or a table with one and perhaps the mask token. No
    code in the file runs. Raises UserError that names the file for anything else."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{path} has more than {_MAX_BYTES:,} bytes, and must hold one vector of {size} numbers.")
        stored: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} cannot be read as a tensor: {reason}") from None
    if isinstance(stored, Mapping):
        if stored.get("mask_token_id", mask_token) != mask_token:
            raise UserError(f"{path} is for mask token {stored['mask_token_id']}, and config.json names {mask_token}.")
        stored = next((stored[name] for name in _NAMES if name in stored), None)
    if not isinstance(stored, torch.Tensor) or stored.numel() != size or not stored.is_floating_point():
        shape = list(stored.shape) if isinstance(stored, torch.Tensor) else type(stored).__name__
        raise UserError(f"{path} must hold one vector of {size} numbers; it holds {shape}.")
    if not stored.isfinite().all():
        raise UserError(f"{path} has a NaN or an infinity.")
    return stored.reshape(size)
