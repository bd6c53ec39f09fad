"""Rotary tables against transformers, which computes the same variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sglang.srt.configs.rope import RopeSpec, rope_spec, unrotated
from sglang.srt.errors import UserError
from sglang.srt.layers.rotary_embedding import RotaryTables, SectionPositions, rope_table

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
AN_ULP = {"rtol": 0.0, "atol": 4e-4}  # of angles up to 4096 rad in fp32
VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 24, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.25},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
]


def _config(rope: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    return {"max_position_embeddings": 2048, "rope_parameters": {**rope, "rope_theta": theta}}


def _reference(rope: dict[str, Any], theta: float, positions: torch.Tensor) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={**rope, "rope_theta": theta},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1)


@pytest.mark.parametrize("rope", VARIANTS, ids=lambda r: "-".join(map(str, r.values())))
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_table_equals_transformers(rope: dict[str, Any], theta: float) -> None:
    table = rope_table(rope_spec(_config(rope, theta), 64), 2048, "cpu")
    assert table.shape == (2048, 64) and table.dtype == torch.float32
    torch.testing.assert_close(table, _reference(rope, theta, torch.arange(2048)), **AN_ULP)


def test_dynamic_scaling_uses_the_served_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    spec = rope_spec(_config(rope), 64)
    within = rope_table(spec, 2048, "cpu")
    torch.testing.assert_close(within, rope_table(rope_spec(_config({"rope_type": "default"}), 64), 2048, "cpu"))
    beyond = rope_table(spec, 4096, "cpu")
    torch.testing.assert_close(beyond, _reference(rope, 10000.0, torch.arange(4096)), **AN_ULP)
    assert torch.equal(rope_table(spec, 1024, "cpu", context_len=4096), beyond[:1024])


@pytest.mark.parametrize("rope", VARIANTS[:5], ids=lambda r: r["rope_type"])
def test_a_bounded_table_has_the_rows_of_the_whole_context(rope: dict[str, Any]) -> None:
    """In fp32 angles of 300,000 rad are told apart by a 32nd."""
    rows, context = 300_000, 10_485_760
    tables = RotaryTables(rows, context, "cpu")
    positions = torch.tensor([0, 1, 262_143, 262_144, rows - 1])
    table = tables.of(rope_spec(_config(rope, 5e5), 64))
    row, cos_sin = table.at(positions)
    assert cos_sin.shape == (rows, 64)
    torch.testing.assert_close(cos_sin[row], _reference(rope, 5e5, positions), rtol=0.0, atol=1 / 32)
    sectioned = RopeSpec(4, 1e4, 64, sections=(1, 1))
    assert RotaryTables(rows, rows + 1, "cpu").of(sectioned).cos_sin.shape == (rows + 1, 4), "ahead of the tokens"


@pytest.mark.parametrize(
    ("spec", "rows"), [(RopeSpec(4, 1e4, 64), 30), (RopeSpec(4, 1e4, 64, sections=(1, 1)), 40), (unrotated(4), 1)]
)
def test_a_table_has_the_rows_that_are_planned(spec: RopeSpec, rows: int) -> None:
    assert spec.table_rows(30, 40) == rows
    assert RotaryTables(30, 40, "cpu").of(spec).cos_sin.shape == (rows, 4)


def test_the_older_spelling_means_the_same() -> None:
    old = {"max_position_embeddings": 2048, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert rope_spec(old, 64) == rope_spec(_config({"rope_type": "linear", "factor": 4.0}, 5e5), 64)
    assert rope_spec({"max_position_embeddings": 8, "rope_scaling": None}, 64).kind == "default"


def test_partial_rotary_turns_the_leading_dims_only() -> None:
    config = {"max_position_embeddings": 2048, "partial_rotary_factor": 0.5}
    assert rope_spec(config, 64).rot_dim == 32
    assert rope_table(rope_spec(config, 64), 16, "cpu").shape == (16, 32)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, "'longrope' is not supported; supported: default, dynamic"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, r"'mrope_section' \[1, 2\] does not add up to 32 freq"),
        ({"rope_type": "default", "mrope_section": "1, 2"}, "'mrope_section' must be a list"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs high_freq_factor, low_freq_factor, original_max"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_medium": 3}, "beta_medium"),
    ],
)
def test_what_we_do_not_understand_is_refused_by_name(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rope_spec(_config(rope), 64)


@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_of_several_sections(interleaved: bool) -> None:
    """As Qwen's multimodal models turn them; equal positions are those of text."""
    sections = (12, 10, 10)
    table = RotaryTables(64, 64, "cpu").of(RopeSpec(64, 1e4, 64, sections=sections, interleaved_sections=interleaved))
    positions = torch.tensor([[5, 6, 9], [1, 6, 2], [0, 6, 40]])
    of_sections = SectionPositions(positions)
    rows, cos_sin = table.at(of_sections)
    assert table.at(of_sections)[1] is cos_sin, "the angles are made once a step"
    cos, sin = cos_sin[rows].chunk(2, dim=-1)
    turned = [0, 1, 2] * 10 + [0, 0] if interleaved else [0] * 12 + [1] * 10 + [2] * 10
    plain = table.cos_sin.view(64, 2, 32)
    for frequency, section in enumerate(turned):
        torch.testing.assert_close(cos[:, frequency], plain[positions[section], 0, frequency], rtol=0.0, atol=0.0)
        torch.testing.assert_close(sin[:, frequency], plain[positions[section], 1, frequency], rtol=0.0, atol=0.0)
    text = positions[0]
    rows, whole = table.at(text)
    assert rows is text and whole is table.cos_sin
