"""The types of tensors in GGUF files. No torch.

Source: the GGUF specification and the sizes in the `gguf` package, against which a test checks this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type: `number` in the file; each `elements` neighbours of a row are a block of `size` bytes. `wide`: its name
    in safetensors, if it is a plain number of that type."""

    name: str
    number: int
    elements: int
    size: int
    wide: str = ""


TYPES: Mapping[int, TensorType] = {
    each.number: each
    for each in (
        TensorType("F32", 0, 1, 4, "F32"),
        TensorType("F16", 1, 1, 2, "F16"),
        TensorType("Q4_0", 2, 32, 18),
        TensorType("Q4_1", 3, 32, 20),
        TensorType("Q5_0", 6, 32, 22),
        TensorType("Q5_1", 7, 32, 24),
        TensorType("Q8_0", 8, 32, 34),
        TensorType("Q2_K", 10, 256, 84),
        TensorType("Q3_K", 11, 256, 110),
        TensorType("Q4_K", 12, 256, 144),
        TensorType("Q5_K", 13, 256, 176),
        TensorType("Q6_K", 14, 256, 210),
        TensorType("IQ4_NL", 20, 32, 18),
        TensorType("IQ4_XS", 23, 256, 136),
        TensorType("BF16", 30, 1, 2, "BF16"),
        TensorType("MXFP4", 39, 32, 17),
    )
}
"""The types that are read, by number."""
BY_NAME: Mapping[str, TensorType] = {each.name: each for each in TYPES.values()}

UNREAD: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of types that are not read, for messages."""
