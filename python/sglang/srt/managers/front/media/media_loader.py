"""Fetches and decodes the images and videos of prompts, and places them in the token ids."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media import sources
from sglang.srt.managers.front.media.expansion import PlacedMedia, expand
from sglang.srt.managers.front.media.media_files import MediaFiles
from sglang.srt.managers.front.media.media_source import KINDS, MediaSource
from sglang.srt.managers.front.media.messages import Decoded, MediaJob
from sglang.srt.managers.front.media.pool import MediaPool
from sglang.srt.managers.front.media.served_media import ServedMedia
from sglang.srt.managers.front.media.sources import SourceRules
from sglang.srt.managers.front.media.worker import WorkerSettings
from sglang.srt.managers.front.worker_threads import WorkerThreads
from sglang.srt.managers.wire.io_struct import MediaItem
from sglang.srt.managers.wire.token_ids import Ids
from sglang.srt.server_args import ServerArgs

EncodeEach = Callable[[Sequence[str]], Awaitable[list[list[int]]]]

DEFAULT_LIMITS = {"image": 16, "video": 2}


class MediaLoader:
    """Loads media without blocking its event loop: blocking calls run in threads, computation in processes."""

    def __init__(self, args: ServerArgs, served: ServedMedia, directory: str, encode_each: EncodeEach) -> None:
        """directory: of shared arrays. encode_each(texts): tokenizes the texts of videos."""
        self.tokens = served.tokens
        self._encode_each = encode_each
        self.limits = DEFAULT_LIMITS | json.loads(args.limit_mm_data_per_request)
        self._max_under_way = args.mm_max_concurrent_calls
        self._num_under_way = 0
        max_bytes = args.media_url_max_file_size_mb << 20
        self._rules = SourceRules(
            max_bytes=max_bytes,
            timeout_s=args.mm_per_request_timeout,
            domains=None if args.allowed_media_domains is None else tuple(args.allowed_media_domains),
            allow_private=args.allow_private_media_urls,
            local_directory=args.allowed_local_media_path,
        )
        self.files = MediaFiles(Path(directory))
        self._threads = WorkerThreads(1 + args.mm_io_worker_num, "media-fetch", num_short=1)
        settings = WorkerSettings(directory, served.files, max_bytes, pixel_dtype=served.pixel_dtype)
        self.pool = MediaPool(settings, args.mm_processor_worker_num, args.mm_per_request_timeout)

    def close(self) -> None:
        self._threads.close()
        self.pool.close()

    async def place(self, ids: Ids, media: Sequence[MediaSource]) -> tuple[Ids, list[MediaItem]]:
        """Returns the ids with placeholders for these images and videos, and the items. The caller holds the items and
        must release them with `files.release`. Raises RequestError."""
        self._check(media)
        placed = await self._load(media) if media else []
        try:
            return expand(ids, placed, self.tokens)
        except BaseException:
            self.files.release([features for entry in placed for features in entry.items])
            raise

    def _check(self, media: Sequence[MediaSource]) -> None:
        for kind in KINDS:
            count = sum(source.kind == kind for source in media)
            if not count:
                continue
            if self.tokens.of(kind) is None:
                raise RequestError(f"{kind}s are not read by this model; send images of single frames")
            if count > self.limits[kind]:
                raise RequestError(
                    f"the prompt has {count} {kind}s; {self.limits[kind]} are the limit (--limit-mm-data-per-request)"
                )
        if self._num_under_way + len(media) > self._max_under_way:
            raise RequestError(f"{self._num_under_way} images are being read already; try again later", 503)
        if media:
            self.files.require_room()

    async def _load(self, media: Sequence[MediaSource]) -> list[PlacedMedia]:
        """Loads all of them at once; if one fails, releases all."""
        self._num_under_way += len(media)
        tasks = [asyncio.ensure_future(self._load_one(source)) for source in media]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, PlacedMedia):
                    self.files.release(outcome.items)
            raise
        finally:
            self._num_under_way -= len(media)

    async def _load_one(self, source: MediaSource) -> PlacedMedia:
        is_long = not sources.is_inline(source.source)
        payload = await asyncio.wrap_future(
            self._threads.submit(is_long, lambda _: sources.load(source.source, self._rules))
        )
        job = MediaJob(
            name=uuid.uuid4().hex,
            kind=source.kind,
            data=payload.data,
            is_base64=payload.is_base64,
            mime=payload.mime,
            detail=source.detail,
        )
        decoded: Decoded = await self.pool.decode(job)
        self.files.hold(decoded.items)
        try:
            texts = iter(await self._encode_each([part for part in decoded.parts if isinstance(part, str)]))
        except BaseException:
            self.files.release(decoded.items)
            raise
        parts = [part if isinstance(part, int) else next(texts) for part in decoded.parts]
        return PlacedMedia(source.kind, decoded.items, parts)
