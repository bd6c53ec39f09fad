"""Images pass slow fetches and long videos."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang.srt.managers.front.media import media_loader, pool
from sglang.srt.managers.front.media.media_loader import MediaLoader
from sglang.srt.managers.front.media.media_source import MediaSource
from sglang.srt.managers.front.media.messages import Decoded, MediaJob
from sglang.srt.managers.front.media.pool import MediaPool
from sglang.srt.managers.front.media.sources import SourceRules
from sglang.srt.managers.front.media.worker import WorkerSettings

ARGS: Any = SimpleNamespace(
    limit_mm_data_per_request="{}",
    mm_max_concurrent_calls=100,
    media_url_max_file_size_mb=1,
    mm_per_request_timeout=30.0,
    allowed_media_domains=None,
    allow_private_media_urls=True,
    allowed_local_media_path=None,
    mm_io_worker_num=2,
    mm_processor_worker_num=1,
)
SERVED: Any = SimpleNamespace(tokens=None, files=None, pixel_dtype=None)


def test_an_image_is_decoded_while_videos_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go = threading.Event()

    class Worker:
        process = SimpleNamespace(pid=None)

        def __init__(self, _: object) -> None:
            pass

        def start(self) -> None:
            pass

        def run(self, job: MediaJob, limit_s: float) -> Decoded:
            assert job.kind == "image" or go.wait(300)
            return Decoded(items=[], parts=[])

    monkeypatch.setattr(pool, "_Worker", Worker)
    monkeypatch.setattr(pool, "end_all", lambda processes: None, raising=False)

    async def main() -> None:
        media = MediaPool(cast(WorkerSettings, SimpleNamespace(directory=str(tmp_path))), 2, 30.0)
        try:
            videos = [
                asyncio.ensure_future(media.decode(MediaJob(name=str(i), kind="video", data=b""))) for i in range(4)
            ]
            await asyncio.sleep(0)
            await asyncio.wait_for(media.decode(MediaJob(name="image", kind="image", data=b"")), 300)
            assert not any(video.done() for video in videos)
            go.set()
            await asyncio.gather(*videos)
        finally:
            go.set()
            media.close()

    asyncio.run(main())


@pytest.mark.parametrize("inline", ["data:image/png;base64,aGVsbG8=", "aGVsbG8=", "DATA:image/png;base64,aGVsbG8="])
def test_data_urls_pass_addresses_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inline: str
) -> None:
    go = threading.Event()

    def fetch(source: str, rules: SourceRules) -> bytes:
        assert go.wait(300)
        return b""

    class Pool:
        def __init__(self, *_: object) -> None:
            pass

        async def decode(self, job: MediaJob) -> Decoded:
            return Decoded(items=[], parts=[])

        def close(self) -> None:
            pass

    monkeypatch.setattr(media_loader.sources, "fetch", fetch)
    monkeypatch.setattr(media_loader, "MediaPool", Pool)

    async def main() -> None:
        async def encode_each(texts: Sequence[str]) -> list[list[int]]:
            return []

        loader = MediaLoader(ARGS, SERVED, str(tmp_path), encode_each)
        try:
            slow = [
                asyncio.ensure_future(loader._load_one(MediaSource("image", "http://127.0.0.1/a.png")))
                for _ in range(4)
            ]
            await asyncio.sleep(0)
            await asyncio.wait_for(loader._load_one(MediaSource("image", inline)), 300)
            assert not any(each.done() for each in slow)
            go.set()
            await asyncio.gather(*slow)
        finally:
            go.set()
            loader.close()

    asyncio.run(main())


def test_the_texts_of_a_video_are_tokenized_in_one_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []

    class Pool:
        def __init__(self, *_: object) -> None:
            pass

        async def decode(self, job: MediaJob) -> Decoded:
            return Decoded(items=[], parts=["<0.0>", 4, "<1.0>", 4, "end"])

        def close(self) -> None:
            pass

    async def encode_each(texts: Sequence[str]) -> list[list[int]]:
        calls.append([*texts])
        return [[len(text)] for text in texts]

    monkeypatch.setattr(media_loader, "MediaPool", Pool)

    async def main() -> None:
        loader = MediaLoader(ARGS, SERVED, str(tmp_path), encode_each)
        try:
            placed = await loader._load_one(MediaSource("video", "data:video/mp4;base64,aGVsbG8="))
        finally:
            loader.close()
        assert placed.parts == [[5], 4, [5], 4, [3]]

    asyncio.run(main())
    assert calls == [["<0.0>", "<1.0>", "end"]]
