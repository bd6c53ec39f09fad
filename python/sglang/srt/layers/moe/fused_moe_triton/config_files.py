"""The tiles of a layer's experts: those of a tuning file for its shape and GPU, if there is one that fits.

    found = find(num_experts=161, intermediate=192, scheme="fp8_channel", arch=arch, hidden=5120)

Files are searched in $SGLANG_MOE_CONFIG_DIR/configs and then in the package's `configs`. No torch, no Triton.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sglang.srt.environ import envs
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.layers.moe.fused_moe_triton.capacity import CostOf, ProductTile, recorded_cost
from sglang.srt.layers.moe.fused_moe_triton.config_format import (
    ConfigFileError,
    Content,
    TilePair,
    nearest,
    read_content,
)
from sglang.srt.layers.moe.fused_moe_triton.config_names import FileName, parse_directory, parse_name

PACKAGE_CONFIGS = Path(__file__).parent / "configs"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TunedTiles:
    """The tiles of one file, all of which fit the GPU as far as is known. `smem`: most shared memory of a tile, bytes.
    `unmeasured`: number of tiles without a record, which have fallbacks at launch. `other_hidden`: the hidden size that
    the file was made for, if it is not the layer's."""

    path: Path
    source: str  # as Content.source
    num_experts: int
    by_tokens: Mapping[int, TilePair]
    smem: int
    unmeasured: int = 0
    other_hidden: int = 0

    def at(self, num_tokens: int) -> TilePair:
        """Returns the tiles of the entry with the closest number of tokens."""
        return self.by_tokens[nearest(self.by_tokens, num_tokens)]

    def describe(self) -> str:
        """Returns one line for logs and `explain`."""
        least, most = min(self.by_tokens), max(self.by_tokens)
        parts = [f"{self.source}, {least} to {most} tokens, at most {self.smem:,} B of shared memory"]
        if self.unmeasured:
            parts.append(f"{self.unmeasured} tiles not on record, which step down if they do not fit")
        if self.other_hidden:
            parts.append(f"made for hidden size {self.other_hidden}")
        return f"{self.path.name} ({'; '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: the tiles of a fitting file, if any, and why better ranked files were rejected."""

    tiles: TunedTiles | None
    rejected: tuple[str, ...] = ()

    def describe(self) -> str:
        """Returns one line for logs and `explain`."""
        result = self.tiles.describe() if self.tiles else "no tuning file; tiles by rows an expert"
        return "; ".join([result, *(f"rejected {reason}" for reason in self.rejected)])


def find(
    num_experts: int,
    intermediate: int,
    scheme: str | None,
    arch: ArchTraits,
    *,
    hidden: int = 0,
    bias: bool = False,
    cost: CostOf = recorded_cost,
) -> Found:
    """Returns the best ranked file whose tiles all fit `arch`.

    `intermediate`: of one rank. `scheme`: a name of SCHEMES, None for 16-bit weights. `hidden` 0: unknown, any file.
    `bias`: the experts have biases, as GPT-OSS's do.
    Raises ConfigFileError for a file of the right name that is not a tuning file, or one that is for something else.
    """
    rejected: list[str] = []
    for name, path in candidates(num_experts, intermediate, scheme, arch, hidden):
        down = path.with_name(str(_companion(name)))
        content = read_content(path, down if down.exists() else None)
        if namesake := _namesake(name, content, scheme):
            rejected.append(f"{path}: its tiles are for {namesake}")
            continue
        _check_about(path, name, content, scheme)
        layer = ProductTile("", scheme, hidden, intermediate, {}, bias)
        smem, unmeasured, problem = _capacity(content, layer, arch, cost)
        if problem is None:
            other_hidden = name.hidden or 0 if hidden and name.hidden != hidden else 0
            tuned = TunedTiles(path, content.source, num_experts, content.by_tokens, smem, unmeasured, other_hidden)
            return Found(tuned, tuple(rejected))
        rejected.append(f"{path}: {problem}")
    return Found(None, tuple(rejected))


def candidates(
    num_experts: int, intermediate: int, scheme: str | None, arch: ArchTraits, hidden: int
) -> Iterator[tuple[FileName, Path]]:
    """Yields the files for these weights and GPU, best first. Order: the user's before ours; this product's before
    another edition's before the architecture's; this hidden size; the best name of the scheme; the nearest Triton
    version."""
    ranked: list[tuple[tuple[float, ...], FileName, Path]] = []
    for place, root in enumerate(_roots()):
        for path in files(root):
            name = parse_name(path.name)
            if name is None or name.is_down or (name.num_experts, name.intermediate) != (num_experts, intermediate):
                continue
            device, named = name.device_rank(arch), name.scheme_rank(scheme)
            if device is None or named is None:
                continue
            other_hidden = abs(name.hidden - hidden) if name.hidden and hidden else 0
            rank = (place, device, other_hidden, named, _version_distance(path.parent.name))
            ranked.append((rank, name, path))
    yield from ((name, path) for _, name, path in sorted(ranked, key=lambda entry: (entry[0], entry[2])))


def _roots() -> Iterator[Path]:
    user = envs.SGLANG_MOE_CONFIG_DIR
    if user is not None:
        yield user / "configs"
    yield PACKAGE_CONFIGS


def files(root: Path) -> Iterator[Path]:
    """Yields the tuning files of a directory, for any Triton or for one version."""
    yield from root.glob("*.json")
    yield from root.glob("triton_*/*.json")


def _companion(name: FileName) -> FileName:
    return FileName(
        name.num_experts, name.intermediate, name.selector, name.hidden, name.device, name.arch, name.num_sms, True
    )


def _version_distance(directory: str) -> float:
    """Returns 0 for the installed Triton's directory, more for others, infinity for files without a version."""
    version = parse_directory(directory)
    if version is None:
        return float("inf")
    try:
        installed = tuple(int(part) for part in importlib.metadata.version("triton").split("+")[0].split(".")[:3])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        installed = (99, 0, 0)  # then the newest comes first
    weights = (10_000, 100, 1)
    return abs(sum(w * (a - b) for w, a, b in zip(weights, version, installed, strict=False)))


def _namesake(name: FileName, content: Content, scheme: str | None) -> str:
    """Returns the other scheme for which the file says that it is and that its name also stands for; "" if there is
    none. Upstream's names do not tell groups of int4 weights apart."""
    said = content.about.get("scheme", "none")
    is_other = said not in ("none", scheme) and name.scheme_rank(str(said)) is not None
    return str(said) if is_other else ""


def _check_about(path: Path, name: FileName, content: Content, scheme: str | None) -> None:
    """Checks that a file's content says the same as its name. Raises ConfigFileError."""
    said = {"arch": name.arch, "num_sms": name.num_sms, "hidden": name.hidden, "scheme": scheme or "none"}
    for key, expected in said.items():
        value = content.about.get(key, expected)
        if expected and value != expected:
            said_and_named = f"{path} says {key} {value!r}, but its name stands for {expected!r}"
            raise ConfigFileError(f"{said_and_named}. Rename or delete it.")


def _capacity(content: Content, layer: ProductTile, arch: ArchTraits, cost: CostOf) -> tuple[int, int, str | None]:
    """Returns the most shared memory that a tile takes, the number of tiles without a record, and what is wrong with
    the first that does not fit."""
    most, unmeasured = 0, 0
    for tokens, pair in content.by_tokens.items():
        for kind, tile in (("gate_up", pair.gate_up), ("down", pair.down)):
            product = replace(layer, kind=kind, tile=tile)
            name = f"entry {tokens}: {product.kind} tile {tile_key(product.tile)}"
            record = cost(product, arch)
            if record is None:
                unmeasured += 1
                continue
            if isinstance(record, str):
                return most, unmeasured, f"{name} {record}"
            if record.smem > arch.smem_per_block:
                limit = f"{arch.name} has {arch.smem_per_block:,} B"
                return most, unmeasured, f"{name} needs {record.smem:,} B of shared memory, {limit}"
            most = max(most, record.smem)
    return most, unmeasured, None
