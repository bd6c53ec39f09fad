"""What is measured: forms of weights and of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang.quantize.__main__ import CALIBRATED
from sglang.quantize.formats import FORMATS
from sglang.srt.configs.quant_scheme import SCHEMES


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
LLAMA_CPP = "llama.cpp"
"""The weights of the GGUF file, computed by llama.cpp; measured only where `--weights` names it."""
PEERS = (TRANSFORMERS, LLAMA_CPP)
CACHES: Mapping[str, str] = {PLAIN: "bf16", "fp8": "fp8_e4m3", "fp4": "fp4_e2m1"}
ROUNDED = ("int4_g32", "int4_g64", "int4_g128", "mxfp4", "nvfp4")
WEIGHTS: Mapping[str, Weights] = {
    PLAIN: Weights(),
    **{peer: Weights() for peer in PEERS},
    **{scheme: Weights(scheme) for scheme in FORMATS},
    **{f"{scheme}-fitted": Weights(scheme, "fitted") for scheme in ROUNDED},
    **{f"{scheme}-awq": Weights(scheme, "awq") for scheme in ROUNDED if SCHEMES[scheme].activation is None},
    **{f"{scheme}-gptq": Weights(scheme, "gptq") for scheme in ROUNDED},
    **{f"{scheme}-awq-gptq": Weights(scheme, "awq-gptq") for scheme in ROUNDED if SCHEMES[scheme].activation is None},
}
"""`--quantization fp8` gives the weights of fp8_channel, and checkpoints of GPTQ and AutoRound (symmetric) those of
int4_g*."""


def cells(
    tokens: int, cross_tokens: int, weights: Sequence[str] = tuple(WEIGHTS), caches: Sequence[str] = tuple(CACHES)
) -> list[Cell]:
    """Returns the cells in the order of their worth: each form alone over `tokens`, then pairs over `cross_tokens`."""
    of_caches = [Cell(PLAIN, cache, tokens) for cache in caches if PLAIN in weights]
    ours = [form for form in weights if form not in (PLAIN, *PEERS)]
    alone = [Cell(form, PLAIN, tokens) for form in weights if form != PLAIN and PLAIN in caches]
    pairs = [Cell(form, cache, cross_tokens) for form in ours for cache in caches if cache != PLAIN]
    return of_caches + alone + pairs


def longest_first(weights: Sequence[str]) -> list[str]:
    """Returns forms in the order in which processes side by side begin them: those that are calibrated take longest."""
    return sorted(weights, key=lambda form: WEIGHTS[form].rounding not in CALIBRATED)
