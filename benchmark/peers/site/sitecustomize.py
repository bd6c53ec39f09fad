"""Imported by every interpreter of a peer (upstream SGLang), a server's child processes too: random weights that make
an honest comparison, and stand-ins for packages that the peer was packed without.

    PYTHONPATH=benchmark/peers/site:PEER_SITE PEER_STUBS=cutlass,quack python -m sglang.bench_one_batch ...

Upstream's random weights are within 0.001 of zero, norms and routers' biases included; weights that are stored as
bytes are left as the memory was. What a norm lets through is then so small that a router's bias alone decides: every
token has the same experts, and the GPU reads a tenth of the weights that real tokens need. Here norms are 1, routers'
biases 0 and bytes random, as in our own random weights: tokens choose themselves.

`PEER_STUBS`: packages that the peer's own modules import, but never call here; and, with a dot, modules that a package
imports of itself.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from typing import Any

ROUTER_BIASES = ("e_score_correction_bias", "router.bias", "gate.bias")
LOADER = "sglang.srt.model_loader.loader"
MXFP4_SCALE = 120
"""2**-7 as E8M0: products of random elements keep the size of their inputs, roughly."""


class _Anything(type):
    """A class that stands for whatever a module asks of a package that is not there: a decorator leaves its function as
    it is, everything else is the class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if cls is not Anything:
            return type.__call__(cls, *args, **options)
        decorated = args and callable(args[0]) and not isinstance(args[0], _Anything)
        return args[0] if decorated else Anything

    def _again(cls, *args: Any) -> Any:
        return Anything

    __getitem__ = __or__ = __ror__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __floordiv__ = _again

    def __index__(cls) -> int:
        return 1


class Anything(metaclass=_Anything):
    pass


class _Stub(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


def watch_imports(stubs: list[str]) -> None:
    """Stands in for packages where the peer's own modules import them (its dependencies look whether a package is
    there), and repairs the random weights as soon as the loader is there."""
    original = builtins.__import__

    def import_or_stub(name: str, variables: Any = None, *rest: Any, **options: Any) -> Any:
        top, importer = name.partition(".")[0], str((variables or {}).get("__name__", ""))
        if top in stubs and importer.startswith("sglang"):
            wants_parts = (rest[1] if len(rest) > 1 else options.get("fromlist")) or ()
            return _Stub(name if wants_parts else top)
        module = original(name, variables, *rest, **options)
        let_tokens_choose()
        return module

    builtins.__import__ = import_or_stub


def let_tokens_choose() -> None:
    """Patches the peer's loader of random weights, once it is imported."""
    loader: Any = sys.modules.get(LOADER)
    fill = getattr(loader, "initialize_dummy_weights", None)
    if fill is None or fill.__name__ == "fill_and_settle":
        return

    def fill_and_settle(model: Any, *args: Any, **options: Any) -> None:
        fill(model, *args, **options)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight") and weight.ndim == 1:
                weight.data.fill_(1)
            elif name.endswith(ROUTER_BIASES):
                weight.data.zero_()
            elif str(weight.dtype) == "torch.uint8":
                weight.data.fill_(MXFP4_SCALE) if "scale" in name else weight.data.random_(256)

    loader.initialize_dummy_weights = fill_and_settle


names = list(filter(None, os.environ.get("PEER_STUBS", "").split(",")))
sys.modules |= {name: _Stub(name) for name in names if "." in name}
watch_imports([name for name in names if "." not in name])
