"""Triton's interpreter without what it computes again and again: the same results in a third of the time.

Each call of a device function looks through `triton.language` for functions to replace, which the launch that makes the
call has replaced already; each sum of integers is computed once more in int64, for a check that only debug builds read;
the types of blocks, their shapes and numpy's types are made anew for every operation. `apply` takes the first two away
and keeps the others.
"""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def apply() -> None:
    """For this process. Not idempotent."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    replace_functions_once_a_launch()
    keep_numpy_types()
    keep_widths()
    keep_shapes()


def replace_functions_once_a_launch() -> None:
    """The launch restores them. A device function whose module names both `triton.language` and its core may replace
    more."""
    languages: dict[FunctionType, list[Any]] = {}
    replaced: list[Any] = []
    stock = interpreter._patch_lang

    def patch_lang(fn: FunctionType) -> Any:
        if fn not in languages:
            languages[fn] = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if languages[fn] and all(language in replaced for language in languages[fn]):
            return interpreter._LangPatchScope()
        of_a_launch = not replaced
        scope = stock(fn)
        replaced.extend(languages[fn])
        if of_a_launch:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang = patch_lang


def keep_numpy_types() -> None:
    kept: dict[str, Any] = {}
    stock = interpreter._get_np_dtype

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in kept:
            kept[name] = stock(dtype)
        return kept[name]

    interpreter._get_np_dtype = get_np_dtype


def keep_widths() -> None:
    """The most bytes that an element may have, which is compared twice an operation."""
    most: dict[str, float] = {}

    def validate(array: Any, dtype: Any) -> bool:
        limit = most.get(dtype.name)
        if limit is None:
            limit = float("inf") if dtype.is_ptr() else max(dtype.primitive_bitwidth, 8) // 8
            most[dtype.name] = limit
        return array.itemsize <= limit

    interpreter._validate_np_data_size = validate


def keep_shapes() -> None:
    """Types and tensors of the same sizes share their shapes, into which nothing writes."""
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    sizes_of: dict[int, tuple[int, ...]] = {}
    of_tensors: dict[int, tuple[Any, Any]] = {}
    """By the identity of a kept shape, which lives as long as the process does; 0: no block."""
    stock_type, stock_tensor = tl.block_type.__init__, tl.tensor.__init__
    unwrap = tl.core._unwrap_if_constexpr

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = sizes_of.get(id(shape))
        if sizes is None:
            sizes = tuple(unwrap(size) for size in unwrap(shape))
        if sizes not in of_types:
            stock_type(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
            sizes_of[id(self.shape)] = sizes
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = of_types[sizes]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = id(type.shape) if type.is_block() else 0
        if key not in of_tensors:
            stock_tensor(self, handle, type)
            if key == 0 or key in sizes_of:
                of_tensors[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[key]

    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor
