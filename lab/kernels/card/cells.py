"""Published times by size, and tables of them with every size filled in. Needs pandas, pyarrow and numpy."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.tuning.grid import code_of, encoded

Cells = dict[tuple[int, ...], float]
"""Sizes -> microseconds."""
Tables = dict[str, dict[str, Any]]
Base = Callable[..., float]
"""Sizes -> seconds that times go along with."""
MAX_KNOWN = 2600
"""Cells that missing ones are drawn from."""


@dataclass(frozen=True)
class Source:
    """The published tables. `left_out`: (op, its rows) -> those that stay, to judge what is made without the others."""

    root: Path
    left_out: Callable[[str, Any], Any] | None = None

    def rows(self, pattern: str) -> Any:
        """The rows of all files, with `framework` from their paths ("sglang/0.5.14"). FileNotFoundError."""
        import pandas  # a tool's dependency

        paths = sorted(self.root.glob(pattern))
        if not paths:
            raise FileNotFoundError(
                f"{self.root} holds no {pattern}: --tables names the directory with gemm/, attention/, ..."
            )
        parts = [pandas.read_parquet(path).assign(framework="/".join(path.parts[-3:-1])) for path in paths]
        every = pandas.concat(parts, ignore_index=True)
        return every if self.left_out is None else self.left_out(pattern, every)


UNEVEN = {("sglang/0.5.14", 7168, 256), ("vllm/0.24.0", 7168, 256)}
"""Releases, hidden sizes and experts whose "balanced" routing is not even: groups of experts are chosen first, and half
of them get no token. They take half of what the same kernels take elsewhere."""


def even(rows: Any) -> Any:
    """Layers of experts with even routing, on one rank or in tensor shards; `inter`: of a shard."""
    rows = rows[(rows.distribution == "balanced") & (rows.moe_ep_size == 1)]
    keys = zip(rows.framework, rows.hidden_size, rows.num_experts, strict=True)
    return rows[[key not in UNEVEN for key in keys]].assign(inter=lambda r: r.inter_size // r.moe_tp_size)


def cells(rows: Any, columns: Sequence[str]) -> Cells:
    """The least time for each combination of sizes."""
    least = rows.groupby(list(columns)).latency.min()
    return {tuple(int(v) for v in (key if isinstance(key, tuple) else (key,))): t * 1e3 for key, t in least.items()}


def means(rows: Any, columns: Sequence[str]) -> Cells:
    """The geometric mean for each combination of sizes."""
    import numpy

    logs = numpy.log(rows.latency).groupby([rows[column] for column in columns]).mean()
    return {tuple(int(v) for v in key): math.exp(log) * 1e3 for key, log in logs.items()}


def grid(times: Cells, what: str, **axes: Sequence[int]) -> dict[str, Any]:
    """Of the given axes. A missing time is that of the nearest smaller sizes, in proportion to the product of all; of
    the nearest larger ones where there are none."""
    if not times:
        raise ValueError(f"no rows for {what}")
    return _table([_nearest(times, sizes) for sizes in itertools.product(*axes.values())], what, axes)


def filled(times: Cells, what: str, base: Base, lengths: Sequence[float], **axes: Sequence[int]) -> dict[str, Any]:
    """Of the given axes. A missing time is `base` times what the known ones are of it, the nearest first: `lengths` are
    powers of two of each axis over which that changes."""
    wanted = list(itertools.product(*axes.values()))
    known = list(times)[:: max(1, -(-len(times) // MAX_KNOWN))]
    missing = [sizes for sizes in wanted if sizes not in times]
    drawn: Cells = {}
    if missing:
        logs = [math.log(times[sizes] * 1e-6 / base(*sizes)) for sizes in known]
        found = smoothed([_logs(s) for s in known], [[v] for v in logs], [_logs(s) for s in missing], lengths)
        least, most = min(logs), max(logs)
        for sizes, (log,) in zip(missing, found, strict=True):
            drawn[sizes] = base(*sizes) * math.exp(min(most, max(least, log))) * 1e6
    return _table([times[s] if s in times else drawn[s] for s in wanted], what, axes)


def _table(times: Sequence[float], what: str, axes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    codes = encoded([code_of(time) for time in times])
    return {"what": what, "axes": {name: list(axis) for name, axis in axes.items()}, "codes": codes}


UNIT = "40 * log2(microseconds) in two digits of base 64 (0-9A-Za-z+-)"


def write(path: Path, tables: Tables, source: str, command: str) -> None:
    """A line for each table."""
    lines = [f" {json.dumps(name)}: {json.dumps(table, separators=(',', ':'))}" for name, table in tables.items()]
    head = "".join(
        f" {json.dumps(key)}: {json.dumps(text)},\n"
        for key, text in (("source", source), ("made by", command), ("unit", UNIT))
    )
    path.write_text("{\n" + head + ' "tables": {\n' + ",\n".join(lines) + "\n }\n}\n")


def _logs(sizes: Sequence[int]) -> list[float]:
    return [math.log2(size) for size in sizes]


def smoothed(known: Any, values: Any, wanted: Any, lengths: Sequence[float], noise: float = 0.02) -> Any:
    """Kriging with a Matern kernel of order 3/2: `values` [n, c] at `known` [n, d] -> [m, c] at `wanted` [m, d]."""
    import numpy

    known, wanted, values = (numpy.asarray(part, float) for part in (known, wanted, values))

    def kernel(a: Any, b: Any) -> Any:
        distance = numpy.sqrt(3 * (((a[:, None, :] - b[None, :, :]) / numpy.asarray(lengths)) ** 2).sum(-1))
        return (1 + distance) * numpy.exp(-distance)

    mean = numpy.median(values, axis=0)
    weights = numpy.linalg.solve(kernel(known, known) + noise * numpy.eye(len(known)), values - mean)
    return mean + kernel(wanted, known) @ weights


def _nearest(times: Cells, sizes: tuple[int, ...]) -> float:
    if sizes in times:
        return times[sizes]

    def distance(other: tuple[int, ...]) -> float:
        return sum(abs(math.log(a / b)) * (1 if b <= a else 3) for a, b in zip(sizes, other, strict=True))

    nearest = min(times, key=distance)
    work = math.prod(a / b for a, b in zip(sizes, nearest, strict=True))
    return times[nearest] * max(1.0, work)
