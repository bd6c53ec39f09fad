"""The number formats of quantized weights and activations, as data. No torch: planning reads this too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheme:
    """A weight [N, K] is `element` values times scales; one scale covers `group` = (rows, columns), 0 meaning all.

    With `global_scale` a second fp32 factor covers the whole matrix. Four-bit elements lie two to a byte along K, the
    even one in the low bits; int4 is stored plus 8. `activation` says how x is quantized before the product:
    "tensor" and "token" (one fp32 scale each), "group128" (one per 128 columns), "mxfp8" and "nvfp4" (blocks of 32 and
    16); None leaves it in 16 bits and widens the weights.
    """

    name: str
    element: str  # "e4m3", "int8", "int4", "e2m1"
    group: tuple[int, int]
    scale: str  # "float32", "bfloat16", "e8m0", "e4m3"
    activation: str | None
    global_scale: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.element in ("int4", "e2m1") else 8

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the scales of a weight [rows, cols]: (), [rows], or one for each group."""
        per_row, per_col = self.group
        if per_row == 0:
            return ()
        if per_col == 0:
            return (rows,)
        return (-(-rows // per_row), -(-cols // per_col))

    def bytes_per_weight(self) -> float:
        """Of a large matrix, scales included."""
        rows, cols = self.group
        scale_bytes = {"float32": 4, "bfloat16": 2, "e8m0": 1, "e4m3": 1}[self.scale]
        return self.bits / 8 + (scale_bytes / (rows * cols) if rows and cols else 0)


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8_tensor", "e4m3", (0, 0), "float32", "tensor"),
        Scheme("fp8_channel", "e4m3", (1, 0), "float32", "token"),
        Scheme("fp8_block", "e4m3", (128, 128), "float32", "group128"),
        Scheme("mxfp8", "e4m3", (1, 32), "e8m0", "mxfp8"),
        Scheme("int8_channel", "int8", (1, 0), "float32", "token"),
        Scheme("int4_g32", "int4", (1, 32), "bfloat16", None),
        Scheme("int4_g128", "int4", (1, 128), "bfloat16", None),
        Scheme("mxfp4", "e2m1", (1, 32), "e8m0", None),
        Scheme("mxfp4_mxfp8", "e2m1", (1, 32), "e8m0", "mxfp8"),
        Scheme("nvfp4", "e2m1", (1, 16), "e4m3", "nvfp4", global_scale=True),
    )
}
