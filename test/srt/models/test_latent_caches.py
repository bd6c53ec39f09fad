"""Models whose latents, entries and keys of indexers are in eight or in four bits: what the layers store and read, and
how far answers are from those over a wider cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.blocks.mla.layer import LatentAttention
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.layers.native_latent_records import pack_records, unpack_records
from sglang.srt.layers.packed_entries import PackedKeys, PackedRecords
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.plan.latent_record import LatentRecord, latent_record

from .harness import NativePlan, TinyRunner, blocks_of, plan_for, random_tokens, save_tiny
from .v41_reference import save_v41

LENGTH = 70
EXACT = {"rtol": 0.0, "atol": 2e-4}
BITS = {"fp8_e4m3": 8, "fp4_e2m1": 4}
SAVED: dict[str, Callable[[Path], Any]] = {
    "V4": lambda folder: save_tiny("deepseek_v4", folder, index_topk=64),
    "V4.1": lambda folder: save_v41(folder, index_topk=128, candidate_source_layer_id=-1),
    "GLM-5.3-Flash": lambda folder: save_tiny("glm5_next", folder, index_topk=128),
}
"""Whose indexers leave nothing out: keys decide nothing."""
LATENTS = ("kv", "compressed", "latent")


class RoundingRecords(PackedRecords):
    """Stores in a wide cache what records stand for."""

    def __call__(self, rows: torch.Tensor, cache: CacheStore, slots: torch.Tensor) -> None:
        there = slots >= 0
        cache.k[slots[there], 0] = unpack_records(pack_records(rows[there, 0], self.record), self.record)


def rounding(plan: NativePlan, kv_dtype: str) -> TinyRunner:
    runner = TinyRunner(plan)
    mixers: list[Any] = [block for layer in runner.model.layers for _, block in layer.blocks]
    for mixer in mixers:
        if not hasattr(mixer, "record"):
            continue
        rank = getattr(mixer.spec, "kv_lora_rank", 0)
        record = latent_record(kv_dtype, rank, 0) if rank else mixer.spec.record(kv_dtype)
        assert record is not None
        packing = RoundingRecords(plan, record)
        for part in (mixer, getattr(mixer, "compressor", None), getattr(mixer, "maker", None)):
            for owner in (part, getattr(part, "store", None)):
                if hasattr(owner, "packing"):
                    owner.packing = packing
    return runner


def steps(runner: TinyRunner) -> torch.Tensor:
    """Logits of a prompt in three pieces, and of decoded tokens."""
    tokens = random_tokens(LENGTH, seed=1)
    parts = [runner.extend({1: part})[0] for part in (tokens[:30], tokens[30:33], tokens[33:60])]
    return torch.cat([*parts, *(runner.decode({1: token}) for token in tokens[60:])])


def median_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())


@pytest.mark.parametrize("kv_dtype", BITS)
@pytest.mark.parametrize("name", SAVED)
def test_layers_read_what_they_store(name: str, kv_dtype: str, tmp_path: Path) -> None:
    SAVED[name](tmp_path)
    runner, wide = TinyRunner(plan_for(tmp_path, kv_cache_dtype=kv_dtype)), TinyRunner(plan_for(tmp_path))
    latents = [store for store in runner.model.caches if store.name in LATENTS]
    assert {store.k.dtype for store in latents} == {torch.uint8}
    keys = [store for store in runner.model.caches if store.name == "index"]
    assert {(store.k.dtype, store["scale"].dtype) for store in keys} == {(torch.float8_e4m3fn, torch.float32)}
    got, want = steps(runner), steps(wide)
    assert 0 < median_error(got, want) < {8: 0.1, 4: 0.35}[BITS[kv_dtype]]
    torch.testing.assert_close(got, steps(rounding(plan_for(tmp_path), kv_dtype)), **EXACT)


MLA_KINDS = {"V3": "deepseek_v3", "V3.2": "deepseek_v32", "GLM-5": "glm_moe_dsa", "Kimi Linear": "kimi_linear"}


def rounding_mla(runner: TinyRunner) -> TinyRunner:
    """Whose cache of latents holds what records stand for, read as those are."""
    mixers: list[Any] = [block for layer in runner.model.layers for _, block in layer.blocks]
    for mixer in mixers:
        if not isinstance(mixer, LatentAttention):
            continue
        record = mixer.spec.record("fp4_e2m1")
        assert record is not None

        def store(*args: Any, original: Any = mixer.store, record: LatentRecord = record) -> torch.Tensor:
            entries, cache, loc = original(*args), args[7], args[8]
            rounded = unpack_records(pack_records(entries, record), record)
            cache[loc, 0] = rounded
            return rounded  # on a CPU new tokens see each other as they are stored

        mixer.store = store
    for site in runner.attention.sparse.values():
        site.packed = True
    return runner


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", MLA_KINDS)
def test_latents_in_four_bits(name: str, expand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding, and prompts over cached latents that read them as they are or expanded."""
    monkeypatch.setattr(MLA, "expanding_pays", lambda *_: expand)
    save_tiny(MLA_KINDS[name], tmp_path, **({} if name in ("V3", "Kimi Linear") else {"index_topk": 128}))
    plan = plan_for(tmp_path, kv_cache_dtype="fp4_e2m1")
    runner = TinyRunner(plan)
    assert {store.k.dtype for store in runner.model.caches if store.name == "latent"} == {torch.uint8}
    got, wide = steps(runner), steps(TinyRunner(plan_for(tmp_path)))
    assert 0 < median_error(got, wide) < 0.35
    want = steps(rounding_mla(TinyRunner(plan_for(tmp_path))))
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("name", SAVED)
def test_keys_of_one_byte_select_nearly_the_same(name: str, tmp_path: Path) -> None:
    """Also where an indexer chooses runs of entries first."""
    if name == "V4.1":
        save_v41(tmp_path)
    else:
        save_tiny({"V4": "deepseek_v4", "GLM-5.3-Flash": "glm5_next"}[name], tmp_path)
    got, want = (steps(TinyRunner(plan_for(tmp_path, kv_cache_dtype=dtype))) for dtype in ("fp8_e4m3", "auto"))
    assert 0 < median_error(got, want) < 0.15


def test_selected_blocks_in_eight_bits(tmp_path: Path) -> None:
    save_tiny("qwen4_exp", tmp_path)
    plan = plan_for(tmp_path, kv_cache_dtype="fp8_e4m3")
    runner = TinyRunner(plan)
    kinds = {(store.name, store.k.dtype) for store in runner.model.caches if store.name in ("kv", "index")}
    assert kinds == {("kv", torch.float8_e4m3fn), ("index", torch.float8_e4m3fn)}
    assert 0 < median_error(steps(runner), steps(TinyRunner(plan_for(tmp_path)))) < 0.15


def test_what_is_packed_has_packings_of_its_own(tmp_path: Path) -> None:
    save_tiny("deepseek_v4", tmp_path)
    runner = TinyRunner(plan_for(tmp_path, kv_cache_dtype="fp8_e4m3"))
    mixers = [blocks_of(layer)[0] for layer in runner.model.layers]
    assert all(isinstance(mixer.packing, PackedRecords) for mixer in mixers)
    assert any(isinstance(m.indexer.compressor.store.packing, PackedKeys) for m in mixers if m.indexer is not None)
