"""The table of `sglang plan` with the tokens of a layout by the form of its cache, and what each form costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang.explain import Explanation, explain
from sglang.plan.host_memory import Machine
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.kv_spec import FP4_KV
from sglang.srt.plan.pool_sizes import cache_cost
from sglang.srt.server_args import ServerArgs

ROUNDING: Mapping[str, float] = {
    "float32": 0.0,
    "float16": 0.0002,
    "bfloat16": 0.0017,
    "fp8_e4m3": 0.027,
    FP4_KV: 0.095,
}
"""RMS error of a row of keys or values by rounding alone, relative to the row. A test measures it on normal numbers."""
EXPLANATION = (
    "Error: of a stored row by rounding alone (RMS); states keep their own type, rotary columns of latents 16 bits, and"
    " keys of indexers 8 bits beside 4. Of 162 tasks the embedded model solved 161 with bfloat16, fp8_e4m3 and fp4_e2m1"
    " (benchmark/results/attention.md); larger models may differ."
)


@dataclass(frozen=True, slots=True)
class CacheForm:
    """A layout with its cache in one form."""

    bits: int
    dtype: str
    """The value of --kv-cache-dtype."""
    asked: bool
    """Whether the flags of the survey give this one."""
    tokens: int = 0
    """KV tokens of one server."""
    bytes_per_token: float = 0.0
    """Of one GPU."""
    refused: str | None = None
    """Why no server has it; None: one may."""

    @property
    def error(self) -> float:
        """RMS error of a stored row, relative to it."""
        return ROUNDING[self.dtype]


def cache_forms(
    args: ServerArgs, explained: Explanation, arch: ArchTraits, free_memory: int | None, machine: Machine
) -> tuple[CacheForm, ...]:
    """Plans a layout with its cache in the model's own dtype, in eight and in four bits. args, explained: of the layout
    as the flags ask for it."""
    model_dtype = explained.parallel.dtype
    bits = 32 if model_dtype == "float32" else 16
    forms = []
    for width, dtype in ((bits, model_dtype), (8, "fp8_e4m3"), (4, FP4_KV)):
        form = CacheForm(width, dtype, dtype == explained.parallel.kv_dtype)
        try:
            planned = explained
            if not form.asked:
                flags = replace(args, kv_cache_dtype=dtype)
                planned = explain(flags, arch, frozenset({"triton"}), free_memory, advises=False, machine=machine)
        except UserError as error:
            forms.append(replace(form, refused=str(error)))
            continue
        if planned.parallel.kv_dtype != dtype:
            forms.append(replace(form, refused=f"--kv-cache-dtype {dtype} becomes {planned.parallel.kv_dtype}"))
            continue
        if planned.plan is None or planned.problem is not None:
            forms.append(replace(form, refused=planned.problem or "nothing is planned for this device"))
            continue
        tokens = planned.parallel.ranks.attn_dp_size * planned.plan["max_total_num_tokens"]
        forms.append(replace(form, tokens=tokens, bytes_per_token=float(cache_cost(planned.groups).bytes_per_token)))
    return tuple(forms)


def forms_json(forms: Sequence[CacheForm]) -> list[dict[str, Any]]:
    """Returns the forms for JSON."""
    return [
        {"bits": form.bits, "kv_cache_dtype": form.dtype, "asked": form.asked, "refused": form.refused}
        if form.refused is not None
        else {
            "bits": form.bits,
            "kv_cache_dtype": form.dtype,
            "asked": form.asked,
            "tokens": form.tokens,
            "bytes_per_token": form.bytes_per_token,
            "error": form.error,
        }
        for form in forms
    ]


def form_rows(forms: Sequence[CacheForm]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table, its head first."""
    yield "cache", "--kv-cache-dtype", "tokens", "times", "bytes a token and GPU", "error"
    first = forms[0].tokens
    for form in forms:
        name = f"{form.bits} bits{' (as asked)' if form.asked else ''}"
        if form.refused is not None:
            yield name, form.dtype, "not served", "", "", ""
            continue
        times = f"{form.tokens / first:.2f}" if first else ""
        error = f"{100 * form.error:.2g}%"
        yield name, form.dtype, f"{form.tokens:,}", times, f"{form.bytes_per_token:,.0f}", error
