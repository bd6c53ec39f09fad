"""Kernels that differ from others in a function that they call.

Where a kernel's loop stays and one step in it changes, the variant is made of the same source: a branch in that step
would have all launches of the original compiled anew, and a copy of the source would drift.
"""

from __future__ import annotations

import types
from typing import Any

import triton


def with_functions(kernel: Any, module: str, **functions: Any) -> Any:
    """Returns the Triton function `kernel` as one of `module` (a dotted name), in which these `functions` are called in
    place of those of the same names. Raises ValueError for a name that it does not call."""
    python = kernel.fn
    unknown = sorted(functions.keys() - set(python.__code__.co_names))
    if unknown:
        raise ValueError(f"{python.__qualname__} calls no {', '.join(unknown)}")
    copied = types.FunctionType(
        python.__code__, python.__globals__ | functions, python.__name__, python.__defaults__, python.__closure__
    )
    copied.__module__, copied.__qualname__ = module, python.__qualname__
    copied.__annotations__ = dict(python.__annotations__)
    return triton.jit(copied, do_not_specialize=getattr(kernel, "do_not_specialize", None))
