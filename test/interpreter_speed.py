"""Triton's interpreter without what it computes again and again: the same results in a third of the time.

Each call of a device function looks through `triton.language` for functions to replace, which the launch that makes the
call has replaced already; each sum of integers is computed once more in int64, for a check that only debug builds read;
the types of blocks, their shapes and numpy's types are made anew for every operation, and so is the type of its result,
for which both operands are broadcast, as numpy does again; each value is asked four times whether it is a constant of
Triton, and each builtin is called through two functions that only pass its arguments on. `apply` takes the first two
and the last away and keeps the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def apply() -> None:
    """For this process. Not idempotent."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    replace_functions_once_a_launch()
    keep_types_of_results()
    keep_numpy_types()
    pass_plain_values()
    call_builtins_directly()
    check_widths_once()
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


OPERATORS = {
    "add": ("create_add", "create_add", "create_fadd"),
    "sub": ("create_sub", "create_sub", "create_fsub"),
    "mul": ("create_mul", "create_mul", "create_fmul"),
    "lt": ("create_icmpSLT", "create_icmpULT", "create_fcmpOLT"),
    "le": ("create_icmpSLE", "create_icmpULE", "create_fcmpOLE"),
    "gt": ("create_icmpSGT", "create_icmpUGT", "create_fcmpOGT"),
    "ge": ("create_icmpSGE", "create_icmpUGE", "create_fcmpOGE"),
    "eq": ("create_icmpEQ", "create_icmpEQ", "create_fcmpOEQ"),
    "ne": ("create_icmpNE", "create_icmpNE", "create_fcmpUNE"),
    "and": ("create_and", "create_and", ""),
    "or": ("create_or", "create_or", ""),
    "floordiv": ("create_sdiv", "create_udiv", ""),
    "mod": ("create_srem", "create_urem", ""),
    "lshift": ("create_shl", "create_shl", ""),
    "rshift": ("create_ashr", "create_lshr", ""),
}
"""The builder's functions by operator: of signed integers, of unsigned ones and of floating-point numbers."""
PLAIN = {"int16": np.int16, "int32": np.int32, "int64": np.int64, "uint8": np.uint8, "fp32": np.float32}
"""Types that a number of Python takes when the other operand has them, by their names."""


def keep_types_of_results() -> None:
    """Keeps the types of the results of operators whose operands need no conversion. The first operation on two types
    is Triton's own."""
    stock = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        stock(tensor, scope)
        for operator, functions in OPERATORS.items():
            for reflected, name in ((False, f"__{operator}__"), (True, f"__r{operator}__")):
                if hasattr(tensor, name) and getattr(tensor, name).__name__ != "operator":
                    scope.set_attr(tensor, name, of_known_types(getattr(tensor, name), functions, reflected))

    interpreter._patch_lang_tensor = patch_tensor


def of_known_types(stock: Callable[..., Any], functions: tuple[str, str, str], reflected: bool) -> Callable[..., Any]:
    """Returns an operator of tensors that gives what `stock` does. Types are told apart by their names."""
    results = KNOWN_RESULTS.setdefault((functions, reflected), {})
    builder = interpreter.interpreter_builder

    def operator(self: Any, other: Any, **named: Any) -> Any:
        if isinstance(other, tl.constexpr):
            other = other.value
        is_tensor = isinstance(other, tl.tensor)
        key = (self.type.name, other.type.name if is_tensor else (type(other), other))
        known = results.get(key)
        if known is None:
            result = stock(self, other, **named)
            results[key] = known_result(self, other, functions, result)
            return result
        function, result_type, number = known
        if function is None:
            return stock(self, other, **named)
        other_handle = other.handle if is_tensor else number
        left, right = (other_handle, self.handle) if reflected else (self.handle, other_handle)
        return tl.tensor(getattr(builder, function)(left, right), result_type)

    return operator


KNOWN_RESULTS: dict[object, dict[object, tuple[str | None, Any, Any]]] = {}
"""By operator, and then by the types of its operands; each launch replaces the operators again."""


def known_result(tensor: Any, other: Any, functions: tuple[str, str, str], result: Any) -> tuple[str | None, Any, Any]:
    """Returns the builder's function, the type of its result, and the handle of a number; no function: these operands
    need more than numpy's broadcasting."""
    unknown, number, dtype = (None, None, None), None, tensor.dtype
    if dtype.is_ptr():
        moves = functions[0] == "create_add" and isinstance(other, tl.tensor) and other.dtype.is_int_signed()
        return ("create_addptr", result.type, None) if moves else unknown
    if isinstance(other, tl.tensor):
        widened = dtype == tl.int64 and other.dtype == tl.int32  # by numpy
        if other.dtype != dtype and not widened:
            return unknown
    elif isinstance(other, float) and other == 0:
        return unknown  # 0.0 and -0.0 are the same key
    elif dtype.name in PLAIN and (isinstance(other, int) or (isinstance(other, float) and dtype == tl.float32)):
        number = interpreter.TensorHandle(np.array([other], dtype=PLAIN[dtype.name]), dtype)
    else:
        return unknown
    if dtype.is_floating():
        function = functions[2]
    elif dtype.is_int():
        function = functions[dtype.is_int_unsigned()]
    else:
        return unknown
    if result.dtype not in (dtype, tl.int1):
        return unknown
    return function or None, result.type, number


def keep_numpy_types() -> None:
    kept: dict[str, Any] = {}
    stock = interpreter._get_np_dtype

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in kept:
            kept[name] = stock(dtype)
        return kept[name]

    interpreter._get_np_dtype = get_np_dtype


def pass_plain_values() -> None:
    """Most values that may be constants are none."""
    stock = tl.core._unwrap_if_constexpr
    plain = frozenset({int, bool, float, str, type(None), tl.tensor})

    def unwrap(value: Any) -> Any:
        return value if type(value) in plain else stock(value)

    tl.core._unwrap_if_constexpr = unwrap


def call_builtins_directly() -> None:
    """Without the function of the decorator, which checks that the argument is there that is added here."""
    checks_argument = tl.core.builtin(lambda: None).__code__
    stock = interpreter._patch_attr

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not checks_argument:
            return stock(obj, name, member, builder, scope)
        function, semantic = member.__wrapped__, interpreter.interpreter_semantic

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def check_widths_once() -> None:
    """Keeps the most bytes that an element of a type may have, and compares them as a handle is made."""
    most: dict[str, float] = {}

    def handle(self: Any, data: Any, dtype: Any, attr: dict[Any, Any] | None = None) -> None:
        limit = most.get(dtype.name)
        if limit is None:
            limit = float("inf") if dtype.is_ptr() else max(dtype.primitive_bitwidth, 8) // 8
            most[dtype.name] = limit
        if data.itemsize > limit:
            raise ValueError(f"elements of {data.itemsize} bytes are too wide for {dtype}")
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = handle


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
