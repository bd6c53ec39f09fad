"""Storage jobs of a rank for requests of another attention group, whose caches other ranks hold."""

from __future__ import annotations

from sglang.srt.mem_cache.cache_tier import CopyState
from sglang.srt.mem_cache.storage.engine import Lookup, Read, StorageEngine, StorageJob, Write

UNLIMITED = 1 << 62
"""More tokens and bytes than any job has."""


class OtherGroupStorage:
    """Reports every job as fully done at once, without doing anything. The minimum over all ranks counts, so the ranks
    that hold the caches decide. Implements StorageJobs."""

    writes = True
    num_failures = num_corrupt = 0

    def __init__(self, engine: StorageEngine) -> None:
        """engine: the engine of this rank's own group, whose entries have the same block size."""
        self.block, self.has_ends = engine.block, engine.has_ends

    def submit(self, job: StorageJob) -> None:
        if isinstance(job, Lookup | Read):
            job.end = UNLIMITED
        if isinstance(job, Read | Write):
            job.num_bytes = UNLIMITED
        if isinstance(job, Write):
            job.num_tokens = UNLIMITED
        job.state = CopyState.DONE

    def stop_reading(self) -> None:
        pass

    def close(self) -> None:
        pass
