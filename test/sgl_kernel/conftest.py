"""Compilers for the tests of sgl-kernel, which need the package neither installed nor built."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sgl-kernel"
ON_CPU = Path(__file__).parent / "on_cpu"


def load_file(path: Path) -> ModuleType:
    """A module that other tests do not find: what is installed decides which kernels the server takes."""
    spec = importlib.util.spec_from_file_location(f"uninstalled_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def library_module() -> ModuleType:
    return load_file(PACKAGE / "sm120_sgl_kernel" / "library.py")


@pytest.fixture(scope="session")
def cpu_collectives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collectives compiled for the CPU: a rank is a process, each GPU thread a thread. Skips without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    to = tmp_path_factory.mktemp("sgl_kernel") / "all_reduce_on_cpu.so"
    options = ["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-pthread"]
    includes = [f"-I{PACKAGE / 'csrc'}", f"-I{ON_CPU / 'threads'}"]
    subprocess.run([compiler, *options, *includes, str(ON_CPU / "all_reduce_library.cpp"), "-o", str(to)], check=True)
    return to


@pytest.fixture(scope="session")
def record() -> ModuleType:
    return load_file(PACKAGE / "record.py")


@pytest.fixture(scope="session")
def cpu_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels compiled for the CPU, each thread a fiber. Skips where there is no C++ compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    to = tmp_path_factory.mktemp("sgl_kernel") / "mixed_moe_on_cpu.so"
    options = ["-std=c++17", "-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    includes = [f"-I{PACKAGE / 'csrc'}", f"-I{ON_CPU}"]
    subprocess.run([compiler, *options, *includes, str(ON_CPU / "mixed_moe.cpp"), "-o", str(to)], check=True)
    return to


@pytest.fixture(scope="session")
def executed_mixed_moe(library_module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> object:
    """The kernels compiled for SM120, their PTX executed. Skips where there is no nvcc."""
    from sgl_kernel import executed

    nvcc = load_file(PACKAGE / "nvcc_build.py").find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    to = tmp_path_factory.mktemp("sgl_kernel") / "mixed_moe.ptx"
    return executed.ExecutedMixedMoe(library_module, executed.compiled(PACKAGE / "csrc" / "mixed_moe.cu", nvcc, to))
