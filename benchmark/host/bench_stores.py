"""Rates of a store of cached prefixes: entries written, then read by as many threads as a server has.

    python benchmark/host/bench_stores.py file '{"storage_dir": "/nvme/prefixes"}' --cold

EXTRA is --hicache-storage-backend-extra-config of the server. Needs no model and no GPU. Prints bytes a second in both
directions, and the seconds in which a session of 100,000 tokens comes back whose tokens have 20, 65 and 254 kB.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sglang.srt.configs.storage_backend import read_storage_config
from sglang.srt.mem_cache.storage.engine import READERS
from sglang.srt.mem_cache.storage.store import PrefixStore, create_store

TOKEN_KB = {"Qwen3.5-35B": 20.5, "Qwen3.5-27B": 65.5, "MiniMax-M2": 254.0}
SESSION_TOKENS = 100_000


def drop_from_the_systems_cache(folder: Path) -> None:
    """Has the files read from the disk again, as after a restart of the machine."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def seconds_of(call: Callable[[str], object], names: list[str], threads: int) -> float:
    """Returns the seconds in which `threads` threads call with all names."""
    workers = [
        threading.Thread(target=lambda part=names[i::threads]: [call(name) for name in part]) for i in range(threads)
    ]
    began = time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.monotonic() - began


def measure(store: PrefixStore, entry_bytes: int, total_bytes: int, cold: Path | None) -> tuple[float, float]:
    """Returns bytes a second of writing and of reading. Removes what it wrote."""
    names = ["b" + os.urandom(32).hex() for _ in range(total_bytes // entry_bytes)]
    data, wrong = bytearray(os.urandom(entry_bytes)), []

    def read(name: str) -> None:
        if store.read(name) != data:
            wrong.append(name)

    try:
        writing = seconds_of(lambda name: store.write(name, data), names, 1)
        if cold is not None:
            drop_from_the_systems_cache(cold)
        reading = seconds_of(read, names, READERS)
    finally:
        for name in names:
            store.delete(name)
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(names)} entries are not as they were written")
    return total_bytes / writing, total_bytes / reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("extra")
    parser.add_argument("--entry-mb", type=float, default=4.0, help="of one entry: the bytes of 64 tokens")
    parser.add_argument("--total-mb", type=float, default=1024.0)
    parser.add_argument("--cold", action="store_true", help="files are read from the disk, not from the system's cache")
    args = parser.parse_args()
    config = read_storage_config(args.backend, "timeout", args.extra)
    assert config is not None
    store = create_store(config)
    folder = getattr(store, "directory", None) if args.cold else None
    written, read = measure(store, int(args.entry_mb * 1e6), int(args.total_mb * 1e6), folder)
    print(
        f"{args.backend}: {written / 1e6:,.0f} MB/s written, {read / 1e6:,.0f} MB/s read" + " from the disk" * args.cold
    )
    for model, kilobytes in TOKEN_KB.items():
        seconds = SESSION_TOKENS * kilobytes * 1e3 / read
        print(f"  {SESSION_TOKENS:,} tokens of {model} ({kilobytes:g} kB each): {seconds:.1f} s")
    if close := getattr(store, "close", None):
        close()


if __name__ == "__main__":
    main()
