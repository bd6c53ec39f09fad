"""A module of kernels whose import kills the process, as a compiler's crash does."""

import os

os._exit(7)
