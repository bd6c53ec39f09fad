"""The setting of this process's GPU, by which measured times are kept."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable

from sglang.srt.hardware.arch import device_name, pci_address
from sglang.srt.hardware.gpu_settings import Run, gpu_settings
from sglang.srt.kernels.ledger_file import LOCK_DIR, LOCKS
from sglang.srt.kernels.measured.records import Records, Setting
from sglang.srt.kernels.measured.store import anything_measured, read
from sglang.version import __version__

SettingOf = Callable[[int], "Setting | None"]
"""Returns the setting of a CUDA device."""


def setting_here(gpu: int, run: Run | None = None) -> Setting | None:
    """Returns the setting of a CUDA device; None where its driver does not say all of it. `run`: as in
    `gpu_settings`."""
    settings = gpu_settings(pci_address(gpu), run)
    if settings is None:
        return None
    return Setting(
        gpu=device_name(gpu),
        driver=settings.driver,
        triton=_version("triton"),
        torch=_version("torch"),
        version=__version__,
        kernels=ledger_hash(),
        power_limit=settings.power_limit,
        clocks=settings.clocks,
    )


def records_here(gpu: int, setting_of: SettingOf = setting_here) -> tuple[Setting | None, Records]:
    """Returns the setting of a CUDA device and what was measured with it; (None, {}) if nothing was, which asks no
    driver. `setting_of`: replaced by tests."""
    if not anything_measured():
        return None, {}
    setting = setting_of(gpu)
    records = {} if setting is None else read(setting)
    return (setting, records) if records else (None, {})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def ledger_hash() -> str:
    """Returns a hash of the lock files, which have one of every kernel's code."""
    content = hashlib.sha256()
    for name in sorted(LOCKS):
        content.update((LOCK_DIR / f"{name}.lock.json").read_bytes())
    return content.hexdigest()[:12]
