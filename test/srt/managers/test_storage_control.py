"""What stays of a store that is attached and then undone, as other replicas have refused it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.managers.scheduler import storage_control
from sglang.srt.mem_cache.host_tier import HostTier


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
