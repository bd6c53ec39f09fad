"""Triton's launches on a machine without the GPU, or on tensors without memory: noted, not made.

    with noted_launches("sm_120", note):
        rmsnorm(torch.empty(4, 4096, device="meta"), ...)   # calls note(kernel, what Triton would compile)

Triton derives what it compiles from the arguments: types, constants, and which addresses and numbers are multiples of
16 or 1. So launches of tensors with other values, of which only the addresses are known, compile to the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

Note = Callable[[Any, dict[str, Any]], "NotLaunched"]
"""Gets the kernel and the arguments of `knobs.runtime.jit_cache_hook`'s `compile`, and returns what stands for the
compiled kernel."""


class NotLaunched:
    """Stands for a compiled kernel in later launches of the same form; without it Triton would derive the form again
    each time."""

    function = packed_metadata = None

    def launch_metadata(self, *launch: Any) -> None:
        """Is called at every launch of the form after the first one."""

    @staticmethod
    def run(*launch: Any) -> None: ...


@contextlib.contextmanager
def noted_launches(arch: str, note: Note) -> Iterator[None]:
    """Calls `note` for each form that Triton would compile in the block, as on `arch` ("sm_120"). Tensors may be meta
    tensors: they get addresses of their own, storages at multiples of 256."""
    import triton

    noted: list[tuple[dict[str, Any], str]] = []

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernels = fn.jit_function.device_caches[arch][0]
        kernels[key] = note(fn.jit_function, compile)
        noted.append((kernels, key))
        return True  # nothing is compiled, and so nothing launched

    with as_on_gpu(arch), meta_addresses():
        before = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = hook  # type: ignore[assignment]
        try:
            yield
        finally:
            triton.knobs.runtime.jit_cache_hook = before
            for kernels, key in noted:
                del kernels[key]


def gpu_target(arch: str) -> Any:
    """Returns what Triton compiles for on `arch` ("sm_120")."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


@contextlib.contextmanager
def as_on_gpu(arch: str) -> Iterator[None]:
    """Makes Triton believe in a GPU of this architecture. Kernels that met another one forget it before, and this one
    afterwards."""
    import triton

    class Driver:
        def get_current_target(self) -> Any:
            return gpu_target(arch)

        def get_current_device(self) -> str:
            return arch  # what kernels remember their binders by

        def get_current_stream(self, device: Any = None) -> int:
            return 0

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver())  # type: ignore[arg-type]
    try:
        yield
    finally:
        triton.runtime.driver._active = before


@contextlib.contextmanager
def meta_addresses() -> Iterator[None]:
    """Gives meta tensors distinct addresses instead of 0: launchers compare addresses, and Triton checks their
    alignment."""
    import torch

    original = torch.Tensor.data_ptr
    places: dict[int, tuple[int, Any]] = {}
    numbers = itertools.count(1)

    def data_ptr(tensor: torch.Tensor) -> int:
        if not tensor.is_meta:
            return original(tensor)
        storage = tensor.untyped_storage()
        known = places.get(storage._cdata)
        if known is None:  # keeps the storage, so that its id is not reused
            known = places[storage._cdata] = next(numbers) << 40, storage
        return known[0] + int(tensor.storage_offset()) * tensor.element_size()

    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.data_ptr = original  # type: ignore[method-assign]
