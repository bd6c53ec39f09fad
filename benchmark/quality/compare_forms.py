"""Measures what forms of weights and of the KV cache cost a model: perplexity of real text, and how often the likeliest
token is another one than in 16 bits.

    python benchmark/quality/compare_forms.py --model-path smollm2 --tokens 50000 --forms 16-bit fp8 int4_g32 kv-fp8

The text is the reference of the Python language, which comes with it (`pydoc_data.topics`). Each window of it is a
prompt of its own. Forms that no flag makes are written with `sglang.quantize` to a temporary directory.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sglang
from sglang.quantize.export import Selection, export
from sglang.quantize.formats import FORMATS
from sglang.srt.errors import UserError


@dataclass(frozen=True, slots=True)
class Form:
    """A form: the scheme in which `sglang.quantize` writes the weights ("": they stay as they are), and flags."""

    scheme: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)


REFERENCE = "16-bit"
FORMS: Mapping[str, Form] = {
    REFERENCE: Form(),
    "fp8": Form(flags={"quantization": "fp8"}),
    **{scheme: Form(scheme) for scheme in FORMATS},
    "kv-fp8": Form(flags={"kv_cache_dtype": "fp8_e4m3"}),
    "kv-fp4": Form(flags={"kv_cache_dtype": "fp4_e2m1"}),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Of every token but the first of each window: its log probability, and which token was likeliest in its place."""

    logprobs: Sequence[float]
    likeliest: Sequence[int]

    @property
    def perplexity(self) -> float:
        """Returns e to the mean of the negative log probabilities."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Measured) -> float:
        """Returns the share of places where both find the same token likeliest."""
        same = sum(ours == theirs for ours, theirs in zip(self.likeliest, other.likeliest, strict=True))
        return same / len(self.likeliest)


def text() -> str:
    """Returns the reference of the Python language."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(ids: Sequence[int], tokens: int, length: int) -> list[list[int]]:
    """Returns the first `tokens` ids in windows of `length`. Raises UserError if there are fewer."""
    if len(ids) < tokens:
        raise UserError(f"The text has {len(ids):,} tokens, fewer than {tokens:,}.")
    return [list(ids[i : i + length]) for i in range(0, tokens - length + 1, length)]


def measure(engine: sglang.Engine, prompts: Sequence[Sequence[int]]) -> Measured:
    """Measures a model on prompts of token ids."""
    logprobs: list[float] = []
    likeliest: list[int] = []
    for ids in prompts:
        output = engine.generate(
            input_ids=list(ids),
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )
        assert isinstance(output, dict)
        info = output["meta_info"]
        logprobs += [entry[0] for entry in info["input_token_logprobs"][1:]]
        likeliest += [entries[0][1] for entries in info["input_top_logprobs"][1:]]
    return Measured(logprobs, likeliest)


def measure_form(form: Form, args: argparse.Namespace) -> Measured:
    """Starts a server of the form and measures it."""
    with tempfile.TemporaryDirectory() as folder:
        path = args.model_path
        if form.scheme:
            path = f"{folder}/{form.scheme}"
            export(args.model_path, path, FORMATS[form.scheme], Selection())
        flags = {"dtype": args.dtype, "disable_radix_cache": True, "chunked_prefill_size": 256, **form.flags}
        with sglang.Engine(model_path=path, **flags) as engine:
            assert engine.tokenizer is not None
            ids = engine.tokenizer.encode(text(), add_special_tokens=False)
            return measure(engine, windows(ids, args.tokens, args.window))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table with a row for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="a model in 16 bits, or in GGUF")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--window", type=int, default=512, help="tokens of a prompt; cached ones are read from 257 on")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM", help=", ".join(FORMS))
    args = parser.parse_args(argv)
    reference = measure_form(FORMS[REFERENCE], args)
    print(f"{args.model_path}: {len(reference.logprobs):,} tokens in windows of {args.window}, {args.dtype}\n")
    print("| form | perplexity | more than in 16 bits | same likeliest token |\n|---|---|---|---|")
    for name in args.forms:
        try:
            measured = reference if name == REFERENCE else measure_form(FORMS[name], args)
        except UserError as error:
            print(f"| {name} | refused: {error} | | |")
            continue
        more = measured.perplexity / reference.perplexity - 1
        print(f"| {name} | {measured.perplexity:.3f} | {more:+.2%} | {measured.agreement(reference):.2%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
