"""Compiles csrc/*.cu with nvcc into one library with a C interface, which belongs to no version of Python or torch.

SGL_KERNEL_ARCHS names the targets, "120f" if it is not set; several are separated by ";". CUDA_HOME says where nvcc is,
if it is not on the PATH.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))  # builds do not run where this file is

from nvcc_build import DEFAULT_ARCHS, compile_library

LIBRARY = "libsm120_sgl_kernel.so"


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        package = Path(self.build_lib, "sm120_sgl_kernel")
        package.mkdir(parents=True, exist_ok=True)
        compile_library(package / LIBRARY, os.environ.get("SGL_KERNEL_ARCHS", DEFAULT_ARCHS))


class PlatformWheel(bdist_wheel):
    """For this platform, and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class Platform(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel}, distclass=Platform)
