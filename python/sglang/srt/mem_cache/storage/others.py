"""The store's jobs for requests of an attention group whose caches other ranks have."""

from __future__ import annotations

from sglang.srt.mem_cache.cache_tier import CopyState
from sglang.srt.mem_cache.storage.engine import Lookup, Read, StorageEngine, StorageJob, Write

AS_MUCH_AS_ANY = 1 << 62
"""More tokens and bytes than any job brings."""


class OthersStorage:
    """Has nothing to do, and says that all of it is done: the least of what all ranks say counts, and those of the
    group say how far they got. Implements StorageJobs."""

    writes = True
    num_failures = num_corrupt = 0

    def __init__(self, engine: StorageEngine) -> None:
        """engine: of this rank's group, with entries of the same kind."""
        self.block, self.has_ends = engine.block, engine.has_ends

    def submit(self, job: StorageJob) -> None:
        if isinstance(job, Lookup | Read):
            job.end = AS_MUCH_AS_ANY
        if isinstance(job, Read | Write):
            job.num_bytes = AS_MUCH_AS_ANY
        if isinstance(job, Write):
            job.num_tokens = AS_MUCH_AS_ANY
        job.state = CopyState.DONE

    def distrust(self) -> None:
        pass

    def close(self) -> None:
        pass
