"""What a GPU computes beside what the executor of PTX computes of the same code, byte by byte.

    python lab/gpu/ptx_against_gpu.py record --out launches    # GPU; three minutes
    python lab/gpu/ptx_against_gpu.py compare launches         # no GPU

`record` runs files of kernel tests on the GPU (all of Triton's kernels', if none is named), with the tiles of SM120
(SGLANG_FORCE_ARCH), and keeps of each form's first launches the PTX, the arguments before and the tensors after.
Several files run side by side, since compiling takes most of the time; in each one no test begins after so many
seconds, the first case of every test before others. `compare` executes each launch and prints a line: equal, or the
largest difference in units of the last place of the tensor's type; or why it is refused (`wgmma`). Kernels with
approximate functions and products may differ in the last places; others must be equal.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "SGLANG_RECORD_LAUNCHES"
ENDED_EARLY = 2
"""pytest's status if `first_cases` ended it."""
LAUNCHES_OF_A_FORM = 2
MOST_UNITS = 16
"""Last places that count as close: a tensor core adds products in an order and precision of its own."""
MOST_BYTES = 8 << 20
"""Of the tensors of a launch; larger launches are not kept."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record")
    record.add_argument("--out", type=Path, required=True)
    record.add_argument("--jobs", type=int, default=12, help="files that run side by side")
    record.add_argument("--seconds", type=int, default=12, help="after which no further test of a file begins")
    record.add_argument("files", nargs="*", help="files of kernel tests; none: all")
    compare = commands.add_parser("compare")
    compare.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if args.command == "compare":
        return compare_all(args.folder)
    args.out.mkdir(parents=True, exist_ok=True)
    files = args.files or kernel_tests()
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda file: record_file(file, args.out, args.seconds), files))
    for file, (status, output) in zip(files, results, strict=True):
        if status not in (0, ENDED_EARLY):
            print(output[-4000:])
        print(f"{file}: {'passed' if status == 0 else 'ended early' if status == ENDED_EARLY else 'failed'}")
    print(f"{len(list(args.out.glob('*.pt')))} launches of {len(list(args.out.glob('*.ptx')))} forms")
    return 1 if any(status not in (0, ENDED_EARLY) for status, _ in results) else 0


def kernel_tests() -> list[str]:
    """Returns the files with tests of Triton's kernels, by their path in the repository."""
    files = sorted((ROOT / "test" / "srt").rglob("test_*.py"))
    return [file.relative_to(ROOT).as_posix() for file in files if "interpreter.kernel_test" in file.read_text()]


def record_file(file: str, folder: Path, seconds: int) -> tuple[int, str]:
    """Runs one file of tests and keeps its launches. Returns pytest's status and output."""
    given = os.environ.get("PYTHONPATH")
    paths = [*(str(ROOT / part) for part in ("python", "test", "scripts", "lab/gpu")), *([given] if given else [])]
    environment = os.environ | {
        FOLDER: str(folder.resolve()), "SGLANG_FORCE_ARCH": "sm_120", "PYTHONPATH": os.pathsep.join(paths),
        "FIRST_CASES_SECONDS": str(seconds),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["-p", "first_cases", "-p", "ptx_against_gpu", "-k", "not in_interpreter", file]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def keep_launches(folder: Path) -> None:
    """Keeps launches of this process from now on."""
    import triton

    driver = triton.runtime.driver.active
    stock, kept = driver.launcher_cls, Counter[str]()

    class Keeping:
        def __init__(self, source: Any, metadata: Any) -> None:
            self._launch, self._source, self._metadata = stock(source, metadata), source, metadata
            constants = {path[0] for path in source.constants}
            self._names = [(i, name) for i, name in enumerate(source.fn.arg_names) if i not in constants]

        def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
            values = rest[6:]
            given = {name: values[i] for i, name in self._names}
            key = self._metadata.hash
            tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
            size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            if kept[key] >= LAUNCHES_OF_A_FORM or size > MOST_BYTES or is_capturing():
                self._launch(x, y, z, *rest)
                return
            before = on_cpu(given)
            self._launch(x, y, z, *rest)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            after = on_cpu({name: value for name, value in given.items() if isinstance(value, torch.Tensor)})
            content = {
                "kernel": self._source.fn.__name__, "hash": key, "grid": (x, y, z), "before": before, "after": after,
                "shared": self._metadata.shared, "threads": self._metadata.num_warps * 32,
            }  # fmt: skip
            torch.save(content, folder / f"{key[:12]}-{os.getpid()}-{kept[key]}.pt")
            kept[key] += 1

    driver.launcher_cls = Keeping

    compiled = triton.compiler.CompiledKernel.__init__

    def with_ptx(self: Any, *args: Any) -> None:
        compiled(self, *args)
        (folder / f"{self.metadata.hash[:12]}.ptx").write_text(self.asm["ptx"])

    triton.compiler.CompiledKernel.__init__ = with_ptx


def is_capturing() -> bool:
    """Returns whether launches go to a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with all storages of tensors copied to the CPU; what shares one there shares one here."""
    copies: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        copy = copies.setdefault(storage.data_ptr(), storage.cpu().clone())
        return torch.empty(0, dtype=value.dtype).set_(copy, value.storage_offset(), value.shape, value.stride())

    return {name: copied(value) for name, value in values.items()}


def pytest_configure() -> None:
    """Called by pytest, for which this file is a plugin while it records."""
    if folder := os.environ.get(FOLDER):
        keep_launches(Path(folder))


def compare_all(folder: Path) -> int:
    """Executes what was kept and prints how it differs. Returns 1 if a tensor differs by more than MOST_UNITS."""
    from sglang.ledger.ptx.launch import launch
    from sglang.ledger.ptx.problems import Hazard, Unsupported

    totals: Counter[str] = Counter()
    for path in sorted(folder.glob("*.pt")):
        kept = torch.load(path, weights_only=False)
        arguments = kept["before"]
        try:
            ptx = (folder / f"{kept['hash'][:12]}.ptx").read_text()
            launch(ptx, kept["grid"], arguments, kept["shared"], kept["threads"])
        except (Unsupported, Hazard) as error:
            totals["refused" if isinstance(error, Unsupported) else "hazard"] += 1
            print(f"{path.stem} {kept['kernel']}: {error}")
            continue
        worst = max((difference(arguments[name], want) for name, want in kept["after"].items()), default=0)
        totals["equal" if worst == 0 else "close" if worst <= MOST_UNITS else "different"] += 1
        print(f"{path.stem} {kept['kernel']}: {worst or 'equal'}")
    print(dict(totals))
    return 1 if totals["different"] or totals["hazard"] else 0


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Returns the largest difference in units of the last place, of integers the largest difference. The unit is that
    of the value or, where that is larger, of the tensor's root mean square: sums that cancel keep the errors of what
    they add."""
    ours, theirs = ours.contiguous().reshape(-1), theirs.contiguous().reshape(-1)
    if not theirs.numel() or torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
        return 0
    if not ours.is_floating_point() or ours.element_size() == 1:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
        return int((ours.view(bits).long() - theirs.view(bits).long()).abs().max())
    a, b = ours.double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    finite = b[b.isfinite()]
    typical = float(finite.square().mean().sqrt()) if len(finite) else 0.0
    unit = torch.finfo(ours.dtype).eps * torch.clamp(b.abs(), min=typical)
    units = torch.where(same, 0.0, (a - b).abs() / unit)
    return math.ceil(float(units.nan_to_num(math.inf, math.inf).max().clamp(max=1e18)))


if __name__ == "__main__":
    sys.exit(main())
