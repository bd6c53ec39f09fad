"""Several tensors in one flat tensor of bytes, as trainers send them (`load_format` "flattened_bucket")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class FlattenedTensorMetadata:
    """One tensor of a bucket, which has its bytes from `start_idx` to `end_idx`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class FlattenedTensorBucket:
    """A bucket, made of tensors or of what another one has given away."""

    supports_multi_dtypes = True

    def __init__(
        self,
        named_tensors: Sequence[tuple[str, torch.Tensor]] | None = None,
        flattened_tensor: torch.Tensor | None = None,
        metadata: Sequence[FlattenedTensorMetadata] | None = None,
    ) -> None:
        if named_tensors is None:
            if flattened_tensor is None or metadata is None:
                raise ValueError("a bucket needs named_tensors, or flattened_tensor and metadata")
            self.flattened_tensor, self.metadata = flattened_tensor, list(metadata)
            return
        if not named_tensors:
            raise ValueError("a bucket needs a tensor")
        self.metadata, pieces, begin = [], list[torch.Tensor](), 0
        for name, tensor in named_tensors:
            pieces.append(tensor.detach().contiguous().flatten().view(torch.uint8))
            end = begin + pieces[-1].numel()
            self.metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, begin, end, tensor.numel()))
            begin = end
        self.flattened_tensor = torch.cat(pieces)

    def get_flattened_tensor(self) -> torch.Tensor:
        """Returns all bytes."""
        return self.flattened_tensor

    def get_metadata(self) -> list[FlattenedTensorMetadata]:
        """Returns where each tensor lies."""
        return self.metadata

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the tensors with their names."""
        flat = self.flattened_tensor.view(torch.uint8)
        return [
            (part.name, flat[part.start_idx : part.end_idx].clone().view(part.dtype).view(part.shape))
            for part in self.metadata
        ]
