"""Makes Triton launch its kernels here: compiled for a GPU that is not there, executed on the CPU over CPU tensors.

    with executing("sm_120") as launches:
        rmsnorm(x, weight, 1e-6)  # x on the CPU
    # launches: what each one was and did

Triton compiles as for a launch on that GPU: the same specialization of arguments, the same PTX. Nothing is assembled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang.ledger.ptx.launch import Executed, launch


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that was executed."""

    source: Any
    """What Triton compiled: the kernel, its types, constants and alignments."""
    grid: tuple[int, int, int]
    metadata: Any
    arguments: dict[str, Any]
    """The values that the compiled kernel takes, by the names of its parameters."""
    done: Executed


@contextlib.contextmanager
def executing(
    arch: str, note: Callable[[Launch], None] | None = None, counted: Callable[[str, int], bool] | None = None
) -> Iterator[None]:
    """Executes Triton's launches in the block as on `arch` ("sm_120"); `note` is called after each. `counted` says of a
    form's hash and a number of blocks whether what this launch asks of a card's units is counted; None: of none."""
    import triton
    from triton import knobs

    before, hook = triton.runtime.driver._active, knobs.runtime.add_stages_inspection_hook
    triton.runtime.driver.set_active(
        _Driver(arch, note or (lambda launch: None), counted or (lambda form, blocks: False))  # type: ignore[arg-type]
    )
    knobs.runtime.add_stages_inspection_hook = without_assembly  # type: ignore[assignment]
    try:
        yield
    finally:
        triton.runtime.driver._active = before
        knobs.runtime.add_stages_inspection_hook = hook


def without_assembly(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
) -> Any:
    """A hook of Triton: kernels are compiled to PTX, which then stands for the machine code. Called without
    arguments it names itself."""
    if stages is None:
        return "PTX only", "PTX only"
    stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return None


class _Driver:
    """What Triton asks of a GPU's driver."""

    def __init__(self, arch: str, note: Callable[[Launch], None], counted: Callable[[str, int], bool]) -> None:
        self._arch, self._note, self._counted = arch, note, counted
        self.utils = self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(self._arch.removeprefix("sm_")), 32)

    def get_current_device(self) -> str:
        return f"executed {self._arch}"  # what kernels remember what they compiled by

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": 101_376 if self._arch.startswith("sm_12") else 232_448, "multiprocessor_count": 188}

    def load_binary(self, name: str, binary: bytes, shared: int, device: Any) -> tuple[object, str, int, int, int]:
        return object(), binary.decode(), 0, 0, 1024

    def unload_module(self, module: object) -> None: ...

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return _Launcher(source, metadata, self._note, self._counted)


class _Launcher:
    """Executes the launches of one compiled kernel."""

    def __init__(
        self, source: Any, metadata: Any, note: Callable[[Launch], None], counted: Callable[[str, int], bool]
    ) -> None:
        self._source, self._metadata, self._note, self._counted = source, metadata, note, counted
        constants = {path[0] for path in source.constants}
        self._names = [(i, name) for i, name in enumerate(source.fn.arg_names) if i not in constants]

    def __call__(
        self, x: int, y: int, z: int, stream: Any, ptx: str, packed: Any, launch_metadata: Any, enter: Any,
        leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        metadata = self._metadata
        given = {name: arguments[i] for i, name in self._names}
        if x * y * z == 0:
            return
        threads, counting = metadata.num_warps * metadata.warp_size, self._counted(metadata.hash, x * y * z)
        done = launch(ptx, (x, y, z), given, metadata.shared, threads, counting)
        self._note(Launch(self._source, (x, y, z), metadata, given, done))
