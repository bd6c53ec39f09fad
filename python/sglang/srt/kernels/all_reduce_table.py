"""Table of all-reduce algorithms: by how the GPUs are linked, how many they are, and the size of the message.

The first row that covers a message decides; NCCL serves messages that no row covers. Sizes are bytes of a rank's
message. Times "of a card" are those published for eight RTX PRO 6000 Server on PCIe 5 (NCCL 2.29.2; SGLang 0.5.14's one
shot, whose writes and waits are those of `one_shot`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang.srt.hardware.topology import Topology

KIB, MIB = 1024, 1024**2


PCIE = frozenset({Topology.SWITCH, Topology.HOST_BRIDGE, Topology.CROSS_NUMA})


@dataclass(frozen=True, slots=True)
class SizeRange:
    """A row of the table: `algorithm` serves messages of up to `max_bytes` bytes, in groups of these sizes with these
    links."""

    topologies: frozenset[Topology]
    ranks: frozenset[int]
    algorithm: str
    max_bytes: int
    reason: str


def _ranks(first: int, last: int) -> frozenset[int]:
    return frozenset(range(first, last + 1))


_NVLINK = frozenset({Topology.NVLINK})
_LOCAL = frozenset({Topology.SWITCH, Topology.HOST_BRIDGE})
_CROSS = frozenset({Topology.CROSS_NUMA})
_TWO_WAITS = "NCCL's bytes with two waits, where its ring has 2 (n - 1)"

SIZE_RANGES: tuple[SizeRange, ...] = (
    SizeRange(_NVLINK, _ranks(2, 2), "packed", 64 * KIB, "two H200s: 4.0 us for 64 KiB, one shot 4.6, NCCL 11.7"),
    SizeRange(_NVLINK, _ranks(2, 2), "one_shot", 4 * MIB, "two H200s: 20.2 us for 4 MiB, two shots 21.4, NCCL 35.8"),
    SizeRange(_NVLINK, _ranks(2, 2), "two_shot", 16 * MIB, "two H200s: 68.0 us for 16 MiB, NCCL 80.7"),
    SizeRange(_NVLINK, _ranks(3, 4), "packed", 8 * KIB, "four H200s: 4.1 us for 4 KiB, one shot 4.5, NCCL 14.6"),
    SizeRange(
        _NVLINK, _ranks(3, 4), "one_shot", 512 * KIB,
        "four H200s: 9.2 us for 512 KiB, two shots 10.9, NCCL 19.4",
    ),
    SizeRange(_NVLINK, _ranks(3, 4), "two_shot", 16 * MIB, "four H200s: 90 us for 16 MiB, NCCL 98"),
    SizeRange(_NVLINK, _ranks(5, 8), "packed", 8 * KIB, "as four: one way across the link and no fence"),
    SizeRange(_NVLINK, _ranks(5, 8), "one_shot", 256 * KIB, "predicted: one wait instead of two"),
    SizeRange(_NVLINK, _ranks(5, 8), "two_shot", 8 * MIB, "predicted: 2 (n - 1) / n of the bytes instead of n - 1"),
    SizeRange(PCIE, _ranks(2, 2), "packed", 32 * KIB, "one way across the link and no fence"),
    SizeRange(
        PCIE, _ranks(2, 2), "one_shot", 8 * MIB,
        "a card takes 55.9 us for 2 MiB and 207 us for 8 MiB, NCCL 72 and 244; level at 16 MiB",
    ),
    SizeRange(_LOCAL, _ranks(3, 8), "packed", 16 * KIB, "predicted: twice the bytes cost less than a fence"),
    SizeRange(_LOCAL, _ranks(3, 4), "two_shot", 2 * MIB, f"predicted: {_TWO_WAITS}"),
    SizeRange(_LOCAL, _ranks(5, 8), "two_shot", 1 * MIB, f"predicted: {_TWO_WAITS}"),
    SizeRange(_CROSS, _ranks(3, 8), "packed", 16 * KIB, "others' one shot across nodes: 7.5 us for 1 KiB, NCCL 24.1"),
    SizeRange(
        _CROSS, _ranks(3, 8), "two_shot", 48 * KIB,
        "others' crossover across nodes, where a ring shares the link",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizedRange:
    """A row of QUANTIZED: from `least` bytes on, quantized (e4m3) all-reduces pay in groups of these sizes, where the
    user allows them."""

    topologies: frozenset[Topology]
    ranks: frozenset[int]
    least: int
    reason: str


PIECE_BYTES = 16 * MIB
"""Most bytes that a quantized all-reduce sends at once through peers' memory; workspaces have this size."""
LIBRARY_PIECE_BYTES = 48 * MIB
"""Most bytes that it sends at once by NCCL, with buffers of about this size. A piece takes the host 0.35 ms (two
H100s); 4,096 tokens of 5,120 values are one piece."""
_HALF_THE_BYTES = "predicted: two waits and two conversions, and 0.52 of the bytes"
QUANTIZED: tuple[QuantizedRange, ...] = (
    QuantizedRange(_NVLINK, _ranks(2, 8), 32 * MIB, f"{_HALF_THE_BYTES}, which take little over NVLink"),
    QuantizedRange(PCIE, _ranks(2, 2), 1 * MIB, _HALF_THE_BYTES),
    QuantizedRange(_LOCAL, _ranks(3, 8), 1 * MIB, _HALF_THE_BYTES),
    QuantizedRange(
        _CROSS, _ranks(3, 8), 4 * MIB,
        f"{_HALF_THE_BYTES}; but all pairs send between the nodes, where a ring has one: half of NCCL's time or more",
    ),
)  # fmt: skip


MIN_BYTES_BY_LIBRARY: Mapping[int, int] = {2: 16 * MIB, 8: 8 * MIB}
"""Most ranks -> fewest bytes of a quantized all-reduce by NCCL. It takes five launches instead of one, 0.35 ms more of
the host: with fewer bytes that is more than they save through main memory (30 GB/s between two H100s)."""


def quantized_from(topology: Topology | None, ranks: int, by_library: bool = False) -> tuple[int, str]:
    """Returns (fewest bytes of an all-reduce that may be quantized, why). `topology` None: no GPUs. `by_library`: NCCL
    sends the messages, not a kernel in peers' memory."""
    if topology is None:
        return 0, "ranks on CPUs"
    for row in QUANTIZED:
        if topology in row.topologies and ranks in row.ranks:
            minimum = next(minimum for max_bytes, minimum in MIN_BYTES_BY_LIBRARY.items() if ranks <= max_bytes)
            if by_library and minimum > row.least:
                return minimum, f"{_HALF_THE_BYTES}; by NCCL, whose launches take the host 0.35 ms longer"
            return row.least, row.reason
    return 4 * MIB, f"{_HALF_THE_BYTES}, of more ranks than the table has"


@dataclass(frozen=True, slots=True)
class ExchangeRange:
    """A row of EXCHANGES: gathers and all-to-all exchanges of up to `max_bytes` bytes go through peers' memory, up to
    `packed` bytes as packed words; larger ones by NCCL."""

    topologies: frozenset[Topology]
    ranks: frozenset[int]
    packed: int
    max_bytes: int
    reason: str


_SAME_BYTES = "predicted: NCCL's bytes, and a fraction of its latency"
EXCHANGES: tuple[ExchangeRange, ...] = (
    ExchangeRange(
        _NVLINK, _ranks(2, 2), 128 * KIB, 2 * MIB,
        "two H100s gather parts of 64 KiB in 3.1 us and of 2 MiB in 11.3, NCCL in 10.7 and 29.6",
    ),
    ExchangeRange(
        _NVLINK, _ranks(3, 4), 64 * KIB, 2 * MIB,
        "four H100s gather parts of 64 KiB in 4.4 us and of 2 MiB in 26.1, NCCL in 13.8 and 47.9",
    ),
    ExchangeRange(_NVLINK, _ranks(5, 8), 32 * KIB, 1 * MIB, "predicted: as four"),
    ExchangeRange(PCIE, _ranks(2, 2), 32 * KIB, 1 * MIB, _SAME_BYTES),
    ExchangeRange(PCIE, _ranks(3, 8), 16 * KIB, 128 * KIB, f"{_SAME_BYTES}; all pairs write at once"),
)  # fmt: skip


def exchanges_for(topology: Topology, ranks: int) -> ExchangeRange | None:
    """Returns the row of a group; None: NCCL serves all gathers and exchanges."""
    return next((row for row in EXCHANGES if topology in row.topologies and ranks in row.ranks), None)


LARGEST = max(row.max_bytes for row in SIZE_RANGES)
NORMED_ROWS, NORMED_ROW_BYTES = 64, 4 * KIB
"""Most rows, and most bytes of a row, for which the norm pays in the same kernel, where a block has a whole row: on two
H200s it takes 6.2 us instead of 6.7 for 64 rows of 4 KiB, but 12.2 instead of 9.9 for 256, and 5.8 instead of 5.4 for
one of 10 KiB."""


def ranges_for(topology: Topology, ranks: int) -> tuple[SizeRange, ...]:
    """Returns the rows that count for a group, by ascending size. Empty: NCCL serves everything."""
    rows = [row for row in SIZE_RANGES if topology in row.topologies and ranks in row.ranks]
    return tuple(sorted(rows, key=lambda row: row.max_bytes))


def algorithms(topology: Topology, ranks: int) -> str:
    """Describes the algorithms of a group, their sizes and reasons, for `explain`."""
    rows = ranges_for(topology, ranks)
    served = "; ".join(f"{row.algorithm} up to {_size(row.max_bytes)} ({row.reason})" for row in rows)
    return f"{ranks} ranks over {topology.value}: {served}; nccl above"


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes % MIB == 0 else f"{nbytes // KIB} KiB"
