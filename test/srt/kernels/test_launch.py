from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.kernels import launch
from sglang.srt.kernels.launch import FallbackTiles, step_downs
from sglang.srt.kernels.spec import Tile

BIG, MIDDLE, SMALL = ({"BLOCK_M": m, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2} for m in (128, 64, 32))
MODULE = "sglang.srt.kernels.tiles"


class OutOfResources(Exception):
    """Named as Triton's."""


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_step_downs", [])
    monkeypatch.setattr(launch, "_in_use", {})
    return tmp_path


class PTXASError(Exception):
    """Named as Triton's."""


class Gpu:
    """Launches tiles of at most `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.tried: list[int] = []

    def __call__(self, tile: Tile) -> int:
        self.tried.append(tile["BLOCK_M"])
        if tile["BLOCK_M"] > self.rows:
            raise OutOfResources("Required: 147456, Hardware limit: 101376")
        return tile["BLOCK_M"]


def fallbacks(op: str = "extend_attention") -> FallbackTiles:
    return FallbackTiles(op, (BIG, MIDDLE, SMALL), MODULE)


def test_a_launch_that_works_changes_nothing(fresh: Path) -> None:
    steps = fallbacks()
    assert steps.run(Gpu(128)) == 128
    assert step_downs() == [] and not list(fresh.iterdir())


def test_steps_down_until_it_launches_and_stays_there(caplog: pytest.LogCaptureFixture) -> None:
    gpu, steps = Gpu(32), fallbacks()
    with caplog.at_level(logging.WARNING):
        assert [steps.run(gpu) for _ in range(3)] == [32, 32, 32]
    assert gpu.tried == [128, 64, 32, 32, 32]
    assert [r.message for r in caplog.records] == [
        "extend_attention: tile M128 N32 w4 s2 does not launch (Required: 147456, Hardware limit: 101376);"
        " using tile M64 N32 w4 s2 from now on",
        "extend_attention: tile M64 N32 w4 s2 does not launch (Required: 147456, Hardware limit: 101376);"
        " using tile M32 N32 w4 s2 from now on",
    ]
    assert [s["used"] for s in step_downs()] == ["M64 N32 w4 s2", "M32 N32 w4 s2"]


def test_a_later_process_starts_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fallbacks().run(Gpu(64))
    monkeypatch.setattr(launch, "_step_downs", [])
    gpu = Gpu(64)
    assert fallbacks().run(gpu) == 64 and gpu.tried == [64]
    assert step_downs()[0]["failed"] == "M128 N32 w4 s2"


def test_what_is_remembered_belongs_to_one_op_kernel_gpu_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    fallbacks().run(Gpu(64))
    assert fallbacks("decode_attention").tile == BIG
    assert FallbackTiles("extend_attention", (BIG, SMALL), "sglang.srt.kernels.spec").tile == BIG
    monkeypatch.setattr(launch, "device_name", lambda: "another GPU")
    launch._cache_key.cache_clear()
    assert fallbacks().tile == BIG
    launch._cache_key.cache_clear()


def test_ladders_of_one_op_do_not_take_over_each_others_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles for many rows step down to those for few, which are tiles of a list of fallback tiles of their own."""
    fallbacks().run(Gpu(64))  # BIG -> MIDDLE
    other = BIG | {"num_stages": 4}
    assert FallbackTiles("extend_attention", (other, BIG, MIDDLE, SMALL), MODULE).tile == other
    assert FallbackTiles("extend_attention", (MIDDLE, SMALL), MODULE).tile == MIDDLE
    fallbacks().run(Gpu(32))  # MIDDLE -> SMALL
    for tiles in ((BIG, MIDDLE, SMALL), (MIDDLE, SMALL)):
        gpu = Gpu(32)
        assert FallbackTiles("extend_attention", tiles, MODULE).run(gpu) == 32 and gpu.tried == [32]
    assert len(step_downs()) == 2, "each is reported once"


def test_what_is_remembered_belongs_to_all_modules_of_a_kernel() -> None:
    both = (MODULE, "sglang.srt.kernels.spec")
    FallbackTiles("op", (BIG, SMALL), *both).run(Gpu(32))
    assert FallbackTiles("op", (BIG, SMALL), *both).tile == SMALL
    assert FallbackTiles("op", (BIG, SMALL), MODULE).tile == BIG


NUM_RANKS, NUM_OPS = 4, 25


def remember_many(rank: int) -> None:
    """As a rank of which many ops step down: some of its own, and one that every rank remembers."""
    for number in range(NUM_OPS):
        launch._remember("kernels", launch.StepDown(f"op {number} of rank {rank}", "big", "small", "no room"))
        launch._remember("kernels", launch.StepDown("shared op", "big", "small", "no room"))


def test_ranks_that_step_down_together_lose_nothing(fresh: Path) -> None:
    ranks = [multiprocessing.get_context("fork").Process(target=remember_many, args=(r,)) for r in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    ops = [step["op"] for step in json.loads((fresh / "step_downs.json").read_text())["kernels"]]
    expected = {f"op {number} of rank {rank}" for number in range(NUM_OPS) for rank in range(NUM_RANKS)}
    assert sorted(ops) == sorted({"shared op", *expected})


def test_tiles_may_be_of_any_type() -> None:
    steps = FallbackTiles("op", ((BIG, BIG), (SMALL, SMALL)), MODULE, key=lambda pair: f"pair of {pair[0]['BLOCK_M']}")
    assert steps.run(lambda pair: Gpu(32)(pair[1])) == 32
    assert (step_downs()[0]["failed"], step_downs()[0]["used"]) == ("pair of 128", "pair of 32")


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(fresh / "file"))
    assert fallbacks().run(Gpu(64)) == 64
    assert "not remembered for later processes" in caplog.text and len(step_downs()) == 1


@pytest.mark.parametrize("code", [-9, 137])
def test_a_compiler_that_was_killed_says_nothing_of_the_tile_to_later_processes(code: int, fresh: Path) -> None:
    def attempt(tile: Tile) -> int:
        if tile == BIG:
            raise PTXASError(f"`ptxas` failed with error code {code}\n`ptxas` stderr:\n")
        return tile["BLOCK_M"]

    assert fallbacks().run(attempt) == 64
    assert [step["used"] for step in step_downs()] == ["M64 N32 w4 s2"], "this process goes on with it"
    assert not list(fresh.iterdir())
    assert fallbacks().tile == BIG


def test_the_tiles_in_use_are_told_by_op_and_first_tile() -> None:
    assert launch.tiles_in_use() == {}
    fallbacks("decode_attention").run(Gpu(128))
    fallbacks().run(Gpu(64))
    fallbacks().run(Gpu(64))
    assert launch.tiles_in_use() == {
        "decode_attention, planned with tile M128 N32 w4 s2": "M128 N32 w4 s2",
        "extend_attention, planned with tile M128 N32 w4 s2": "M64 N32 w4 s2",
    }


def test_no_tile_left_raises_the_launch_error() -> None:
    with pytest.raises(OutOfResources, match="101376"):
        fallbacks().run(Gpu(16))


def test_other_errors_are_not_swallowed() -> None:
    def broken(tile: Tile) -> None:
        raise ValueError("a bug")

    steps = fallbacks()
    with pytest.raises(ValueError, match="a bug"):
        steps.run(broken)
    assert steps.tile == BIG


def test_a_damaged_cache_file_is_ignored_loudly(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    (fresh / "step_downs.json").write_text("{")
    assert fallbacks().tile == BIG
    assert "not valid JSON" in caplog.text


def test_it_knows_tritons_errors() -> None:
    """A tile of a tuning file that is on no record may also be one that does not compile."""
    errors = pytest.importorskip("triton.runtime.errors")
    compiler_errors = pytest.importorskip("triton.compiler.errors")
    refused = (
        errors.OutOfResources(147456, 101376, "shared memory"),
        errors.PTXASError("too much shared data"),
        compiler_errors.CompilationError("", None, "shapes do not fit"),
    )
    for error in refused:
        steps = fallbacks()

        def attempt(tile: Tile, error: Exception = error) -> int:
            if tile == BIG:
                raise error
            return tile["BLOCK_M"]

        assert steps.run(attempt) == MIDDLE["BLOCK_M"]
        launch._cache_file().unlink()


def test_the_attention_backend_heals_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode step down on their own; the decode workspace follows the tile."""
    pytest.importorskip("triton")
    import torch

    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.layers.attention.call_site import Attention
    from sglang.srt.layers.attention.triton_ops.decode_workspace import DecodePlan
    from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, TokenSlots
    from sglang.srt.mem_cache.memory_pool import CacheStore

    small_extend = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    big_decode = {"BLOCK_H": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "ctas_per_sm": 2, "waves": 4}
    small_decode = big_decode | {"BLOCK_N": 32, "num_stages": 2, "ctas_per_sm": 4}
    fallbacks = {"extend_attention": (BIG, small_extend), "decode_attention": (big_decode, small_decode)}
    cache = CacheStore(0, "kv")
    layer = Attention(cache, 4, 2, 64, 0.125)
    plan = SimpleNamespace(
        fallbacks=lambda op: FallbackTiles(op, fallbacks[op], MODULE),
        attention_shapes=(layer.site.shape,),
        attention_op=lambda op, shape: op,
        arch=SimpleNamespace(num_sms=8),
        max_running_requests=4,
        verified_tokens=1,
        kv_cache_dtype="auto",
        context_len=64,
    )
    log: list[tuple[str, Tile]] = []

    def cut(seq_lens: torch.Tensor, workspace: Any, tile: Tile) -> DecodePlan:
        log.append(("cut", tile))
        workspace.part_lse.fill_(1.0)
        return DecodePlan(len(seq_lens), tile, seq_lens, seq_lens, workspace.part_o, workspace.part_lse)

    def launch_of(name: str, limit: int) -> Callable[..., None]:
        def attempt(*args: object, tile: Tile, **rest: object) -> None:
            log.append((name, tile))
            if tile["num_stages"] * tile["BLOCK_N"] * tile.get("BLOCK_M", 32) > limit:
                raise OutOfResources("Required: 147456, Hardware limit: 101376")

        return attempt

    monkeypatch.setattr(triton_backend, "extend_attention_fwd", launch_of("extend", 4096))
    monkeypatch.setattr(triton_backend, "decode_attention_fwd", launch_of("decode", 4096))
    monkeypatch.setattr(triton_backend, "plan_decode", cut)
    backend = triton_backend.TritonAttnBackend(plan, "cpu")  # type: ignore[arg-type]
    decode, extend = backend.decode_builder(layer.site), backend.extend_builder(layer.site)
    first_workspace = decode.workspaces[1]
    cache.bind({"k": torch.zeros(1, 2, 64), "v": torch.zeros(1, 2, 64)}, table=0)
    one, slots = torch.ones(1), (TokenSlots(torch.ones(1), torch.ones(1)),)
    q, out = torch.zeros(2, 4, 64), torch.zeros(2, 4, 64)
    extend.build(ExtendRows(one, one, one, one, slots, [2], [0])).attend(q, q, q, layer, out)
    decoding = decode.build(DecodeRows(one, one, slots))
    log.remove(("cut", big_decode))
    for _ in range(2):
        decoding.attend(q, layer, out)
    assert log == [
        ("extend", BIG),
        ("extend", small_extend),
        ("decode", big_decode),
        ("cut", small_decode),
        ("decode", small_decode),
        ("decode", small_decode),
    ]
    counted: list[Tile] = []
    monkeypatch.setattr(triton_backend, "count_parts", lambda *sizes: counted.append(sizes[-1]) or 2)
    assert extend.num_parts([16], [8192]) == 2
    assert counted == [BIG], "all ranks decide by the planned tile which steps run in graphs"
    workspace = decode.workspaces[1]
    assert workspace is not first_workspace
    assert decode._replaced == [{1: first_workspace}], "graphs that were captured before write there"
    assert not workspace.part_lse.any(), "the plan is read early: something must be launched behind what makes it"
    assert {step["op"] for step in step_downs()} == {"extend_attention", "decode_attention"}
