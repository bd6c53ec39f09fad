"""Launch variants of the kernel that copies cached pages to main memory and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sglang.ledger.form_rule import FormRule
from sglang.ledger.variant import Variant
from sglang.srt.mem_cache import page_kernel

OPS = ("page_copies",)
FORM_RULES: dict[str, FormRule] = {}
WORDS = {"i64": "*i64", "i32": "*i32"}


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every word, width of strips and direction. Nothing is known of alignments."""
    kernel = page_kernel.page_copy_kernel
    pointers = dict.fromkeys(("strips", "pages", "row_ids"), "*i64")
    numbers = dict.fromkeys(("num_strips", "num_rows", "row_words"), "i32")
    for (word, rows), width, to_rows in itertools.product(WORDS.items(), page_kernel.WIDTHS, (True, False)):
        signature = {**pointers, **numbers, "rows": rows}
        constants = {"TO_ROWS": to_rows, "ROWS": page_kernel.TILE // width, "WORDS": width}
        yield Variant(
            op,
            f"{word}/{width}/{'save' if to_rows else 'load'}",
            kernel,
            {name: signature.get(name, "constexpr") for name in kernel.arg_names},
            constants,
            (),
            {"num_stages": 3, **page_kernel.LAUNCH},
        )
