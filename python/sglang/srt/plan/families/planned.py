"""Families that planning knows and nobody serves yet."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family

PLANNED = (Family(model_types=("qwen3_vl_moe",), qk_norm="head"),)
