"""A kernel that is compiled after start-up is named, with its seconds; one read from the cache is named quietly."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang.srt.kernels import late_compiles

triton = pytest.importorskip("triton")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds", "late"), [(2.5, True), (0.06, True), (0.04, False)])
def test_what_takes_long_is_said(
    seconds: float, late: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(late_compiles, "time", clock)
    watch = late_compiles.LateCompiles()
    assert watch.begins(key="anything") is False, "Triton would launch nothing"
    clock.now = seconds
    with caplog.at_level(logging.INFO):
        watch.ends(fn=SimpleNamespace(name="extend_kernel"), key="anything")
    assert watch.kernels == ([("extend_kernel", seconds)] if late else [])
    (record,) = caplog.records
    how = "was compiled" if late else "was read from Triton's cache"
    assert record.getMessage().startswith(f"extend_kernel {how} while requests waited")
    assert record.levelno == (logging.WARNING if late else logging.INFO)


def test_triton_calls_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel compiled for sm_120 without a GPU."""
    import triton.language as tl

    from sglang.srt.kernels.noted_launches import as_on_gpu

    @triton.jit
    def add_one(pointer, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(pointer + at, tl.load(pointer + at, mask=at < count) + 1, mask=at < count)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setattr(late_compiles, "COMPILED_S", 0.0)
    watch = late_compiles.watch()
    with as_on_gpu("sm_120"):
        add_one.warmup(triton.MockTensor(tl.float32), 100, BLOCK=128, grid=(1,))
    assert watch is not None
    assert [name.rpartition(".")[2] for name, _ in watch.kernels] == ["add_one"]
