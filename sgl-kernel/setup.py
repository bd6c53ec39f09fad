"""Compiles csrc/*.cu with nvcc into one library with a C interface, which belongs to no version of Python or torch.

SGL_KERNEL_ARCHS names the targets, "120f" if it is not set; several are separated by ";". CUDA_HOME says where nvcc is,
if it is not on the PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libsm120_sgl_kernel.so"
DEFAULT_ARCHS = "120f"
OPTIONS = ("-std=c++17", "-O3", "--shared", "--compiler-options=-fPIC")


def nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=f"{home}/bin" if home else None) or shutil.which("nvcc")
    if found is None:
        raise SystemExit("nvcc is not on the PATH; install the CUDA toolkit (13.0 or newer) or set CUDA_HOME")
    return found


def targets(archs: str) -> list[str]:
    """ "120f;90a" -> nvcc's options."""
    names = [name.strip() for name in archs.split(";") if name.strip()]
    if not names:
        raise SystemExit(f"SGL_KERNEL_ARCHS names no target; the default is {DEFAULT_ARCHS}")
    return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]


def compile_library(to: Path) -> None:
    archs = os.environ.get("SGL_KERNEL_ARCHS", DEFAULT_ARCHS)
    sources = sorted(map(str, SOURCES.glob("*.cu")))
    subprocess.run([nvcc(), *OPTIONS, *targets(archs), *sources, "-o", str(to)], check=True)


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        package = Path(self.build_lib, "sm120_sgl_kernel")
        package.mkdir(parents=True, exist_ok=True)
        compile_library(package / LIBRARY)


class PlatformWheel(bdist_wheel):
    """For this platform, and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class Platform(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel}, distclass=Platform)
