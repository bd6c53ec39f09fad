"""Launch variants of the codec of sums that travel as e4m3, described for the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.ledger.form_rule import FormRule
from sglang.ledger.variant import Variant, describe
from sglang.srt.layers.triton_ops import quantized_sums

OPS = ("quantized_sums",)
_COUNTS = frozenset({"num_groups", "ranks"})
FORM_RULES = {
    f"quantized_sums.{name}_kernel": FormRule(counts=_COUNTS - ({"ranks"} if name == "decode" else set()))
    for name in ("encode", "decode", "add")
}
_NUMBERS = dict.fromkeys(("num_groups", "share", "ranks"), "i32")


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every launch, with shares that begin on 16 bytes, as those of an all-reduce do, and with others."""
    values, message = {"x": "*bf16", "out": "*bf16", "message": "*u8"}, {"message": "*u8", "out": "*u8"}
    kernels: tuple[tuple[str, Any, dict[str, str], dict[str, Any]], ...] = (
        ("encode", quantized_sums.encode_kernel, values, {}),
        ("decode", quantized_sums.decode_kernel, values, {}),
        ("add", quantized_sums.add_kernel, values, {"ENCODES": False}),
        ("add_encoded", quantized_sums.add_kernel, message, {"ENCODES": True}),
    )
    for key, kernel, types, constants in kernels:
        used = {name: kind for name, kind in (types | _NUMBERS).items() if name in kernel.arg_names}
        for aligned in (True, False):
            tail, numbers = ("", ("share",)) if aligned else ("/unaligned", ())
            yield describe(op, key + tail, kernel, used, constants, quantized_sums.LAUNCH, numbers)
