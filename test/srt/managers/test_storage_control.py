"""What stays of a store that is attached and then undone, as other replicas have refused it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler import storage_control
from sglang.srt.mem_cache.host_tier import HostTier
from sglang.srt.plan.host_cache import GIB


class NoCaches:
    """The tables of a pool, which know who is told of evictions."""

    def __init__(self) -> None:
        self.tree, self.windows, self.checkpoints = SimpleNamespace(before_eviction=None), (), None


@pytest.mark.parametrize("undo", [True, False])
def test_the_write_policy_returns(undo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tier: Any = HostTier.__new__(HostTier)
    tier.storage, tier.device, tier.host, tier._agree = None, NoCaches(), NoCaches(), list
    tier.use_policy("write_through_selective")
    scheduler: Any = SimpleNamespace(
        host_tiers=[tier], sync=lambda: None, reqs={}, args=SimpleNamespace(hicache_storage_prefetch_policy="timeout"),
        runner=None, attach_storage=tier.attach,
    )  # fmt: skip
    monkeypatch.setattr(storage_control, "open_store", lambda *args: SimpleNamespace())
    wanted = {"backend": "file", "extra": None, "prefetch_policy": None, "write_policy": "write_back"}
    assert storage_control.attach(scheduler, wanted) == ""
    assert tier.write_policy == "write_back" and tier.device.tree.before_eviction is not None
    tier.storage = SimpleNamespace(close=lambda: None)
    assert storage_control.detach(scheduler, undo) == ""
    assert tier.write_policy == ("write_through_selective" if undo else "write_back")
    assert (tier.device.tree.before_eviction is None) == undo


@pytest.mark.parametrize("free_gib", [8, 7])
def test_the_memory_of_mooncake(
    free_gib: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan knew nothing of the store, so what it takes is compared with what is free, before any rank takes it."""
    opened: list[Any] = []
    scheduler: Any = SimpleNamespace(
        host_tiers=[SimpleNamespace(storage=None)], sync=lambda: None, reqs={}, attach_storage=lambda *_: None,
        args=SimpleNamespace(hicache_storage_prefetch_policy="timeout"),
        runner=SimpleNamespace(plan=SimpleNamespace(host_cache=SimpleNamespace(processes=1, sharers=2))),
    )  # fmt: skip
    monkeypatch.setattr(storage_control, "open_store", lambda *args: opened.append(args) or SimpleNamespace())
    monkeypatch.setattr(storage_control, "free_main_memory", lambda: free_gib * GIB)
    sizes = f'"global_segment_size": {3 * GIB}, "local_buffer_size": {GIB}'
    extra = f'{{"master_server_address": "h:1", {sizes}}}'
    wanted = {"backend": "mooncake", "extra": extra, "prefetch_policy": None, "write_policy": None}
    caplog.set_level("INFO")
    said = storage_control.attach(scheduler, wanted)
    if free_gib == 8:
        assert said == "" and len(opened) == 1
        assert "it takes 4.00 GiB of main memory in each of 2 ranks" in caplog.text
    else:
        assert "smaller global_segment_size" in said and not opened
        assert f"refused: {said}" in caplog.text, "another rank refers to this log"


def test_a_store_that_a_rank_cannot_open(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: Any) -> None:
        raise UserError("no such folder")

    scheduler: Any = SimpleNamespace(
        host_tiers=[SimpleNamespace(storage=None)], sync=lambda: None, reqs={}, runner=None,
        args=SimpleNamespace(hicache_storage_prefetch_policy="timeout"),
    )  # fmt: skip
    monkeypatch.setattr(storage_control, "open_store", refuse)
    wanted = {"backend": "file", "extra": None, "prefetch_policy": None, "write_policy": None}
    assert storage_control.attach(scheduler, wanted) == "no such folder"
    assert "refused: no such folder" in caplog.text
