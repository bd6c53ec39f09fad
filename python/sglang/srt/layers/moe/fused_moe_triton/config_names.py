"""Names of tuning files: which weights and which GPU a file is for. No torch, no Triton.

upstream's  E=161,N=192,device_name=NVIDIA_H200[,dtype=fp8_w8a8][,block_shape=[128, 128]][,per_channel_quant=True].json
ours        E=161,N=192,H=5120,arch=sm_120,sms=188[,dtype=fp8_channel].json

E experts, N intermediate dims of one rank, H hidden size; a scheme's name stands for dtype and all that follows it.
Files lie in `configs/` or in `configs/triton_X_Y_Z/`, the version that they were tuned with.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.hardware.products import PRODUCTS, product_of_device_name

_NAME = re.compile(
    r"E=(?P<experts>\d+),N=(?P<inter>\d+)(,H=(?P<hidden>\d+))?"
    r",(device_name=(?P<device>[^,]+?)|arch=(?P<arch>\w+),sms=(?P<sms>\d+))"
    r"(,dtype=(?P<dtype>\w+?))?(,block_shape=\[(?P<rows>\d+), ?(?P<cols>\d+)\])?"
    r"(,per_channel_quant=(?P<channel>True|False))?(?P<down>_down)?\.json"
)
_DIRECTORY = re.compile(r"triton_(\d+)_(\d+)_(\d+)")

Selector = tuple[str | None, tuple[int, int] | None, bool]
"""dtype, block shape, per-channel scales, as upstream writes them."""

_W8A8 = "fp8_w8a8"
UPSTREAM_SELECTORS: Mapping[str | None, tuple[Selector, ...]] = {
    None: ((None, None, False),),
    "fp8_tensor": ((_W8A8, None, False),),
    "fp8_channel": ((_W8A8, None, True), (_W8A8, None, False)),
    "fp8_block": ((_W8A8, (128, 128), False),),
    "mxfp8": ((_W8A8, (1, 32), False),),
    "int8_channel": (("int8_w8a8", None, True), ("int8_w8a8", None, False)),
    "int4_g32": (("int4_w4a16", None, False), ("int4_w4a16", (0, 32), False)),
    "int4_g64": (("int4_w4a16", None, False), ("int4_w4a16", (0, 64), False)),
    "int4_g128": (("int4_w4a16", None, False), ("int4_w4a16", (0, 128), False)),
}
"""Scheme -> upstream's names for it, best match first. It has none for FP4: those files have the scheme's name."""


@dataclass(frozen=True, slots=True)
class FileName:
    """A parsed file name. `hidden` is 0 if the name lacks it; either `device` or `arch` and `sms` are set."""

    num_experts: int
    intermediate: int
    selector: Selector
    hidden: int = 0
    device: str | None = None  # the driver's name, with "_" for blanks
    arch: str | None = None
    num_sms: int = 0
    is_down: bool = False  # upstream's companion file for the down projection

    def __str__(self) -> str:
        dtype, shape, per_channel = self.selector
        return "".join(
            (
                f"E={self.num_experts},N={self.intermediate}",
                f",H={self.hidden}" if self.hidden else "",
                f",device_name={self.device}" if self.device else f",arch={self.arch},sms={self.num_sms}",
                f",dtype={dtype}" if dtype else "",
                f",block_shape=[{shape[0]}, {shape[1]}]" if shape else "",
                ",per_channel_quant=True" if per_channel else "",
                "_down" if self.is_down else "",
                ".json",
            )
        )

    def scheme_rank(self, scheme: str | None) -> int | None:
        """Returns 0 for the scheme's best name (None: unquantized), more for others, None if the file is for another
        scheme."""
        exact: Selector = (scheme, None, False)
        selectors = (exact, *(s for s in UPSTREAM_SELECTORS.get(scheme, ()) if s != exact))
        return selectors.index(self.selector) if self.selector in selectors else None

    def device_rank(self, arch: ArchTraits) -> int | None:
        """Returns 0 for this product, 1 for another edition (same architecture and SM count), 2 if the file names
        these; else None. The Server, Workstation and Max-Q editions of one card have the same SMs and differ in clock
        and power only."""
        if self.device is None:
            return 2 if (self.arch, self.num_sms) == (arch.name, arch.num_sms) else None
        product = product_of_device_name(self.device.replace("_", " "))
        if product is None:
            return None
        if product == arch.product:
            return 0
        return 1 if (PRODUCTS[product].arch, PRODUCTS[product].num_sms) == (arch.name, arch.num_sms) else None


@functools.cache
def parse_name(name: str) -> FileName | None:
    """Returns the parsed name; None if it is not that of a tuning file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    shape = (int(match["rows"]), int(match["cols"])) if match["rows"] else None
    return FileName(
        num_experts=int(match["experts"]),
        intermediate=int(match["inter"]),
        selector=(match["dtype"], shape, match["channel"] == "True"),
        hidden=int(match["hidden"] or 0),
        device=match["device"],
        arch=match["arch"],
        num_sms=int(match["sms"] or 0),
        is_down=match["down"] is not None,
    )


def parse_directory(name: str) -> tuple[int, ...] | None:
    """Returns the Triton version of a name like "triton_3_6_0", or None."""
    match = _DIRECTORY.fullmatch(name)
    return tuple(int(part) for part in match.groups()) if match else None
