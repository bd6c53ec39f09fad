"""Attention groups with requests of their own (--attn-dp-size) give the tokens of one process: the schedule of
`test_parallel_schedules`, for every kind of model, with and without graphs, few and many rows of logits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run_ranks

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import embedding
from sglang.srt.managers.scheduler import storage_control
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import StorageStats
from sglang.srt.mem_cache import host_tier
from sglang.srt.mem_cache.storage import prefix_names
from sglang.srt.model_executor.step import GroupSteps, StepInput, padding_prompt
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from srt.models.harness import save_tiny

from .fake_runner import Collector, add, assert_clean, request, run_to_end
from .test_parallel_schedules import CHUNK, NEW_TOKENS, PROMPTS, Outcome, outcome, play

DP2, DP4 = RankLayout(2, attn_dp_size=2), RankLayout(4, attn_dp_size=4)
TP4_DP2 = RankLayout(4, attn_dp_size=2)
DP2_HEAD, TP4_DP2_HEAD = RankLayout(2, attn_dp_size=2, dp_lm_head=True), RankLayout(4, attn_dp_size=2, dp_lm_head=True)
DP2_EP2 = RankLayout(2, 2, attn_dp_size=2)
DP2_PP2 = RankLayout(2, pp_size=2, attn_dp_size=2)
POOL = 80
"""Tokens of a group: too few for two of the requests, so that some go back to the queue."""


LAYOUTS = {
    "DP2": DP2,
    "DP4": DP4,
    "TP4 x DP2": TP4_DP2,
    "DP2, own heads": DP2_HEAD,
    "TP4 x DP2, own heads": TP4_DP2_HEAD,
    "DP2 x EP2": DP2_EP2,
    "TP4 x DP2 x EP2": RankLayout(4, 2, attn_dp_size=2),
    "DP4 x EP4": RankLayout(4, 4, attn_dp_size=4),
    "TP4 x DP2 x DCP2": RankLayout(4, dcp_size=2, attn_dp_size=2),
    "TP4 x DP2 x DCP2 x EP2, own heads": RankLayout(4, 2, dcp_size=2, attn_dp_size=2, dp_lm_head=True),
    "DP2 x PP2": DP2_PP2,
    "DP2 x PP2, own heads": RankLayout(2, pp_size=2, attn_dp_size=2, dp_lm_head=True),
    "DP2 x EP2 x PP2": RankLayout(2, 2, pp_size=2, attn_dp_size=2),
    "DP2 x PP3": RankLayout(2, pp_size=3, attn_dp_size=2),
    "DP4 x PP2": RankLayout(4, pp_size=2, attn_dp_size=4),
    "TP4 x DP2 x PP2": RankLayout(4, pp_size=2, attn_dp_size=2),
    "TP4 x DP2 x DCP2 x PP2": RankLayout(4, pp_size=2, dcp_size=2, attn_dp_size=2),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "experts": ("qwen3_moe", {}),
    "latents": ("deepseek_v3", {}),
    "selected latents": ("deepseek_v32", {}),
    "blocks": ("minimax_m3", {}),
    "windows": ("qwen3_windows", {}),
    "chunks": ("llama4", {}),
    "convolutions": ("inkling", {}),
    "states": ("qwen3_next", {"tie_word_embeddings": True}),
    "biases": ("gpt_oss", {}),
    "embedded": ("", {}),
    "delta attention": ("kimi_linear", {}),
    "scans": ("nemotron_h_latent", {}),
    "branches": ("gemma4_moe", {}),
    "compressed": ("deepseek_v4", {}),
    "gates": ("step3p7", {}),
    "inputs of layers": ("gemma4_small", {}),
    "n-grams": ("qwen4_exp", {}),
    "pooled latents": ("glm5_next", {}),
    "KV head": ("qwen3", {"num_key_value_heads": 1}),
    "states, KV head": ("qwen3_next", {"num_key_value_heads": 1}),
    "biases, KV head": ("gpt_oss", {"num_key_value_heads": 1}),
    "windows, KV head": ("qwen3_windows", {"num_key_value_heads": 1}),
}
FOUR_PARTS: dict[str, dict[str, Any]] = {
    **{name: {"linear_num_key_heads": 4} for name in ("states", "states, KV head", "n-grams")},
    "compressed": {"o_groups": 4},
}
"""What differs in models that four ranks could not share otherwise."""


def save_models(names: Iterable[str], ranks: RankLayout, folder: Path) -> dict[str, str]:
    """Returns where these of MODELS are, whose attention the ranks can share."""
    folders = {}
    for name in names:
        tiny, changes = MODELS[name]
        parts = FOUR_PARTS.get(name, {}) if ranks.attn_tp_size == 4 else {}
        folders[name] = str(folder / name if tiny else DEFAULT_MODEL_PATH)
        if tiny:
            save_tiny(tiny, Path(folders[name]), **changes, **parts)
    return folders


POOLS = {"compressed": 112, "n-grams": 112, "pooled latents": 112}
"""Pools of models with large pages, of which a request has two at least."""
WITH_STATES = ("states", "delta attention", "scans", "compressed", "n-grams", "pooled latents", "convolutions")
WITH_EXPERTS = ("experts", "latents", "selected latents", "blocks", "states", "biases", "delta attention")
ALIKE_ON_RANKS = ("latents", "selected latents", "delta attention", *(name for name in MODELS if "KV head" in name))
"""Models of which ranks that share heads would hold the same cache, so that they can share out its tokens."""


FEW = ("dense", "experts", "latents", "selected latents", "states")
"""Models of layouts of eight ranks."""
WITHOUT_STAGES = ("inputs of layers",)


def _models_of(ranks: RankLayout) -> tuple[str, ...]:
    names: Iterable[str] = ALIKE_ON_RANKS if ranks.dcp_size > 1 else MODELS
    if ranks.world_size > 6:
        names = [name for name in names if name in (*FEW, "states, KV head")]
    names = [name for name in names if ranks.ep_size == 1 or name.partition(",")[0] in WITH_EXPERTS]
    return tuple(name for name in names if ranks.pp_size == 1 or name not in WITHOUT_STAGES)


CELLS = [(layout, name) for layout, ranks in LAYOUTS.items() for name in _models_of(ranks)]
QUICK = ("DP2", "latents")
"""The one that is not thorough."""


def _play_without_agreement(scheduler: Scheduler | AttentionGroups) -> Outcome:
    """The schedule; beside what layers exchange, and the tokens, no rank tells another anything."""

    def refuse(*_: object) -> None:
        raise AssertionError("ranks agree on a step by a message of its own")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast_bytes", "min_over_ranks", "all_reduce_min", "all_ranks_agree", "wait_for_all_ranks"):
            patch.setattr(parallel_state, name, refuse)
        return play(scheduler)


def _rank(rank: int, ranks: RankLayout, folders: dict[str, str], out: Path, flags: dict[str, Any]) -> None:
    """Once without graphs, once with; then steps of two rows and more leave the ranks their columns of the logits."""
    torch.set_num_threads(1)
    for name, folder in folders.items():
        for graphs in (False, True):
            replayed = set[int]() if graphs else None
            embedding.FEWEST_SHARDED_ROWS = 2 if graphs else 16
            more = {**flags, "max_total_tokens": POOLS.get(name, POOL)}
            meeting = f"file://{out}/rendezvous.{name}.{graphs}"
            result = outcome(folder, ranks, rank, meeting, replayed, schedule=_play_without_agreement, **more)
            (out / f"{name}.{graphs}.{rank}.json").write_text(json.dumps(result.__dict__))
            parallel_state.shutdown()
            assert not graphs or replayed, "steps had graphs"


def check(ranks: RankLayout, names: tuple[str, ...], tmp_path: Path) -> None:
    folders, groups = save_models(names, ranks, tmp_path), ranks.attn_dp_size
    alone = {name: outcome(folder, ONE_RANK, 0, None) for name, folder in folders.items()}
    flags: dict[str, Any] = {"chunked_prefill_size": CHUNK * groups, "max_running_requests": 4 * groups}
    flags["prefill_decode_interval"] = 1
    if ranks.dcp_size > 1:  # not pages of 16, as with states, of which so small a pool has too few for a request
        flags["page_size"] = ranks.dcp_size
    run_ranks(_rank, (ranks, folders, tmp_path, flags), ranks.world_size)
    for name, one in alone.items():
        for graphs in (False, True):
            files = [tmp_path / f"{name}.{graphs}.{rank}.json" for rank in range(ranks.world_size)]
            every = [Outcome(**json.loads(file.read_text())) for file in files]
            for rank, got in enumerate(every):
                _compare(got, one, every[0], groups, f"{name}, {graphs=}, rank {rank}")


def _compare(got: Outcome, one: Outcome, of_first_rank: Outcome, groups: int, where: str) -> None:
    """All ranks know the outcome of all groups. With four groups, and where prompts pause for their states, there is
    room for all requests."""
    assert got == of_first_rank, where
    assert got.finishes == one.finishes, where
    assert got.num_cached > 0, where
    assert got.num_retracted > 0 or groups > 2 or where.startswith(WITH_STATES), where
    aborted, other = got.tokens["aborted"], one.tokens["aborted"]
    assert aborted and aborted[: len(other)] == other[: len(aborted)] and len(aborted) < NEW_TOKENS, where
    assert {**got.tokens, "aborted": other} == one.tokens, where


@pytest.mark.parametrize(
    ("layout", "name"), [pytest.param(*cell, marks=[pytest.mark.thorough] * (cell != QUICK)) for cell in CELLS]
)
def test_groups_give_the_tokens_of_one_process(layout: str, name: str, tmp_path: Path) -> None:
    check(LAYOUTS[layout], (name,), tmp_path)


def test_nothing_is_sampled_of_a_group_without_work() -> None:
    decode = StepInput(np.array([3, 4]), np.array([5, 2], np.int32), np.zeros(2, np.int32))
    steps = GroupSteps.of([None, decode, padding_prompt(7, 0, draft_tokens=False)])
    assert (steps.num_requests, steps.num_sampled) == ([0, 2, 1], [0, 2, 1])
    assert (steps.num_tokens, steps.num_prompts, steps.num_decodes) == ([1, 2, 7], 1, 2)


HOST_MODELS = ("dense", "latents", "selected latents", "windows", "states", "compressed")
SHARED_OUT_HOST_MODELS = ("latents", "selected latents", "KV head", "states, KV head", "windows, KV head")
HOST_FLAGS = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_write_policy": "write_through"}


STORE_FLAGS = HOST_FLAGS | {
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1}',
}


def _play_again(scheduler: Scheduler | AttentionGroups) -> Outcome:
    """The schedule; then the same prompts once more, whose prefixes have left the GPU and return from main memory, or
    have left that too and return from a store."""
    assert isinstance(scheduler, AttentionGroups)
    first = play(scheduler)
    stored = scheduler.runner.storage is not None
    for group in scheduler.schedulers:
        group.kv.tree.evict(1000)
        if stored:
            assert group.host_tier is not None
            group.host_tier.host.tree.evict(1000)
    collector, again = Collector(), ("plain", "penalized", "same prefix")
    for rid in again:
        params = {"frequency_penalty": 1.5, "repetition_penalty": 1.3} if rid == "penalized" else {}
        add(scheduler, request(f"{rid} again", PROMPTS[rid], NEW_TOKENS, ignore_eos=True, temperature=0.0, **params))
    run_to_end(scheduler, collector)
    assert {rid: collector.tokens[f"{rid} again"] for rid in again} == {rid: first.tokens[rid] for rid in again}
    tiers = scheduler.host_tiers
    assert len(tiers) == len(scheduler.schedulers)
    assert sum(tier.counts.loaded_tokens for tier in tiers) > 0
    assert not any(tier.counts.failed_copies for tier in tiers)
    stats = scheduler.stats.snapshot().host_cache
    assert stats is not None and stats.load_back_tokens == sum(tier.counts.loaded_tokens for tier in tiers)
    if stored:
        _check_store(scheduler, stats.storage)
    for group, tier in zip(scheduler.schedulers, tiers, strict=True):
        assert_clean(group)
        tier.check()
    return first


def _check_store(scheduler: AttentionGroups, stats: StorageStats | None) -> None:
    """Every rank knows what was moved for all groups, and has a store for its own."""
    counts = [tier.storage.counts for tier in scheduler.host_tiers if tier.storage is not None]
    assert len(counts) == len(scheduler.schedulers) and sum(count.read_tokens for count in counts) > 0
    assert stats is not None and stats.prefetched_tokens == sum(count.read_tokens for count in counts)
    assert 0 < stats.backuped_tokens < 10_000 and 0 < stats.backuped_bytes < 1 << 30 and not stats.storage_failures
    assert storage_control.detach(scheduler) == "" and not any(tier.storage for tier in scheduler.host_tiers)
    again = {"backend": "file", "prefetch_policy": None, "extra": None, "write_policy": None}
    assert storage_control.attach(scheduler, again) == "" and all(tier.storage for tier in scheduler.host_tiers)


def _host_rank(rank: int, ranks: RankLayout, folders: dict[str, str], out: Path, flags: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    host_tier.MIN_GAIN, prefix_names.MIN_BLOCK = 1, 8
    for name, folder in folders.items():
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = f"{out}/store.{name}"
        more = {**flags, "max_total_tokens": POOLS.get(name, POOL)}
        result = outcome(folder, ranks, rank, f"file://{out}/rendezvous.{name}", schedule=_play_again, **more)
        (out / f"{name}.{rank}.json").write_text(json.dumps(result.__dict__))
        parallel_state.shutdown()


HOST_CELLS = [
    (layout, flags)
    for layout in ("DP2", "TP4 x DP2, own heads", "DP2 x PP2", "TP4 x DP2 x DCP2")
    for flags in ("main memory", "store")
]


@pytest.mark.thorough
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("layout", "where"), HOST_CELLS)
def test_prefixes_of_groups_return(layout: str, where: str, tmp_path: Path) -> None:
    """Each group keeps its own; ranks of other groups know what was copied, and copy nothing."""
    ranks = LAYOUTS[layout]
    names = HOST_MODELS if ranks.dcp_size == 1 else SHARED_OUT_HOST_MODELS
    folders = save_models(names, ranks, tmp_path)
    flags: dict[str, Any] = {
        "chunked_prefill_size": CHUNK * ranks.attn_dp_size,
        "max_running_requests": 4 * ranks.attn_dp_size,
        **(STORE_FLAGS if where == "store" else HOST_FLAGS),
        **({"page_size": ranks.dcp_size} if ranks.dcp_size > 1 else {}),
    }
    run_ranks(_host_rank, (ranks, folders, tmp_path, flags), ranks.world_size)
    for name, folder in folders.items():
        one = outcome(folder, ONE_RANK, 0, None)
        every = [Outcome(**json.loads((tmp_path / f"{name}.{r}.json").read_text())) for r in range(ranks.world_size)]
        for rank, got in enumerate(every):
            _compare(got, one, every[0], ranks.attn_dp_size, f"{name}, rank {rank}")
