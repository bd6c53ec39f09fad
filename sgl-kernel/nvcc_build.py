"""nvcc, for setup.py, for the record and for the checks: everything that compiles csrc/ does it with these options."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
DEFAULT_ARCHS = "120f"
"""One cubin for sm_120 and sm_121."""
OPTIONS = ("-std=c++17", "-O3", "--compiler-options=-fPIC")


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None) or shutil.which("nvcc")


def targets(archs: str) -> list[str]:
    """nvcc's options for names like "120f;90a"."""
    names = [name.strip() for name in archs.split(";") if name.strip()]
    if not names:
        raise SystemExit(f"SGL_KERNEL_ARCHS names no target; the default is {DEFAULT_ARCHS}")
    return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]


def compile_library(to: Path, archs: str, sources: Sequence[Path] | None = None, options: Sequence[str] = ()) -> str:
    """A shared library of csrc/*.cu, or of `sources`, which are compiled side by side. Returns what nvcc printed; exits
    with it where it fails."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit("nvcc is not on the PATH; install the CUDA toolkit (13.0 or newer) or set CUDA_HOME")
    files = sorted(SOURCES.glob("*.cu")) if sources is None else sources
    compiling = [nvcc, *OPTIONS, *options, f"-I{SOURCES}", *targets(archs), "--compile"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(files)) as pool:
        objects = [str(Path(folder, f"{file.stem}.o")) for file in files]
        commands = [[*compiling, str(file), "-o", each] for file, each in zip(files, objects, strict=True)]
        printed = list(pool.map(_run, commands))
        printed.append(_run([nvcc, "--shared", *targets(archs), *objects, "-o", str(to)]))
    return "".join(printed)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr
