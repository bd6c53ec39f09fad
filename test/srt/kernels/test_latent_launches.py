"""Whole steps of models of latent attention, as a GPU of 101,376 bytes would launch them: every launch has a row in the
ledger. Nothing is computed: the tensors have no memory, and the recorder stands in for Triton."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from sglang.ledger.coverage import coverage
from sglang.ledger.launch_form import Launches, recording
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import groups_of
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.layers.attention.cache_scale import LayerCacheScales
from sglang.srt.layers.attention.sites import create_attention_sites
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, TokenSlots
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.caches import cache_groups
from sglang.srt.plan.model_planner import parallel_config_of
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.pool_sizes import PoolSizes
from sglang.srt.server_args import ServerArgs
from srt.distributed.partial_sums import NoAllReduce

CONFIGS = Path(__file__).parent / "configs"
CONTEXT = 8192
PROMPTS = {"alone": ([100], [0]), "over prefixes": ([100, 300], [0, 200]), "short": ([5], [5000])}
"""New tokens and cached ones of each request."""


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def model_on_meta(plan: Plan, args: ServerArgs) -> CausalLM:
    model = CausalLM(plan, device="meta")
    for step in model.finish:
        if step.__name__ != LayerCacheScales.take.__name__:  # which reads a number
            step()
    groups = cache_groups(plan.description, parallel_config_of(args, plan.model.dtype, plan.description))
    CachePools(groups, PoolSizes(65_535, 1, 64, CONTEXT), "meta").bind(model.caches)
    return model


def batches() -> dict[str, ForwardBatch]:
    def tokens(count: int) -> ForwardBatch:
        slots = TokenSlots(empty(65, CONTEXT, dtype=torch.int32), empty(count))
        return ForwardBatch(empty(count), empty(count), (slots,))

    made: dict[str, ForwardBatch] = {}
    for size in (1, 8):
        batch = made[f"decode {size}"] = tokens(size)
        batch.decode = DecodeRows(empty(size), empty(size, dtype=torch.int32), batch.token_slots)
    for name, (new, cached) in PROMPTS.items():
        batch = made[name] = tokens(sum(new))
        lens = empty(len(new), dtype=torch.int32)
        batch.extend = ExtendRows(
            empty(len(new)), lens, lens, empty(len(new) + 1, dtype=torch.int32), batch.token_slots, new, cached,
            [sum(pair) for pair in zip(new, cached, strict=True)],
        )  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("name", "num_layers", "cache"),
    [("deepseek_v3", 4, "fp8_e4m3"), ("deepseek_v3", 4, "fp4_e2m1"), ("kimi_k25", 2, "auto")],
)
def test_every_launch_of_a_step_is_on_record(
    name: str, num_layers: int, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config.get("text_config", config)["num_hidden_layers"] = num_layers
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ServerArgs.from_kwargs(
        model_path=str(tmp_path), load_format="dummy", tp_size=8, kv_cache_dtype=cache, disable_cuda_graph=True
    )
    arch = arch_by_name("rtx-pro-6000-server")
    plan = make_plan(args, ModelConfig.from_server_args(args), arch, 90 << 30, frozenset({"triton"}))
    groups = groups_of(plan.ranks, 0)
    groups.tp.reduce_with(NoAllReduce())
    monkeypatch.setattr(parallel_state, "groups", lambda: groups)
    monkeypatch.setattr(groups.tp, "all_gather", lambda x: x)
    ways: dict[str, object] = {}
    forms: Launches
    with torch.inference_mode(), recording("sm_120") as forms:
        model = model_on_meta(plan, args)
        attention = create_attention_sites(plan, "meta")
        for step, batch in batches().items():
            batch.metadata = attention.metadata(batch)
            model.logits(model(batch))
            (site,) = batch.metadata.values()
            ways[step] = site.latent_chunks
    assert ways["decode 8"] is None and ways["short"] is None and ways["alone"] == ()
    assert [len(chunk.slots) for chunk in ways["over prefixes"]] == [200]
    kernels = {form.kernel for form in forms}
    gather = "gather_records_kernel" if cache == "fp4_e2m1" else "gather_latents_kernel"
    assert {"latent_prompt.latent_prompt_kernel", f"latent_prompt.{gather}"} <= kernels
    uncovered = coverage("sm120").uncovered(forms)
    assert not uncovered, "\n".join(uncovered[:10])
