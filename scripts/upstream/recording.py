"""Writes down what Triton would launch, instead of launching it.

with recording() as launches:
    context_attention_fwd(q, k, v, ...)   # with meta tensors
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """A launch that Triton would have compiled: types of the arguments, compile-time values, and how it would be
    launched."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible_by_16: tuple[str, ...]
    num_warps: int
    num_stages: int


@contextlib.contextmanager
def recording() -> Iterator[list[list[Launch]]]:
    """Every Triton launch inside the block is appended to the list instead of being compiled and run.

    A launch is a list of one; of an autotuned kernel it is a list of all that the autotuner would try.
    """
    import triton
    from triton.runtime.autotuner import Autotuner

    launches: list[list[Launch]] = []
    tries: list[list[Launch]] = []

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launch = _launch(fn.jit_function, compile)
        if tries:
            tries[-1].append(launch)
        else:
            launches.append([launch])
        return True  # do not compile, and so do not launch

    def run(tuner: Any, *args: Any, **kwargs: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        tries.append([])
        for config in tuner.prune_configs(kwargs):
            if config.pre_hook:
                config.pre_hook(tuner.nargs | kwargs | config.all_kwargs())
            tuner.fn.run(*args, **kwargs, **config.all_kwargs())
        launches.append(tries.pop())

    original, Autotuner.run = Autotuner.run, run  # type: ignore[method-assign]
    triton.knobs.runtime.jit_cache_hook = hook  # type: ignore[assignment]
    try:
        yield launches
    finally:
        triton.knobs.runtime.jit_cache_hook = None
        Autotuner.run = original  # type: ignore[method-assign]


def _launch(kernel: Any, compile: dict[str, Any]) -> Launch:
    names = kernel.arg_names
    return Launch(
        kernel=kernel,
        signature=dict(compile["signature"]),
        constexprs={names[path[0]]: value for path, value in compile["constants"].items()},
        divisible_by_16=tuple(
            names[path[0]]
            for path, attributes in compile["configs"][0].items()
            if ["tt.divisibility", 16] in [list(attribute) for attribute in attributes]
        ),
        num_warps=compile["num_warps"],
        num_stages=compile["num_stages"],
    )
