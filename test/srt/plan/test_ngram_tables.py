"""Tables of n-grams in the plan: which memory they are in, by flags and by room, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.plan.host_tables import host_table_bytes
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.memory import GIB
from sglang.srt.plan.model_description import describe_model
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weight_spec import Elements
from sglang.srt.server_args import ServerArgs
from srt.kernels import published

TABLE = 128 * 2_500_012 * 160
"""Bytes of the whole table in FP8, with its padding."""


def build(folder: Path, gpu: str, available: float, **flags: Any) -> Plan:
    path = published.any_checkpoint("qwen38_flash_next_nvfp4", folder)
    args = ServerArgs.from_kwargs(model_path=str(path), **flags)
    model = ModelConfig.from_server_args(args)
    return make_plan(args, model, arch_by_name(gpu), int(available * GIB), frozenset({"triton"}), advises=False)


def on_host(plan: Plan) -> int:
    return host_table_bytes(
        plan.description, ParallelConfig(plan.dtype, plan.kv_cache_dtype, ranks=RankLayout(plan.ranks.tp_size))
    )


@pytest.mark.parametrize(
    ("flags", "hosted"),
    [
        ({"tp_size": 2}, False),
        ({"tp_size": 1}, True),
        ({"tp_size": 2, "ple_offload_embedding": True}, True),
    ],
)
def test_where_a_table_is(flags: dict[str, Any], hosted: bool, tmp_path: Path) -> None:
    plan = build(tmp_path, "rtx-pro-6000-server", 92.7, **flags)
    share = TABLE / flags["tp_size"]
    assert on_host(plan) == pytest.approx(share if hosted else 0, rel=1e-5)
    # The other weights are 145.7 GB over all GPUs, less what each rank has whole.
    assert (plan.memory.weights > 60 * GIB) is (flags["tp_size"] == 1 or not hosted)
    notes = [note for note in plan.warnings if "pinned host memory" in note]
    assert len(notes) == hosted and all(f"{share / GIB:.2f} GiB" in note for note in notes)


def test_a_table_that_must_not_leave_the_gpu(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the weights take 121.* GiB a GPU, and 92"):
        build(tmp_path, "rtx-pro-6000-server", 92.7, no_ple_offload_embedding=True)
    with pytest.raises(UserError, match="contradict each other"):
        build(tmp_path, "rtx-pro-6000-server", 92.7, no_ple_offload_embedding=True, ple_offload_embedding=True)


def test_memory_that_host_and_gpu_share(tmp_path: Path) -> None:
    """Nothing is gained there, and the table is counted wherever it is."""
    with pytest.raises(UserError, match="the weights take"):
        build(tmp_path, "gb10", 117.0)
    device = build(tmp_path, "gb10", 117.0, tp_size=2, nnodes=2, dist_init_addr="10.0.0.1:5000")
    host = build(
        tmp_path, "gb10", 117.0, tp_size=2, nnodes=2, dist_init_addr="10.0.0.1:5000", ple_offload_embedding=True
    )
    moved = device.memory.weights - host.memory.weights
    assert moved == pytest.approx(TABLE / 2, rel=1e-5)
    assert host.memory.reserve - device.memory.reserve == moved


@pytest.mark.parametrize("name", ["qwen38_flash_next_nvfp4", "DeepSeek-V4.1-Flash"])
def test_the_ranks_of_an_attention_group_divide_a_table(name: str, tmp_path: Path) -> None:
    """As they do where they hold it: each group has all of it."""
    config = json.loads((published.any_checkpoint(name, tmp_path / "model") / "config.json").read_text())
    model = describe_model(config, None)
    tables = [layer.ngrams for layer in model.layers if isinstance(layer.ngrams, NgramEmbedding)]
    assert tables
    for table in tables:
        on_gpu = replace(table, on_host=False)
        parts = on_gpu.weights(model.hidden_size, RankLayout(4, attn_dp_size=2), 0)
        assert [part.count for part in parts if isinstance(part, Elements)][-1] == on_gpu.table_elements(2)
