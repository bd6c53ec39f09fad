"""Plans of published configs with encoders of images, on cards of 96 GB and on GB10s."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang import explain
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.server_args import ServerArgs

from .configs import checkpoint

MACHINES = "--nnodes {0} --tp {0} --dist-init-addr 10.0.0.1:20000"
FITS = {
    "MiMo-V2.6-Flash-RL": {"--tp 1": False, "--tp 2": True, "--tp 4": True, "--tp 8": True},
    "MiMo-V2.6-Pro-RL": {"--tp 4": False, "--tp 8": True},
    "dots3-note-prev-fp8": {"--tp 1": False, "--tp 2": False, "--tp 4": True, "--tp 8 --ep-size 2": True},
}
ON_GB10 = {"MiMo-V2.6-Flash-RL": (2, True), "MiMo-V2.6-Pro-RL": (8, True), "dots3-note-prev-fp8": (2, False)}


@pytest.mark.parametrize(("name", "flags"), [(name, flags) for name, rows in FITS.items() for flags in rows])
def test_cards(name: str, flags: str, tmp_path: Path) -> None:
    _check(name, "rtx-pro-6000-server", flags, FITS[name][flags], tmp_path)


@pytest.mark.parametrize("name", ON_GB10)
def test_machines_of_a_gb10(name: str, tmp_path: Path) -> None:
    count, fits = ON_GB10[name]
    _check(name, "gb10", MACHINES.format(count), fits, tmp_path)


def _check(name: str, product: str, flags: str, fits: bool, folder: Path) -> None:
    args = ServerArgs.from_cli(["--model-path", str(checkpoint(name, folder)), *flags.split()])
    explained = explain.explain(args, arch_by_name(product), frozenset({"triton"}), advises=False)
    assert explained.missing == () and explained.refused is None
    assert (explained.unfit is None) == fits, explained.unfit
    if fits:
        assert explained.plan is not None and explained.plan["memory"]["media"] > 0
