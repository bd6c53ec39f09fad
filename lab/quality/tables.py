"""Results as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quality import forms

Result = Mapping[str, Any]


def table(results: Iterable[Result]) -> str:
    """Returns a table of the forms in 16-bit caches and of the caches beside 16-bit weights, and one of the pairs."""
    results = list(results)
    alone = [one for one in results if forms.PLAIN in (one["weights"], one["cache"])]
    pairs = [one for one in results if one not in alone]
    order = {name: number for number, name in enumerate(forms.WEIGHTS)}
    alone.sort(key=lambda one: (order[one["weights"]], list(forms.CACHES).index(one["cache"])))
    tokens = max((one.get("count", 0) for one in alone), default=0)
    lines = [
        f"{tokens:,} tokens:",
        "",
        "| weights | KV cache | perplexity | more than in 16 bits | divergence | same token | right answers |",
        "|---|---|---|---|---|---|---|",
        *(_row(one) for one in alone),
    ]
    if pairs:
        counts = max(one.get("count", 0) for one in pairs)
        caches = [cache for cache in forms.CACHES if cache != forms.PLAIN]
        lines += [
            "",
            f"{counts:,} tokens, divergence:",
            "",
            "| weights | " + " | ".join(f"{c} cache" for c in caches) + " |",
        ]
        lines += ["|---" * (len(caches) + 1) + "|"]
        cells = {(one["weights"], one["cache"]): _divergence(one) for one in pairs}
        for form in sorted({one["weights"] for one in pairs}, key=order.__getitem__):
            found = [cells.get((form, cache), "") for cache in caches]
            lines.append(f"| {_named(form)} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def _row(one: Result) -> str:
    share = one.get("quantized_share") or 1.0
    of_weights = f", {share:.0%} of the weights" if share < 0.99 else ""
    start = f"| {_named(one['weights'])}{of_weights} | {one['cache']} |"
    if "refused" in one:
        return f"{start} refused | | | | |"
    more = one["perplexity"] / one["perplexity_16_bit"] - 1
    plain = one["weights"] == one["cache"] == forms.PLAIN
    figures = ["", "", ""] if plain else [f"{more:+.1%}", _divergence(one), f"{one['same']:.1%}"]
    answers = f"{one['right']} of {one['questions']}" if one["questions"] else ""
    return " | ".join([f"{start} {one['perplexity']:.3f}", *figures, answers]) + " |"


def _named(form: str) -> str:
    if not forms.WEIGHTS[form].scheme:
        return form
    scheme, _, rounding = form.partition("-")
    return f"`{scheme}`" + (f", {rounding}" if rounding else "")


def _divergence(one: Result) -> str:
    return "refused" if "refused" in one else f"{one['divergence']:.4f}"
