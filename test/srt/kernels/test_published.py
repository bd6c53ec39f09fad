"""`explain` of every published config that is served: every op has a kernel, every tile is on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pairs import some

from sglang import explain
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.ledger_file import Ledger
from sglang.srt.kernels.spec import Choice, NoKernel
from sglang.srt.server_args import ServerArgs

from . import published

PACKAGES = frozenset({"triton"})
NATIVE = {
    "all_reduce": {"nccl"},
    "latent_absorb": {"cublas"},
    "prefill_attention": {"torch_flash"},
    # Small next to what they stand beside, and safe in CUDA graphs.
    "q_norm_rope": {"torch_native"},
    "value_norm": {"torch_native"},
    # Heads of keys and of values that differ in size (MiMo-V2).
    "qk_norm_rope_store/192x128": {"torch_native"},
}
"""Ops that Triton does not serve, or not always, and what does."""
SPILLS = {("fused_moe", "nvfp4_a16"): 72, ("fused_moe", "mxfp4"): 8}
"""Bytes, of one tile each under Triton 3.6 (sglang/ledger/rules.py)."""
OF_OTHERS = {"candidate_blocks": "sparse_indexer"}
"""Ops that launch the kernels of another one, which has the record."""
RECIPES = (
    ("glm47", 8, "rtx-pro-6000-server"),
    ("kimi_k25", 8, "rtx-pro-6000-server"),
    ("kimi_k26_nvfp4", 8, "rtx-pro-6000-server"),
    ("gpt_oss", 1, "rtx-pro-6000-server"),
    ("deepseek_v3", 8, "rtx-pro-6000-server"),
    ("deepseek_v31_nvfp4", 8, "rtx-pro-6000-server"),
    ("MiniMax-M2.7-NVFP4", 2, "rtx-pro-6000-server"),
    ("minimax_m3_nvfp4", 4, "rtx-pro-6000-server"),
    # Its attention is published in 16 bits: 29.3 GiB of weights leave one card no room.
    ("Gemma-4-31B-IT-NVFP4", 2, "rtx-5090"),
)
"""Layouts that people publish."""

FAMILIES_OF_2026 = {
    "qwen38_flash_next_nvfp4": ((2, 1), (4, 1)),
    "deepseek_v4": ((2, 1), (4, 1), (8, 1)),
    "DeepSeek-V4-Flash-FP8": ((4, 1), (8, 1)),
    "DeepSeek-V4-Flash-Vision-Exp": ((2, 1), (4, 1), (8, 1)),
    "DeepSeek-V4-Flash-NVFP4": ((2, 1), (4, 1), (8, 1)),
    "GLM-5.3-Flash-NVFP4": ((4, 1), (2, 3), (8, 1)),
    "Hy3-NVFP4": ((2, 1), (4, 1)),
    "Step-3.7-Flash-NVFP4": ((2, 1), (4, 1)),
    "minimax_m3_nvfp4": ((4, 1), (2, 3), (8, 1)),
    "MiMo-V2-Flash": ((2, 2), (2, 3), (8, 1)),
    "dots3-note-prev-fp8": ((4, 1), (4, 2)),
    "GLM-5.2-NVFP4": ((2, 3), (8, 1)),
    "DeepSeek-V3.2-NVFP4": ((2, 3), (8, 1)),
    "DeepSeek-V4.1-Flash": ((4, 1), (8, 1)),
    "kimi_k26_nvfp4": ((8, 1),),
}
"""Ranks of a stage and stages that owners of cards of 96 GB run, or would."""


def explained(path: str, tp_size: int, product: str, **flags: object) -> explain.Explanation | None:
    """None: such a model is not served, or not on so many ranks."""
    args = ServerArgs.from_kwargs(model_path=path, load_format="dummy", tp_size=tp_size, **flags)
    try:
        found = explain.explain(args, arch_by_name(product), PACKAGES, advises=False)
    except UserError:
        return None
    return None if found.not_implemented or found.refused else found


def check(found: explain.Explanation, product: str) -> None:
    arch, ledger = arch_by_name(product), Ledger.load()
    assert not found.missing, [str(outcome) for outcome in found.missing]
    for outcome in found.outcomes:
        assert isinstance(outcome, Choice) and not isinstance(outcome, NoKernel)
        need = outcome.need
        dims = f"/{need.head_dim}x{need.v_head_dim}" if need.head_dim != need.v_head_dim else ""
        native = NATIVE.get(need.op, set()) | NATIVE.get(f"{need.op}{dims}", set())
        assert outcome.name.startswith("triton") or outcome.name in native, (need.op, outcome.name)
        if outcome.tile is not None:
            assert ledger.record(need, outcome.tile, arch) == outcome.record, need.op
        if need.op in OF_OTHERS:
            assert OF_OTHERS[need.op] in {other.need.op for other in found.outcomes if isinstance(other, Choice)}
        elif outcome.name.startswith("triton"):
            assert outcome.record is not None and outcome.record.smem <= arch.smem_per_block, need.op
            latent_or_256 = need.head_dim in (256, 576) and need.op.endswith("_attention")
            if latent_or_256 or need.op == "fused_moe":
                of_drafts = 40 if need.op == "decode_attention" else 0  # accepted in sglang.ledger.rules
                most = SPILLS.get((need.op, need.quant), of_drafts)
                assert outcome.record.spills <= most, (need.op, need.describe())


def first_of_each_kind() -> set[str]:
    """Of each architecture and format of weights the first config."""
    first: dict[object, str] = {}
    for name, path in sorted(published.config_files().items()):
        config = json.loads(path.read_text())
        kind = (str(config.get("architectures")), config.get("model_type"), *weights_format(name, path, config))
        first.setdefault(kind, name)
    return set(first.values())


def weights_format(name: str, path: Path, config: dict[str, Any]) -> tuple[object, ...]:
    beside = path.with_name("hf_quant_config.json" if path.name == "config.json" else f"{name}.hf_quant_config.json")
    quantization = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    modelopt = json.loads(beside.read_text())["quantization"]["quant_algo"] if beside.exists() else None
    return (*(quantization.get(key) for key in ("quant_method", "quant_algo", "format", "bits")), modelopt)


@pytest.mark.parametrize("name", some(sorted(published.config_files()), quick=first_of_each_kind()))
def test_every_op_of_a_published_model_has_a_kernel(name: str, tmp_path: Path) -> None:
    """On one rank and on eight, where it is served there. What all of them launch has records: `test_census.py`."""
    path = str(published.checkpoint(name, tmp_path))
    for tp_size in (1, 8):
        found = explained(path, tp_size, "rtx-pro-6000-server")
        if found is not None:
            check(found, "rtx-pro-6000-server")


@pytest.mark.parametrize(("name", "tp_size", "product"), RECIPES)
def test_published_recipes_have_room(name: str, tp_size: int, product: str, tmp_path: Path) -> None:
    path = str(published.checkpoint(name, tmp_path))
    for cache in ("auto", "fp8_e4m3"):
        found = explained(path, tp_size, product, kv_cache_dtype=cache)
        assert found is not None and found.plan is not None, "not served"
        assert found.plan["max_total_num_tokens"] > 4_096
        check(found, product)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES_OF_2026)
def test_families_of_2026_have_room_on_the_cards_of_their_owners(name: str, tmp_path: Path) -> None:
    """And every kernel on the smaller ones too, whether or not the weights fit there."""
    path = str(published.checkpoint(name, tmp_path))
    for tp_size, pp_size in FAMILIES_OF_2026[name]:
        for product in ("rtx-pro-6000-server", "rtx-5090", "gb10"):
            # A machine with a GB10 has one.
            machines = {"nnodes": tp_size * pp_size, "dist_init_addr": "first:1"} if product == "gb10" else {}
            found = explained(path, tp_size, product, pp_size=pp_size, **machines)
            assert found is not None, (tp_size, pp_size, product)
            check(found, product)
            if product == "rtx-pro-6000-server":
                assert found.plan is not None and found.plan["max_total_num_tokens"] > 65_536, (tp_size, pp_size)


def test_glm_on_four_cards_has_room_with_small_steps(tmp_path: Path) -> None:
    flags = {"cuda_graph_max_bs": 16, "chunked_prefill_size": 2048, "max_running_requests": 32}
    path = str(published.checkpoint("glm47", tmp_path))
    found = explained(path, 4, "rtx-pro-6000-server", **flags)
    assert found is not None and found.plan is not None
    assert found.plan["max_total_num_tokens"] > 50_000
    check(found, "rtx-pro-6000-server")


def test_gemma_on_one_card_has_every_kernel(tmp_path: Path) -> None:
    found = explained(str(published.checkpoint("Gemma-4-31B-IT-NVFP4", tmp_path)), 1, "rtx-5090")
    assert found is not None
    check(found, "rtx-5090")
