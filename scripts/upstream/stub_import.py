"""Makes this process believe that it runs upstream SGLang on an SM120 card, so that upstream's code chooses its tiles.

    enter(tree)                          # once, in a process of its own
    publish_defaults()
    launcher = find(tree, "context_attention_fwd", "prefill_attention.py")

Upstream's modules are imported for real, from `tree`, and so is what every installation of this project has. What is
faked is the device (torch.cuda, Triton's driver) and the packages of upstream's dependencies that need a GPU or are of
no concern here. What happens to be installed beside that is hidden, so that a tree does the same everywhere. A module
that fails to import keeps what it had defined; whatever it lacks becomes a `Stub`, which refuses to take part in any
decision.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from upstream.packages import project_distributions, stray_modules
from upstream.tree import Tree
from upstream.verify import LIMIT

DEVICE_NAME = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
CAPABILITY = (12, 0)

DEPENDENCIES = frozenset(
    """
    IPython PIL anthropic apache_tvm_ffi av blobfile compressed_tensors cuda cutlass datasets decord dill einops
    flashinfer gguf grpc interegular llguidance mistral_common modelscope msgspec openai openai_harmony orjson outlines
    partial_json_parser prometheus_client py_spy pybase64 pynvml python_multipart quack remote_pdb requests scipy
    sentencepiece setproctitle sgl_kernel sglang_kernel smg_grpc_proto soundfile tiktoken timm torch_memory_saver
    torchao torchaudio torchvision triton_kernels tvm_ffi uvloop watchfiles xgrammar zmq
    """.split()
)
"""Installed beside upstream, so its `try: import ...` must find them; stubbed unless this project requires them, too.
What is not listed (deep_gemm, aiter, vllm, ...) is missing on an SM120 machine as well."""

FAILED_IMPORTS: dict[str, str] = {}
"""Upstream modules that did not import to their end, with the error."""


class StubUsed(RuntimeError):
    """A launch depends on something that exists only as a stub; its tile would be invented."""


class Stub:
    """Stands for anything of a missing module: callable, subscriptable, subclassable, and never true or false."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type)):
            return args[0]  # used as a decorator
        return Stub(f"{self.__name__}()")

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")

    def __getitem__(self, index: Any) -> Stub:
        return Stub(f"{self.__name__}[]")

    def __or__(self, other: Any) -> Stub:  # in annotations
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __subclasscheck__(self, subclass: Any) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        raise StubUsed(f"a condition depends on {self.__name__}, which is not available here")


def _fill_with_stubs(module: types.ModuleType) -> None:
    def missing(name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{module.__name__}.{name}")

    module.__getattr__ = missing  # type: ignore[method-assign]


class _StubLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        _fill_with_stubs(module)


class _LenientLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "sglang":
            return  # its __init__ imports the client library
        try:
            super().exec_module(module)
        except Exception as error:
            FAILED_IMPORTS[module.__name__] = f"{type(error).__name__}: {error}"
            _fill_with_stubs(module)


@dataclass(frozen=True)
class _UpstreamFinder(importlib.abc.MetaPathFinder):
    """Finds `sglang` in `tree` and nowhere else."""

    tree: str

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "sglang":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, [self.tree] if path is None else path)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r} in {self.tree}", name=name)
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _LenientLoader(spec.loader.name, spec.loader.path)
        return spec


class _InstalledFinder(importlib.abc.MetaPathFinder):
    """Python's own search of sys.path; of what is installed there, it finds what belongs to this project."""

    def __init__(self) -> None:
        self.ours = project_distributions()
        self.hidden = stray_modules(self.ours)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is None and name in self.hidden:
            return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        for found in importlib.machinery.PathFinder.find_distributions(
            context or metadata.DistributionFinder.Context()
        ):
            if canonicalize_name(found.metadata["Name"]) in self.ours:
                yield found

    def invalidate_caches(self) -> None:
        importlib.machinery.PathFinder.invalidate_caches()


class _DependencyFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in DEPENDENCIES:
            return None
        return importlib.machinery.ModuleSpec(name, _StubLoader(), is_package=True)


def enter(tree: Path) -> None:
    """Prepares this process: `import sglang` finds `tree`, the device is an SM120 card. There is no way back."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]  # ours; what was imported from it stays usable
    installed = _InstalledFinder()
    sys.meta_path[:] = [installed if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
    sys.meta_path.insert(0, _UpstreamFinder(str(tree)))
    sys.meta_path.append(_DependencyFinder())
    _fake_torch()
    _fake_triton()


def _fake_torch() -> None:
    import torch

    properties = types.SimpleNamespace(
        name=DEVICE_NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=188,
        total_memory=96 << 30,
        warp_size=32,
        L2_cache_size=128 << 20,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=LIMIT,
        shared_memory_per_multiprocessor=102_400,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=1_536,
    )
    faked: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_name": DEVICE_NAME,
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
        "mem_get_info": (90 << 30, 96 << 30),
        "set_device": None,
        "synchronize": None,
        "_exchange_device": 0,  # of the context manager torch.cuda.device
        "_maybe_exchange_device": 0,
    }
    for name, value in faked.items():
        setattr(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)
    torch.version.cuda = "13.0"  # type: ignore[attr-defined]
    torch.library.register_fake = _tolerant(torch.library.register_fake)  # its operator may belong to a stubbed package


def _tolerant(register: Callable[..., Any]) -> Callable[..., Any]:
    def register_fake(name: Any, function: Any = None, /, **kwargs: Any) -> Any:
        if function is None:
            return lambda fn: register_fake(name, fn, **kwargs)
        with contextlib.suppress(RuntimeError):
            register(name, function, **kwargs)
        return function

    return register_fake


def _fake_triton() -> None:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("meta")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

    triton.runtime.driver.set_active(Driver())


class NotFound(LookupError):
    """No file of that name defines the function."""


@functools.cache
def _tree(path: Path) -> Tree:
    return Tree(path)


@functools.cache
def find(tree: Path, symbol: str, file: str) -> Any:
    """Upstream's `symbol` from the file of that name that defines it, if several do from the one with Triton kernels.

    Raises NotFound, and ImportError if the file could only be loaded in part.
    """
    found = [path for path in _tree(tree).files_defining(symbol) if path.endswith(f"/{file}")]
    found = [path for path in found if "/hardware_backend/" not in path]  # of other makers' devices
    found = [path for path in found if "@triton.jit" in (tree / path).read_text(encoding="utf-8-sig")] or found
    if not found:
        raise NotFound(f"no {file} of this tree defines {symbol}()")
    return getattr(_whole(found[0].removesuffix(".py").replace("/", ".")), symbol)


def _whole(name: str) -> types.ModuleType:
    """The module of that name. Raises ImportError if it was loaded in part."""
    module = importlib.import_module(name)
    if name in FAILED_IMPORTS:
        raise ImportError(f"{name} does not import: {FAILED_IMPORTS[name]}.{_missing_packages()}")
    return module


def _missing_packages() -> str:
    """The packages that may be behind a failure: those that a module of upstream's wants and that are neither here nor
    stubs."""
    missing = [f"{name}: {error}" for name, error in FAILED_IMPORTS.items() if error.startswith("ModuleNotFoundError")]
    if not missing:
        return ""
    return f" What upstream requires belongs into stub_import.DEPENDENCIES; modules that lack one: {'; '.join(missing)}"


def publish_defaults() -> None:
    """Tells upstream's code that the server runs with default arguments, as its launchers ask for some of them.

    Raises ImportError, with the modules that did not import, where such arguments cannot be made.
    """
    module = _whole("sglang.srt.server_args")
    try:
        arguments = module.ServerArgs(model_path="dummy")  # upstream resolves nothing for a model of this name
        if hasattr(arguments, "resolve_once"):
            arguments.resolve_once()
        module.set_global_server_args_for_scheduler(arguments)
    except Exception as error:  # of upstream's code, most often over a stub
        text = f"upstream's default arguments cannot be made: {type(error).__name__}: {error}.{_missing_packages()}"
        raise ImportError(text) from error
