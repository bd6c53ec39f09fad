"""What every store must do, run in a process that finds the libraries: python contract.py BACKEND EXTRA"""

from __future__ import annotations

import os
import sys
import threading

from sglang.srt.configs.storage_backend import read_storage_config
from sglang.srt.mem_cache.storage.store import PrefixStore, create_store

NAMES = ["b" + f"{i:064x}" for i in range(600)]
SIZES = (1, 97, 4096, 100_001, 3 << 20)


def keeps_entries(store: PrefixStore) -> None:
    assert store.contains(NAMES) == [False] * 600 and store.read(NAMES[0]) is None
    written = {name: bytearray(os.urandom(SIZES[i % len(SIZES)])) for i, name in enumerate(NAMES[:20])}
    for name, data in written.items():
        store.write(name, data)
    assert store.contains(NAMES) == [True] * 20 + [False] * 580
    assert all(store.read(name) == data for name, data in written.items())
    store.write(NAMES[0], written[NAMES[0]])
    store.delete(NAMES[3])
    store.delete(NAMES[3])
    store.delete(NAMES[100])
    assert store.read(NAMES[3]) is None and store.contains(NAMES[:5]) == [True, True, True, False, True]
    store.write(NAMES[3], written[NAMES[3]])
    assert store.read(NAMES[3]) == written[NAMES[3]] and store.contains(NAMES[:5]) == [True] * 5


def keeps_entries_of_several_threads(store: PrefixStore) -> None:
    wrong: list[object] = []

    def write_and_read(thread: int) -> None:
        for i in range(30):
            name, data = "e" + f"{thread:02x}{i:062x}", bytearray(os.urandom(30_001 + i))
            store.write(name, data)
            if store.contains([name]) != [True] or store.read(name) != data:
                wrong.append(name)
        wrong.append(None)

    threads = [threading.Thread(target=write_and_read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [None] * 4, wrong


def main() -> None:
    config = read_storage_config(sys.argv[1], "timeout", sys.argv[2])
    assert config is not None
    store, other = create_store(config), create_store(config)
    keeps_entries(store)
    keeps_entries_of_several_threads(store)
    assert other.contains(NAMES[:21]) == [True] * 20 + [False], "another server finds them"
    for each in (store, other):
        if close := getattr(each, "close", None):
            close()
    print("kept")


if __name__ == "__main__":
    main()
