"""The CUDA C++ kernels of sm120-sglang. Functions take addresses of device memory: no torch is needed."""

from sm120_sgl_kernel.library import Library, installed

__all__ = ["Library", "installed"]
