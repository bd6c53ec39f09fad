"""What is measured: forms of weights and of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang.quantize.formats import FORMATS


@dataclass(frozen=True, slots=True)
class Weights:
    """A form of weights: the scheme in which `sglang.quantize` writes them ("": in 16 bits), and its --rounding."""

    scheme: str = ""
    rounding: str = "nearest"


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: a form of weights with a type of the KV cache, and how many tokens of text it reads."""

    weights: str
    cache: str
    tokens: int

    @property
    def name(self) -> str:
        """Returns the name of the cell's file."""
        return f"{self.weights}.{self.cache}.{self.tokens}"


PLAIN = "16-bit"
TRANSFORMERS = "transformers"
"""The weights of 16 bits, computed by transformers."""
CACHES: Mapping[str, str] = {PLAIN: "bf16", "fp8": "fp8_e4m3", "fp4": "fp4_e2m1"}
ROUNDED = ("int4_g32", "int4_g64", "int4_g128", "mxfp4", "nvfp4")
WEIGHTS: Mapping[str, Weights] = {
    PLAIN: Weights(),
    TRANSFORMERS: Weights(),
    **{scheme: Weights(scheme) for scheme in FORMATS},
    **{f"{scheme}-fitted": Weights(scheme, "fitted") for scheme in ROUNDED},
    **{f"{scheme}-gptq": Weights(scheme, "gptq") for scheme in ROUNDED},
}
"""`--quantization fp8` gives the weights of fp8_channel, and checkpoints of GPTQ and AutoRound (symmetric) those of
int4_g*."""


def cells(tokens: int, cross_tokens: int, weights: Sequence[str] = tuple(WEIGHTS)) -> list[Cell]:
    """Returns the cells in the order of their worth: each form alone over `tokens`, then pairs over `cross_tokens`."""
    alone = [Cell(form, PLAIN, tokens) for form in weights]
    alone[1:1] = [Cell(PLAIN, cache, tokens) for cache in CACHES if cache != PLAIN]
    ours = [form for form in weights if form not in (PLAIN, TRANSFORMERS)]
    pairs = [Cell(form, cache, cross_tokens) for form in ours for cache in CACHES if cache != PLAIN]
    return alone + pairs
