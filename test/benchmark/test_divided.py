"""Which servers the benchmark of divided tokens starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import divided
import pytest
import requirements


class Servers:
    """Starts nothing, and knows with which flags."""

    def __init__(self) -> None:
        self.flags: dict[str, tuple[str, ...]] = {}

    def start(self, name: str, model: Path, *flags: str, **options: Any) -> None:
        self.flags[name] = flags


def test_flags_are_for_our_servers_of_the_slice_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[divided.Slices] = []
    monkeypatch.setattr(divided, "slice_", lambda bench, slices, *rest: given.append(slices))
    monkeypatch.setattr(requirements, "complaint", lambda: "")
    asked = ["--out", str(tmp_path), "--device", "cpu", "--skip", "replicas,answers", "--layouts", "TP2,DCP2"]
    divided.main([*asked, "--peer-command", "their serve", "--flags", "--attention-backend flashinfer"])
    divided.main(asked)
    with_flags, without = given
    bench: Any = SimpleNamespace(cpu=True)
    for slices, more in ((with_flags, ("--attention-backend", "flashinfer")), (without, ())):
        ours: Any = Servers()
        slices.ours(bench, ours, tmp_path)
        assert ours.flags == {
            f"slice_{name}": (*divided.Slices.flags(bench), *divided.LAYOUTS[name], *more) for name in ("TP2", "DCP2")
        }
    theirs: Any = Servers()
    with_flags.start_peer(bench, theirs, tmp_path)
    assert theirs.flags and not any("flashinfer" in flags for flags in theirs.flags.values())
