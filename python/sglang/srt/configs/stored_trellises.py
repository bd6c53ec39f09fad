"""Reads the forms of a checkpoint's trellises (EXL3) from the headers of its files. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from sglang.srt.configs.checkpoint_header import Stored, stored_names, stored_tensors
from sglang.srt.configs.quant_rules import QuantConfig, without_decoder
from sglang.srt.configs.quant_scheme import EXL3
from sglang.srt.configs.trellis import DEFAULT_CODEBOOK, MARKERS, MAX_BITS, TILE, Trellis
from sglang.srt.errors import UserError

_TRELLIS = ".trellis"
_SIGNS = ".su"


def with_stored_trellises(quantization: QuantConfig, folder: Path) -> QuantConfig:
    """Returns the quantization with the trellises that the files of `folder` have. Raises UserError for others than
    are known."""
    assert quantization.trellises is not None
    shapes = stored_tensors(folder, lambda name: name.endswith(_TRELLIS))
    if not shapes:
        return quantization
    names = frozenset(stored_names(folder) or ())
    trellises_by_name = {
        name.removesuffix(_TRELLIS): _trellis_of(name, tensor, names) for name, tensor in shapes.items()
    }
    trellises = replace(
        quantization.trellises, stored={without_decoder(name): one for name, one in trellises_by_name.items()}
    )
    # One of the modules shows how the decoder's modules are called in this checkpoint.
    example = frozenset(sorted(name for name in trellises_by_name if ".layers." in name)[:1])
    rules = tuple(
        replace(rule, modules=example) if rule.quant is not None and rule.quant.scheme == EXL3.name else rule
        for rule in quantization.rules
    )
    return replace(quantization, rules=rules, trellises=trellises)


def _trellis_of(name: str, tensor: Stored, names: Collection[str]) -> Trellis:
    """Returns the form of a stored trellis [columns / 16, rows / 16, words]. Raises UserError."""
    module, shape = name.removesuffix(_TRELLIS), tensor.shape
    half_bits, rest = divmod(2 * shape[-1], TILE) if shape else (0, 1)
    codebook = next((marker for marker in MARKERS if f"{module}.{marker}" in names), DEFAULT_CODEBOOK)
    halves = half_bits % 2 and codebook != "mul1"
    if len(shape) != 3 or rest or halves or not 2 <= half_bits <= 2 * MAX_BITS:
        raise UserError(
            f"tensor {name} has shape {list(shape)}: a trellis has words of 1 to {MAX_BITS} whole bits a weight, or"
            " with the codebook mul1 of halves"
        )
    return Trellis(half_bits, codebook, f"{module}{_SIGNS}" in names)
