"""The processes that decode: one that hangs or dies fails its job alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from media.pictures import encoded, picture
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media.messages import MediaJob
from sglang.srt.managers.front.media.pool import MediaPool
from sglang.srt.managers.front.media.worker import WorkerSettings
from sglang.srt.towers.pictures.processor_files import read_processor_files
from sglang.srt.utils import shared_array

GOOD = encoded(picture())

pytestmark = pytest.mark.asyncio


@pytest.fixture
def make_pool(seeing_model: Path, tmp_path: Path) -> Iterator[Callable[..., MediaPool]]:
    pools: list[MediaPool] = []

    def make(limit_s: float = 300.0, working_bytes: int = 4 << 30) -> MediaPool:
        files = read_processor_files(seeing_model, "qwen3_vl", "{}")
        pools.append(MediaPool(WorkerSettings(str(tmp_path), files, 1 << 20, working_bytes), 1, limit_s))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def job(name: str, data: bytes = GOOD) -> MediaJob:
    return MediaJob(name=name, kind="image", data=data)


async def test_one_that_hangs_or_dies_is_replaced(make_pool: Callable[..., MediaPool], tmp_path: Path) -> None:
    pool = make_pool(limit_s=4.0)
    first = await pool.decode(job("a"))
    pixels = shared_array.read(tmp_path, first.items[0].pixels)
    assert pixels.shape == (np.prod(first.items[0].grid), 3 * 2 * 16 * 16) and first.parts == [6]
    (process,) = pool.process_ids
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(RequestError, match="not decoded within 4 s"):
        await pool.decode(job("b"))
    again = await pool.decode(job("c"))
    assert again.items[0].digest == first.items[0].digest
    assert pool.process_ids != [process]
    os.kill(pool.process_ids[0], signal.SIGKILL)
    with pytest.raises(RequestError, match="ended the process"):
        await pool.decode(job("d"))
    await pool.decode(job("e"))
    assert sorted({path.name.partition("-")[0] for path in tmp_path.iterdir()}) == ["a", "c", "e"]


async def test_a_picture_that_takes_too_much_memory_is_refused(make_pool: Callable[..., MediaPool]) -> None:
    pool = make_pool(working_bytes=64 << 20)
    large = encoded(picture(64, 64).resize((7000, 7000)))
    with pytest.raises(RequestError, match="more memory"):
        await pool.decode(job("large", large))
    await pool.decode(job("small"))


async def test_nothing_stays_of_a_job_that_nobody_waits_for(
    make_pool: Callable[..., MediaPool], tmp_path: Path
) -> None:
    pool = make_pool()
    waiting = asyncio.ensure_future(pool.decode(job("gone")))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await pool.decode(job("kept"))
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"kept"}
