"""Timings of SGLang's Triton attention on a real RTX PRO 6000 Server, as the published tables hold them (source and
layout: measured_experts.py). Windows of 8,192 keys are left out: their times are those of full attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.tuning.attention_model import Keys, Prompt

VERSION = "0.5.14"
V_DIM = {192: 128}
"""Of models whose values are narrower than their keys; the best read rate would otherwise exceed the card's."""


@dataclass(frozen=True, slots=True)
class MeasuredDecode:
    keys: Keys
    seconds: float

    @property
    def group(self) -> tuple[int, int]:
        return self.keys.heads, self.keys.kv_heads


@dataclass(frozen=True, slots=True)
class MeasuredPrompt:
    prompt: Prompt
    q_item: int
    seconds: float

    @property
    def group(self) -> tuple[int, int]:
        return self.prompt.heads, self.prompt.kv_heads


def read_decode(tables: Path) -> list[MeasuredDecode]:
    """FileNotFoundError names a missing table."""
    return [
        *_decode(_table(tables, "attention", "generation_attention")),
        *_latent(_table(tables, "mla", "generation_mla")),
    ]


def read_prompts(tables: Path) -> list[MeasuredPrompt]:
    return list(
        itertools.chain(
            _prompts(_table(tables, "attention", "context_attention")),
            _latent_prompts(_table(tables, "mla", "context_mla")),
        )
    )


def _table(tables: Path, op: str, name: str) -> Any:
    import pandas  # a tool's dependency

    path = tables / op / "sglang" / VERSION / f"{name}_perf.parquet"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: --tables names the directory that holds moe/, attention/, ...")
    table = pandas.read_parquet(path)
    return table[table.kernel_source == "triton"]


def _item(dtype: str) -> int:
    return 1 if dtype == "fp8" else 2


def _decode(table: Any) -> Iterator[MeasuredDecode]:
    for row in table[table.window_size < 8192].itertuples():
        context = min(row.step + 1, row.window_size or row.step + 1)
        dims = (int(row.head_dim), V_DIM.get(int(row.head_dim), int(row.head_dim)))
        sizes = (int(row.batch_size), int(context), int(row.num_heads), int(row.num_key_value_heads))
        yield MeasuredDecode(Keys(*sizes, *dims, _item(row.kv_cache_dtype)), float(row.latency) * 1e-3)


def _latent(table: Any) -> Iterator[MeasuredDecode]:
    rows = table.drop_duplicates(["num_heads", "batch_size", "step"])
    for row in rows.itertuples():
        keys = Keys(int(row.batch_size), int(row.step) + 1, int(row.num_heads), 1, 576, 512, 2, True)
        yield MeasuredDecode(keys, float(row.latency) * 1e-3)


def _prompts(table: Any) -> Iterator[MeasuredPrompt]:
    for row in table[table.window_size < 8192].itertuples():
        dims = (int(row.head_dim), V_DIM.get(int(row.head_dim), int(row.head_dim)))
        sizes = (int(row.batch_size), int(row.isl), int(row.num_heads), int(row.num_key_value_heads))
        prompt = Prompt(*sizes, *dims, 0, int(row.window_size), _item(row.kv_cache_dtype))
        yield MeasuredPrompt(prompt, _item(row.attn_dtype), float(row.latency) * 1e-3)


def _latent_prompts(table: Any) -> Iterator[MeasuredPrompt]:
    rows = table.drop_duplicates(["num_heads", "batch_size", "isl"])
    for row in rows.itertuples():
        sizes = (int(row.batch_size), int(row.isl), int(row.num_heads), 1)
        yield MeasuredPrompt(Prompt(*sizes, 576, 512), 2, float(row.latency) * 1e-3)


def sample(rows: Sequence[Any], count: int) -> list[Any]:
    """Every so-manieth."""
    return list(rows[:: max(1, len(rows) // count)])
