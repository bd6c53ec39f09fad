"""Installs NIXL, Mooncake and LMCache into a directory of their own, for `make stores`: python install_stores.py DIR

They ask for other versions of packages than the server has, and LMCache for CUDA. So each is installed alone, with the
few packages that its server imports and this environment lacks. Where libibverbs is missing, which Mooncake is linked
to, Debian's packages are unpacked beside them; nothing is installed in the system.
"""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "nixl": ("nixl-cu12==1.5.1",),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
    "lmcache": ("lmcache==0.5.6", "numba", "llvmlite", "py-cpuinfo", "cachetools"),
}
"""By the directory, whose name is that of a backend."""
LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
INSTALLED = ".installed"


def install(folder: Path) -> None:
    """Installs what is not there yet. Raises CalledProcessError."""
    for name, packages in PACKAGES.items():
        target = folder / name
        wanted = " ".join(packages)
        if (target / INSTALLED).is_file() and (target / INSTALLED).read_text() == wanted:
            continue
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, *packages], check=True)
        (target / INSTALLED).write_text(wanted)
    if ctypes.util.find_library("ibverbs") is None:
        unpack_libraries(folder / "libraries")


def unpack_libraries(folder: Path) -> None:
    """Unpacks libibverbs and what it needs, without installing them."""
    if (folder / INSTALLED).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *LIBRARIES], cwd=folder, check=True, stderr=subprocess.DEVNULL)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True)
    (folder / INSTALLED).touch()


if __name__ == "__main__":
    install(Path(sys.argv[1]))
