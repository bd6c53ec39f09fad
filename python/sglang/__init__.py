"""sm120-sglang: an SGLang-compatible server and engine. Importing this imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.version import SGLANG_VERSION
from sglang.version import __version__ as _own_version

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

__all__ = ["Engine", "ServerArgs", "__version__"]

__version__ = f"{SGLANG_VERSION}+sm120.{_own_version}"
"""What this is to programs that ask for SGLang, and our own version behind it."""

_LAZY = {"Engine": "sglang.srt.entrypoints.engine", "ServerArgs": "sglang.srt.server_args"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sglang' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
