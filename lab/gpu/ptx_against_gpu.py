"""What a GPU computes beside what the executor of PTX computes of the same code, byte by byte.

    python lab/gpu/ptx_against_gpu.py record --out launches test/srt/layers/test_triton_ops.py   # GPU; ten minutes
    python lab/gpu/ptx_against_gpu.py compare launches                                           # no GPU

`record` runs files of kernel tests on the GPU, with the tiles of SM120 (SGLANG_FORCE_ARCH), and keeps of each form's
first launches the PTX, the arguments before and the tensors after. `compare` executes each and prints a line: equal,
or the largest difference in units of the last place of the tensor's type; or why it is refused (`wgmma`). Kernels with
approximate functions and products may differ in the last places; others must be equal. Two files of attention and
products and five of other kernels give over 300 launches.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "SGLANG_RECORD_LAUNCHES"
LAUNCHES_OF_A_FORM = 2
MOST_BYTES = 64 << 20
"""Of the tensors of a launch; larger launches are not kept."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record")
    record.add_argument("--out", type=Path, required=True)
    record.add_argument("files", nargs="+")
    compare = commands.add_parser("compare")
    compare.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if args.command == "compare":
        return compare_all(args.folder)
    args.out.mkdir(parents=True, exist_ok=True)
    paths = [*(str(ROOT / part) for part in ("python", "test", "lab/gpu")), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        FOLDER: str(args.out.resolve()), "SGLANG_FORCE_ARCH": "sm_120", "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "ptx_against_gpu", *args.files]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


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
            if kept[key] >= LAUNCHES_OF_A_FORM or size > MOST_BYTES or torch.cuda.is_current_stream_capturing():
                self._launch(x, y, z, *rest)
                return
            before = {name: on_cpu(value) for name, value in given.items()}
            self._launch(x, y, z, *rest)
            torch.cuda.synchronize()
            after = {name: on_cpu(value) for name, value in given.items() if isinstance(value, torch.Tensor)}
            content = {
                "kernel": self._source.fn.__name__, "hash": key, "grid": (x, y, z), "before": before, "after": after,
                "shared": self._metadata.shared, "threads": self._metadata.num_warps * 32,
                "addresses": {name: value.data_ptr() for name, value in given.items() if name in after},
            }  # fmt: skip
            torch.save(content, folder / f"{key[:12]}-{kept[key]}.pt")
            kept[key] += 1

    driver.launcher_cls = Keeping

    compiled = triton.compiler.CompiledKernel.__init__

    def with_ptx(self: Any, *args: Any) -> None:
        compiled(self, *args)
        (folder / f"{self.metadata.hash[:12]}.ptx").write_text(self.asm["ptx"])

    triton.compiler.CompiledKernel.__init__ = with_ptx


def on_cpu(value: Any) -> Any:
    """Returns the tensor with all of its storage on the CPU; a copy."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().cpu().clone()
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())


def pytest_configure() -> None:
    """Called by pytest, for which this file is a plugin while it records."""
    if folder := os.environ.get(FOLDER):
        keep_launches(Path(folder))


def compare_all(folder: Path) -> int:
    """Executes what was kept and prints how it differs. Returns 1 if a tensor differs by over eight last places."""
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
        worst = max(differences(arguments, kept["after"], kept["addresses"]).values(), default=0)
        totals["equal" if worst == 0 else "close" if worst <= 8 else "different"] += 1
        print(f"{path.stem} {kept['kernel']}: {worst or 'equal'}")
    print(dict(totals))
    return 1 if totals["different"] or totals["hazard"] else 0


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, torch.Tensor], addresses: Mapping[str, int]
) -> dict[int, int]:
    """Returns the largest difference of each address. A tensor that is given for two arguments, such as the output for
    a bias that there is not, was kept twice and is written through one of them."""
    found: dict[int, int] = {}
    for name, want in theirs.items():
        differs = difference(ours[name], want)
        found[addresses[name]] = min(differs, found.get(addresses[name], differs))
    return found


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Returns the largest difference in units of the last place, of integers the largest difference."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    a, b = (x.contiguous().view(bits).long() for x in (ours, theirs))
    if not ours.is_floating_point() or ours.element_size() == 1:
        return int((a - b).abs().max()) if a.numel() else 0
    low = -(1 << 8 * ours.element_size() - 1)
    a, b = (torch.where(x < 0, low - x, x) for x in (a, b))  # in the order of the numbers
    both_nan = ours.isnan() & theirs.isnan()
    return int((a - b).abs().masked_fill(both_nan, 0).max()) if a.numel() else 0


if __name__ == "__main__":
    sys.exit(main())
