"""Which steps the builders of long prompts are for, and what becomes of one that does not work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention import sites
from sglang.srt.layers.attention.sites import AttentionSites
from sglang.srt.layers.step_rows import ExtendRows, VerifyRows
from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite

SHAPE = AttentionShape(4, 2, 128, 128)
WHOLE, WINDOW = AttentionSite(SHAPE), AttentionSite(SHAPE, 16)


class Builder:
    """An ExtendBuilder whose metadata is its name; prefixes of 5,000 tokens are shared."""

    plans_on_host, in_graphs = False, True

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self, rows: ExtendRows) -> str:
        return self.name

    def num_parts(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        return 1 + any(prefix >= 5000 for prefix in prefix_lens)


def prompts(new: list[int], prefix: list[int] | None = None, **changes: Any) -> ExtendRows:
    prefix = [0] * len(new) if prefix is None else prefix
    lens = torch.tensor([a + b for a, b in zip(new, prefix, strict=True)])
    known: dict[str, Any] = {"seq_lens_cpu": lens.tolist(), **changes}
    return ExtendRows(torch.arange(len(new)), lens, (), lens, lens, new, prefix, **known)


MIN_TOKENS = sites.LONG_PROMPTS
LONG = {
    "one prompt": prompts([MIN_TOKENS]),
    "several": prompts([200, MIN_TOKENS - 200], [7, 4999]),
}
SHORT = {
    "too few tokens": prompts([200, MIN_TOKENS - 201]),
    "a shared prefix": prompts([MIN_TOKENS], [5000]),
    "in a graph": prompts([MIN_TOKENS], seq_lens_cpu=None),
    "draft_tokens": prompts([MIN_TOKENS], draft_tokens=VerifyRows.__new__(VerifyRows)),
}


@pytest.mark.parametrize("name", [*LONG, *SHORT])
def test_long_prompts_outside_of_graphs(name: str) -> None:
    short, windows, long = Builder("short"), Builder("windows"), Builder("long")
    attention = AttentionSites({}, {WHOLE: short, WINDOW: windows}, long_prompts={WHOLE: long})
    built = {WHOLE: sites.SiteMetadata(), WINDOW: sites.SiteMetadata()}
    attention._build_extend((LONG | SHORT)[name], built)
    assert built[WHOLE].extend == ("long" if name in LONG else "short") and built[WINDOW].extend == "windows"


def test_prefixes_that_meet_other_kernels() -> None:
    """Of a context that is too short no prefix is shared, and a runner computes none at its start."""
    attention = AttentionSites({}, {WHOLE: Builder("short")})
    assert attention.prefixes(16, 40_000) == [0, 1, sites.LONG_PREFIX]
    assert attention.prefixes(16, 6_000) == [0, 1, 5_983]
    assert attention.prefixes(16, 5_016) == [0, 1]
    latent = AttentionSites({}, {}, dict.fromkeys(attention.extend), chunk_tokens=64)
    assert latent.prefixes(16, 82) == [0, 1, 65] and latent.prefixes(16, 81) == [0, 1]


def plan_of(backend: Any) -> Any:
    """A plan that chose a backend for long prompts of both sites."""
    choice = SimpleNamespace(name="flashinfer", need=SimpleNamespace(head_dim=128), load=lambda: backend)
    return SimpleNamespace(
        attention_sites=(WHOLE, WINDOW),
        choices={"long_prompt_attention": choice},
        attention_op=lambda op, shape: op,
    )


def test_sites_without_windows_have_one() -> None:
    backend = SimpleNamespace(long_prompt_builder=lambda site: f"of {site.window}")
    builders = sites._long_prompts(plan_of(lambda plan, device: backend), "cpu", {})
    assert builders == {WHOLE: "of 0"}


def test_a_backend_that_does_not_work_is_named_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no nvcc")

    with caplog.at_level(logging.WARNING):
        assert sites._long_prompts(plan_of(fails), "cpu", {}) == {}
        in_use = SimpleNamespace(long_prompt_builder=fails)
        assert sites._long_prompts(plan_of(None), "cpu", {"flashinfer": in_use}) == {}
    assert caplog.text.count("flashinfer does not work here") == 2 and "no nvcc" in caplog.text
