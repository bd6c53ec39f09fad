"""Names that ported code and trainers import from here. Those of trainers are loaded when they are asked for."""

from importlib import import_module
from typing import Any

from sglang.srt.hardware.arch import is_sm120_supported

_OF_TRAINERS = {
    "MultiprocessingSerializer": "sent_tensors",
    **dict.fromkeys(
        ("assert_pkg_version", "is_cuda", "kill_process_tree", "set_prometheus_multiproc_dir", "set_ulimit"),
        "common",
    ),
}

__all__ = ["is_sm120_supported", *_OF_TRAINERS]


def __getattr__(name: str) -> Any:
    if name not in _OF_TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OF_TRAINERS[name]}"), name)
