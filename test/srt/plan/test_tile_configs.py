"""The tile configs that the plan holds: every tile of `tile_choices.json`, which was chosen launch by launch before
there were tile configs, and what layers ask for."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sglang.srt
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.spec import Need
from sglang.srt.kernels.tile_configs import ANY, OpTileConfigs, TileConfigs, config_for
from sglang.srt.layers.moe.fused_moe_triton import expert_tile_configs
from sglang.srt.layers.moe.fused_moe_triton.config_files import Found
from sglang.srt.layers.triton_ops import linear_tiles
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.server_args import ServerArgs

SRT = Path(sglang.srt.__path__[0])
CONFIGS = Path(__file__).parents[1] / "kernels" / "configs"
RECORDED = json.loads((Path(__file__).parent / "tile_choices.json").read_text())
TOKENS = (
    *range(1, 132),
    *range(132, 520, 5),
    *(511, 512, 513, 575, 576, 577, 767, 768, 1000, 1023, 1024, 1025, 2048, 3000, 4096, 5000, 8192, 16384),
)
WEIGHTS = (
    *((4096, 4096), (6144, 4096), (1280, 5120), (192, 5120), (12288, 1536)),
    *((2112, 7168), (151936, 4096), (576, 2880), (1368, 2048), (7168, 96)),
)
EXPERTS = (
    *((128, 8, 1, 2048, 768), (161, 9, 1, 5120, 192), (160, 8, 1, 5120, 384), (128, 4, 1, 2880, 2880)),
    *((64, 8, 2, 4096, 1408), (32, 4, 4, 2880, 2880), (43, 8, 3, 4096, 1536), (256, 8, 1, 7168, 256)),
    *((513, 11, 1, 2048, 512), (8, 2, 1, 4096, 14336)),
)
"""Experts of a rank, those of a token, groups of ranks, hidden size, intermediate dims of a rank."""

Cut = Callable[[Need, ArchTraits], OpTileConfigs]


def digest(lines: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def said(tile_configs: TileConfigs) -> Iterator[tuple[int, str]]:
    """(tokens, what is launched, and what that may step down to)."""
    texts = {
        tile_config.max_tokens: f"{tile_config.variant}: {'; '.join(tile_config.names)}" for tile_config in tile_configs
    }
    yield from ((tokens, texts[config_for(tile_configs, tokens).max_tokens]) for tokens in TOKENS)


def linear(cut: Cut, scheme: str | None, arch: ArchTraits, biases: tuple[bool, ...] = (False,)) -> Iterator[str]:
    need = Need("linear", quant=scheme, shapes=tuple((*size, bias) for size in WEIGHTS for bias in biases))
    for (rows, cols, bias), tile_configs in cut(need, arch).by_shape.items():
        marked = f" {bias}" if len(biases) > 1 else ""
        yield from (f"{rows}x{cols}{marked} {tokens} {text}" for tokens, text in said(tile_configs))


def experts(cut: Cut, scheme: str | None, arch: ArchTraits) -> Iterator[str]:
    for num, top_k, groups, hidden, inter in EXPERTS:
        bias = hidden == 2880
        shapes = ((2 * inter, hidden, bias), (hidden, inter, bias))
        need = Need("fused_moe", quant=scheme, shapes=shapes, experts=(num, top_k, groups))
        for tokens, text in said(cut(need, arch).by_shape[None]):
            yield f"{num} {top_k} {groups} {hidden}x{inter} {tokens} {text}"


def cases(kernel: str) -> list[tuple[str, str | None]]:
    pairs = (name.split() for name in RECORDED[kernel])
    return [(arch, None if scheme == "None" else scheme) for arch, scheme in pairs]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", "sm_121", "rtx-5090"])
def test_every_tile_is_the_one_that_launches_chose(arch: str) -> None:
    traits = arch_by_name(arch)
    for scheme in SCHEMES:
        got = digest(linear(linear_tiles.triton_tile_configs, scheme, traits))
        assert got == RECORDED["linear"][f"{arch} {scheme}"], f"linear {scheme}"
    for scheme in (None, *SCHEMES):
        got = digest(experts(expert_tile_configs.triton_tile_configs, scheme, traits))
        assert got == RECORDED["fused_moe"][f"{arch} {scheme}"], f"fused_moe {scheme}"


@pytest.mark.parametrize(("arch", "scheme"), cases("sgl_kernel"))
def test_steps_with_many_pairs_are_sgl_kernels(arch: str, scheme: str) -> None:
    assert (
        digest(experts(expert_tile_configs.mixed_tile_configs, scheme, arch_by_name(arch)))
        == RECORDED["sgl_kernel"][f"{arch} {scheme}"]
    )


@pytest.mark.parametrize(("arch", "scheme"), cases("torch_scaled_mm"))
def test_large_steps_are_torchs_where_it_takes_the_weight(arch: str, scheme: str) -> None:
    got = digest(linear(linear_tiles.library_tile_configs, scheme, arch_by_name(arch), (False, True)))
    assert got == RECORDED["torch_scaled_mm"][f"{arch} {scheme}"]


# --- what the plan holds ----------------------------------------------------------------------------------------------


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[..., Plan]:
    def build(config: str, arch: str = "sm_120", **flags: Any) -> Plan:
        shutil.copy(CONFIGS / f"{config}.json", tmp_path / "config.json")
        args = ServerArgs.from_kwargs(model_path=str(tmp_path), load_format="dummy", **flags)
        return make_plan(args, ModelConfig.from_server_args(args), arch_by_name(arch), 90 << 30, frozenset({"triton"}))

    return build


def test_the_plan_asks_for_a_ranks_experts(plan_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM-4.7's with the shared expert among the routed ones, and GPT-OSS's, whose ranks hold whole groups."""
    asked: list[tuple[Any, ...]] = []

    def find(*layer: Any, **sizes: Any) -> Found:
        asked.append((*layer[:3], sizes))
        return Found(None)

    monkeypatch.setattr(expert_tile_configs, "find", find)
    plan_of("glm47", tp_size=8)
    plan_of("glm47", tp_size=8, ep_size=2)
    plan_of("gpt_oss", tp_size=4)
    assert asked == [
        (161, 192, "fp8_channel", {"hidden": 5120, "bias": False}),
        (80, 384, "fp8_channel", {"hidden": 5120, "bias": False}),
        (128, 768, "mxfp4", {"hidden": 2880, "bias": True}),
    ]


def test_every_layer_has_bands(plan_of: Any) -> None:
    plan = plan_of("glm47", tp_size=8)
    shapes = plan.choices["linear/fp8_channel"].need.shapes
    assert shapes and all(plan.tiles("linear/fp8_channel", shape)[-1].max_tokens == ANY for shape in shapes)
    assert [tile_config.max_tokens for tile_config in plan.tiles("fused_moe")][-1] == ANY
    (decode,) = plan.tiles("decode_attention")
    assert decode.tiles == (plan.tile("decode_attention"),) and decode.candidates[1:]
    assert plan.tiles("rmsnorm") == (), "it takes no tile"
    biased = next((rows, cols, True) for rows, cols, bias in shapes if bias)
    behind_the_sum = plan.tiles("linear/fp8_channel", (*biased[:2], False))
    assert [tile_config.names for tile_config in behind_the_sum] == [
        tile_config.names for tile_config in plan.tiles("linear/fp8_channel", biased)
    ]
    with pytest.raises(KeyError):
        plan.tiles("linear/fp8_channel", (1, 2, False))


def test_the_log_says_where_tiles_come_from(
    plan_of: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(expert_tile_configs, "find", lambda *layer, **sizes: Found(None, ("a.json: too large",)))
    with caplog.at_level(logging.INFO):
        plan_of("glm47", tp_size=8).log()
    assert "fused_moe: tiles of no tuning file" in caplog.text
    (warning,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert warning == "MoE tuning file not used: a.json: too large"


def test_nothing_below_the_plan_asks_for_the_gpu() -> None:
    """Layers and kernels get what the plan decided."""
    below = [SRT / name for name in ("blocks", "layers", "models", "model_executor", "mem_cache", "sampling")]
    asking = [path for folder in below for path in folder.rglob("*.py") if "current_arch" in path.read_text()]
    assert asking == []
