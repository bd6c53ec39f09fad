"""Compiles the kernels in `csrc` when they are first needed, and loads them, with the types of their C interface.

They need what Triton needs, a C compiler (`CC`, cc, gcc or clang), and belong to no version of Python or torch. Each
file is compiled for the instructions that it uses; which of the kernels run depends on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from sglang.srt.environ import envs
from sglang.srt.errors import UserError

SOURCES = Path(__file__).with_name("csrc")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "bf16")))
FILES: dict[str, tuple[str, ...]] = {"pool.c": (), "rate.c": (), "kernels_avx2.c": AVX2, "kernels_avx512.c": AVX512}
"""Files, and the options of each beside OPTIONS."""
OPTIONS = ("-std=gnu11", "-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fPIC", "-pthread")
COMPILERS = ("cc", "gcc", "clang")
ERROR_LINES = 6
MACHINES = ("x86_64", "AMD64")


class Matrix(ctypes.Structure):
    """`struct matrix` of experts.h, which says what the fields mean."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "scale", "factor", "bias")),
        *((name, ctypes.c_int64) for name in ("data_row", "data_expert", "scale_row", "scale_expert")),
        *((name, ctypes.c_int32) for name in ("rows", "cols", "element", "scale_type", "group", "rows_of_scale")),
    )


class Activated(ctypes.Structure):
    """`struct activation` of experts.h."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("alpha", "cubic", "offset", "limit")),
        ("gated", ctypes.c_int32),
    )


class Header(ctypes.Structure):
    """`struct header` of pool.c, which says what the fields mean."""

    _fields_ = (
        ("bell", ctypes.c_uint64), ("_pad0", ctypes.c_uint64 * 7),
        ("done", ctypes.c_uint64), ("_pad1", ctypes.c_uint64 * 7),
        ("tokens", ctypes.c_int32), ("top_k", ctypes.c_int32), ("_pad2", ctypes.c_uint64 * 7),
        ("fetched", ctypes.c_int32), ("_pad3", ctypes.c_uint32 * 15),
    )  # fmt: skip


class Mailbox(ctypes.Structure):
    """`struct mailbox` of pool.c: addresses of the parts of a request."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("header", "ids", "weights", "x", "out"))


def find_compiler() -> str | None:
    """Returns the C compiler; None if there is none."""
    asked = os.environ.get("CC")
    return shutil.which(asked) if asked else next(filter(None, map(shutil.which, COMPILERS)), None)


def _library_file(compiler: str) -> Path:
    """Returns where the library is kept that these sources and options make."""
    digest = hashlib.sha256(repr((FILES, OPTIONS, compiler)).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return envs.SGLANG_CACHE_DIR / "cpu_experts" / f"{digest.hexdigest()[:24]}.so"


def compile_library() -> Path:
    """Compiles the library unless that has been done, and returns its file. Raises UserError."""
    compiler, machine = find_compiler(), platform.machine()
    if machine not in MACHINES:
        raise UserError(f"CPUs cannot compute experts: there are kernels for x86-64, and this machine is {machine}")
    if compiler is None:
        raise UserError("CPUs cannot compute experts: there is no C compiler (install gcc, or set CC)")
    to = _library_file(compiler)
    if to.exists():
        return to
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        objects = [str(Path(folder, f"{name}.o")) for name in FILES]
        compiling = [
            [compiler, *OPTIONS, *options, "-c", str(SOURCES / name), "-o", each]
            for (name, options), each in zip(FILES.items(), objects, strict=True)
        ]
        library = str(Path(folder, "library.so"))
        for command in (*compiling, [compiler, "-shared", "-pthread", *objects, "-o", library]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                errors = "\n".join(done.stderr.splitlines()[:ERROR_LINES])
                raise UserError(f"The CPUs' kernels of experts do not compile: {' '.join(command)}\n{errors}")
        os.replace(library, to)  # other processes may compile the same
    return to


@functools.cache
def load_library() -> ctypes.CDLL:
    """Returns the compiled library. Raises UserError where it cannot be had."""
    library = ctypes.CDLL(str(compile_library()))
    pointer, int_pointer = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)
    signatures = {
        "kernels": (ctypes.c_char_p, [ctypes.c_int]),
        "create": (pointer, [*[ctypes.c_int, int_pointer] * 2, *[ctypes.c_int] * 3]),
        "first_row": (ctypes.c_int, [ctypes.c_int] * 3),
        "add_layer": (
            ctypes.c_int, [pointer, ctypes.POINTER(Matrix), ctypes.POINTER(Matrix), ctypes.POINTER(Activated)],
        ),
        "run": (ctypes.c_int, [pointer, ctypes.c_int, ctypes.c_int, ctypes.c_int, *[pointer] * 4]),
        "connect": (ctypes.c_int, [pointer, ctypes.POINTER(Mailbox), ctypes.c_double, ctypes.c_double]),
        "totals": (None, [pointer, pointer]),
        "read_rate": (ctypes.c_double, [ctypes.c_int, int_pointer, ctypes.c_uint64, ctypes.c_double]),
        "destroy": (None, [pointer]),
        "sizes": (None, [pointer]),
    }  # fmt: skip
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"cpu_experts_{name}")
        function.restype, function.argtypes = result, arguments
    sizes = (ctypes.c_int32 * 4)()
    library.cpu_experts_sizes(sizes)
    assert [*sizes] == [ctypes.sizeof(each) for each in (Matrix, Activated, Header, Mailbox)], "other types in C"
    return library
