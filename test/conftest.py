"""Tests marked `gpu` are skipped where there is no CUDA device; cases of tests marked `pairs` or `values`, and
those in left_out.py, become `thorough`; files that take long come first; clients share what they know of certificates;
reference cycles are collected less often.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import random
import ssl
import sys
import zlib
from collections.abc import Generator

import left_out
import numpy
import order
import pairs
import pytest
import slow_files
import tiny_models
from hypothesis import HealthCheck, settings

# On a busy machine the making of inputs takes long; that says nothing of what is tested.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

# A process of a test that compiles every module anew takes a second or two longer, and there are hundreds of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("SGLANG_GRAMMAR_WARM_UP", "0")  # a second of the processors for each server of a test
# A store of files refuses to fill the disk: its tests pass on a nearly full one too.
os.environ.setdefault("SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE", "0")
# httpx reads all certificates of the system for each client, and for each request without one: 25 ms of a processor.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# Python looks for cycles after every 700 new objects, which takes up to a tenth of the time of a test in plain Python.
gc.set_threshold(20_000, 10, 10)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(slow_files.SlowFiles())
    if tiny_models.FOLDER not in os.environ:  # else a worker, or a run that a test started
        config.pluginmanager.register(tiny_models.RunFolder())


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Modules and tests stay until the end: no collection looks at them, neither now nor later."""
    # Only a worker has this, and not the processes that its tests start, whose exit status tells of failures: those
    # inherit the variables by which xdist names it.
    if hasattr(session.config, "workerinput"):
        atexit.register(os._exit, 0)  # all has been sent; to take modules and tests apart takes four seconds
    else:
        atexit.register(gc.unfreeze)  # extension modules complain about objects that outlive Python
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    pairs.mark_others(items)
    left_out.mark_left_out(items)
    order.long_files_first(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(tryfirst=True)  # before fixtures, which draw, too
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Numbers that a test draws without a seed are the same in each run, whatever its process has run before."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def log_level() -> None:
    """An engine or a command in the process of an earlier test may have set another one."""
    logging.getLogger().setLevel(logging.WARNING)
