"""A module of upstream SGLang with random weights that make an honest comparison.

    PYTHONPATH=PEER_SITE python benchmark/peers/peer_process.py sglang.bench_one_batch --load-format dummy ...

Upstream's random weights are within 0.001 of zero, norms and routers' biases included. What a norm lets through is then
so small that a router's bias alone decides: every token has the same experts, and the GPU reads a tenth of the weights
that real tokens need. Here norms are 1 and routers' biases 0, as in our own random weights: tokens choose themselves.

`--stub NAME`, before the module: packages that the peer's own modules import, but never call here, because the
folder was packed without them.
"""

from __future__ import annotations

import argparse
import builtins
import runpy
import sys
import types
from typing import Any

ROUTER_BIASES = ("e_score_correction_bias", "router.bias", "gate.bias")


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


def stub_packages(names: list[str]) -> None:
    """For imports from the peer's own modules only: its dependencies look whether a package is there."""
    original = builtins.__import__

    def import_or_stub(name: str, variables: Any = None, *rest: Any, **options: Any) -> Any:
        top, importer = name.partition(".")[0], str((variables or {}).get("__name__", ""))
        if top in names and importer.startswith("sglang"):
            wants_parts = (rest[1] if len(rest) > 1 else options.get("fromlist")) or ()
            return _Stub(name if wants_parts else top)
        return original(name, variables, *rest, **options)

    builtins.__import__ = import_or_stub


def let_tokens_choose() -> None:
    """Patches the peer's loader of random weights."""
    from sglang.srt.model_loader import loader  # the peer's

    fill = loader.initialize_dummy_weights

    def fill_and_settle(model: Any, *args: Any, **options: Any) -> None:
        fill(model, *args, **options)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight") and weight.ndim == 1:
                weight.data.fill_(1)
            elif name.endswith(ROUTER_BIASES):
                weight.data.zero_()

    loader.initialize_dummy_weights = fill_and_settle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stub", action="append", default=[])
    parser.add_argument("module")
    options, rest = parser.parse_known_args()
    stub_packages(options.stub)
    let_tokens_choose()
    sys.argv = [options.module, *rest]
    runpy.run_module(options.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
