"""Statistics of a request's draft tokens under the names of SGLang's replies."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang.srt.managers.wire.io_struct import BatchStrOut, DraftCounts


def draft_counts(batch: BatchStrOut) -> list[DraftCounts]:
    """Returns the counts of each request of a message, without histograms; an empty list if there are none."""
    rows: list[list[int]] = np.frombuffer(batch.drafts, np.int32).reshape(-1, 3).tolist()
    return [DraftCounts(steps, proposed, correct) for steps, proposed, correct in rows]


def draft_details(drafts: DraftCounts) -> dict[str, Any]:
    """Returns `spec_*` of `sglext.spec_tokens_details`. The histogram counts the steps with 0, 1, 2, ... accepted draft
    tokens; it comes with the end of the request.

    >>> draft_details(DraftCounts(steps=2, proposed=6, correct=3))["spec_accept_length"]
    2.5
    """
    details: dict[str, Any] = {
        "spec_accept_length": 1 + drafts.correct / drafts.steps if drafts.steps else 0.0,
        "spec_accept_rate": drafts.correct / drafts.proposed if drafts.proposed else 0.0,
        "spec_num_correct_drafts": drafts.correct,
        "spec_num_proposed_drafts": drafts.proposed,
        "spec_verify_ct": drafts.steps,
    }
    if drafts.histogram:
        details["spec_correct_drafts_histogram"] = drafts.histogram
    return details


def draft_meta_info(drafts: DraftCounts) -> dict[str, Any]:
    """Returns the same for `meta_info`, with the names of earlier releases."""
    info = draft_details(drafts)
    info |= {"spec_accept_token_num": drafts.correct, "spec_draft_token_num": drafts.proposed}
    if drafts.histogram:
        info["spec_accept_histogram"] = drafts.histogram
    return info
