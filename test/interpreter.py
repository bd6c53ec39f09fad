"""Kernel tests without a GPU: Triton's interpreter, repaired, in a process of its own.

TRITON_INTERPRET must be set before a kernel's module is imported, and other tests import the same modules to compile
them, so kernel tests run in a subprocess. A file of kernel tests reads

    import interpreter                       # before anything that imports Triton
    from sglang.srt... import some_kernel

    @interpreter.kernel_test                 # natively with a GPU (marker `gpu`), interpreted in the subprocess
    def test_some_kernel(): x = torch.randn(..., device=interpreter.DEVICE) ...

    @interpreter.in_two_parts
    def test_in_interpreter(part): interpreter.run_file(__file__, part)

What is repaired (Triton 3.6 to 3.9 hold bfloat16 and float8 as raw integers in numpy arrays): casts, which truncate or
wrap; arithmetic and `tl.dot`, which use the raw bits. Here both go through fp32, casts with torch's rounding, and
float8 saturates as the GPU's conversion does. Fused multiplications and additions round twice up to 3.8, here
once. `tl.dot_scaled`, which is unsupported up to 3.7 and wrong for e4m3 scales
after, is the exact product of the dequantized operands.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from interpreter_processes import run_pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXECUTED = os.environ.get("SGLANG_EXECUTE_PTX", "")
"""The GPU whose PTX is executed on the CPU, such as "sm_120" (`python -m sglang.ledger execute`); empty: none."""
ON_CPU = INTERPRETED or EXECUTED != ""
"""Tests are smaller then, and choose kernels as for SM120."""
DEVICE = "cpu" if ON_CPU else "cuda"

_Test = TypeVar("_Test", bound=Callable[..., Any])


def kernel_test(test: _Test) -> _Test:
    """Runs interpreted in the subprocess and natively where there is a GPU; skipped otherwise."""
    if ON_CPU:
        return test
    needs_gpu = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU (interpreted: test_in_interpreter)"
    )
    return pytest.mark.gpu(needs_gpu(test))


SAME_BITS = {"rtol": 2.0**-7, "atol": 2.0**-12} if INTERPRETED else {"rtol": 0.0, "atol": 0.0}
"""For `torch.testing.assert_close` of what one kernel gives for equal rows of different launches. In the interpreter
products are numpy's, whose rounding depends on the sizes of the matrices and on the processor: one unit of bfloat16."""

in_two_parts = pytest.mark.parametrize(
    "part", ["not thorough", pytest.param("thorough", marks=pytest.mark.thorough)], ids=["quick", "others"]
)
"""For `test_in_interpreter(part)`: `make test` runs each value of each parameter once (`pairs.mark_others`), or what a
test's own mark says, and `make thorough` the other cases."""
EVERY_CASE = "thorough or not thorough"
"""For files that only `make thorough` runs."""


def run_file(path: str, part: str) -> None:
    """Run the kernel tests of one file, those that the expression of marks selects, in the repaired interpreter. Raises
    AssertionError with pytest's output."""
    if ON_CPU:
        pytest.skip("this is the interpreted run, or the executed one")
    # Without the plugins that no kernel test needs: that of schemathesis takes a second, the others half of one.
    unneeded = ("cacheprovider", "schemathesis", "hypothesispytest", "anyio", "xdist", "xdist.looponfail")
    arguments = ["-x", *(word for name in unneeded for word in ("-p", f"no:{name}")), "-m", part, path]
    status, output = run_pytest(arguments)
    if part == "thorough" and status == pytest.ExitCode.NO_TESTS_COLLECTED:
        return  # `make test` runs all cases of this file
    assert status == 0, f"pytest {' '.join(arguments)}\n{output[-8000:]}"
    assert " passed" in output, output


def repair() -> None:
    """Patch the interpreter of this process. Idempotent."""
    import interpreter_speed
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if InterpreterBuilder.create_dot.__module__ == __name__:
        return
    # By name: Triton computes the hash of a type each time.
    bf16, e4m3, e5m2 = (dtype.name for dtype in (tl.bfloat16, tl.float8e4nv, tl.float8e5))
    exotic = {bf16: torch.bfloat16, e4m3: torch.float8_e4m3fn, e5m2: torch.float8_e5m2}
    raw = {bf16: torch.uint16, e4m3: torch.uint8, e5m2: torch.uint8}
    largest = {e4m3: 448.0, e5m2: 57344.0}

    def widen(handle: Any) -> np.ndarray:
        name = handle.dtype.scalar.name
        if name not in exotic:
            return handle.data
        return torch.from_numpy(np.array(handle.data)).view(exotic[name]).float().numpy()

    def narrow(data: np.ndarray, dtype: Any) -> np.ndarray:
        name = dtype.name
        if name not in exotic:
            return data.astype(interpreter._get_np_dtype(dtype))
        values = torch.from_numpy(np.array(data, dtype=np.float32))
        if name in largest:
            values = values.clamp(-largest[name], largest[name])
        return values.to(exotic[name]).view(raw[name]).numpy()

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        return TensorHandle(narrow(widen(src), dst_type.scalar), dst_type.scalar)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if rounding_mode not in (None, ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"rounding mode {rounding_mode} in the repaired interpreter")
        return cast_impl(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(widen(a).astype(np.float32), widen(b).astype(np.float32))
        return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    e2m1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
    e2m1 = np.concatenate([e2m1, -e2m1])

    def unscaled(handle: Any, kind: Any, axis: int) -> np.ndarray:
        """The values of an operand of `dot_scaled`, packed or not along the axis."""
        if kind != ir.ScaleDotElemTypeTY.E2M1:
            return widen(handle).astype(np.float32)
        packed = handle.data.view(np.uint8)
        both = np.stack((e2m1[packed & 15], e2m1[packed >> 4]), axis=axis + 1)
        shape = list(packed.shape)
        shape[axis] *= 2
        return both.reshape(shape)

    def scales(handle: Any, columns: int) -> np.ndarray:
        """[R, K / group] as stored -> [R, K]. Integers are exponents with bias 127."""
        if handle.dtype.scalar.is_int():
            stored = handle.data.view(np.uint8).astype(np.int32)
            values = np.where(stored == 255, np.nan, np.ldexp(np.float32(1), stored - 127)).astype(np.float32)
        else:
            values = widen(handle).astype(np.float32)
        return np.repeat(values, columns // values.shape[-1], axis=-1)

    def create_dot_scaled(
        self: Any, a: Any, a_scale: Any, a_kind: Any, b: Any, b_scale: Any, b_kind: Any, fast_math: Any,
        a_k_pack: bool, b_k_pack: bool, acc: Any,
    ) -> Any:  # fmt: skip
        left = unscaled(a, a_kind, 1 if a_k_pack else 0)
        right = unscaled(b, b_kind, 0 if b_k_pack else 1)
        if a_scale is not None:
            left = left * scales(a_scale, left.shape[1])
        if b_scale is not None:
            right = right * scales(b_scale, right.shape[0]).T
        return TensorHandle((np.matmul(left, right) + acc.data).astype(acc.data.dtype), acc.dtype.scalar)

    class Format(str):
        """Triton 3.6 wants the constexpr that the interpreter has unwrapped."""

        @property
        def value(self) -> str:
            return str(self)

    stock_dot_scaled = TritonSemantic.dot_scaled

    def dot_scaled(
        self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, *more: Any, **named: Any
    ) -> Any:
        if isinstance(a_format, str):
            a_format, b_format = Format(a_format), Format(b_format)
        return stock_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, *more, **named)

    stock_splat = InterpreterBuilder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        out = stock_splat(self, ret_ty, arg)
        # The splat of a comparison of scalars comes in their type, which no mask may be.
        return TensorHandle(out.data.astype(np.bool_), tl.int1) if ret_ty.scalar == tl.int1 else out

    stock_binary_op = InterpreterBuilder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        dtype = lhs.dtype.scalar
        if dtype.name not in exotic:
            return stock_binary_op(self, lhs, rhs, op)
        out = op(widen(lhs), widen(rhs))
        return TensorHandle(out if out.dtype == np.bool_ else narrow(out, dtype), dtype)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        """fp32. The sum in fp64 is rounded to odd, so that fp32 rounds what it was and not what fp64 made of it."""
        product, addend = widen(x).astype(np.float64) * widen(y).astype(np.float64), widen(z).astype(np.float64)
        total = product + addend
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)
        towards = np.nextafter(total, np.where(error > 0.0, np.inf, -np.inf))
        even = (total.view(np.int64) & 1) == 0
        return TensorHandle(np.where((error != 0.0) & even, towards, total).astype(np.float32), z.dtype.scalar)

    stock_patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        stock_patch_tensor(tensor, scope)
        # Scalars are arrays of one element, which numpy 2.4 no longer takes for a number as Triton 3.6 asks it to.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_fma = create_fma
    InterpreterBuilder.create_splat = create_splat
    InterpreterBuilder.create_dot_scaled = create_dot_scaled
    TritonSemantic.dot_scaled = dot_scaled
    InterpreterBuilder.binary_op = binary_op
    interpreter_speed.apply()


if INTERPRETED:
    repair()
elif EXECUTED:
    from sglang.ledger.ptx.record import execute_all_launches

    execute_all_launches(EXECUTED)
