"""The CUDA C++ kernels of sm120-sglang. Functions take addresses of device memory: no torch is needed."""

from sm120_sgl_kernel.collectives import AllReduceArguments, Collectives, Stall, installed_collectives
from sm120_sgl_kernel.library import Library, installed

__all__ = ["AllReduceArguments", "Collectives", "Library", "Stall", "installed", "installed_collectives"]
