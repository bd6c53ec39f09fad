from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels import tables
from sglang.srt.kernels.all_reduce_table import (
    EXCHANGES,
    KIB,
    LARGEST,
    NORMED_ROW_BYTES,
    NORMED_ROWS,
    SIZE_RANGES,
    algorithms,
    exchanges_for,
    ranges_for,
)
from sglang.srt.kernels.ledger_file import Ledger
from sglang.srt.kernels.resolve import resolve
from sglang.srt.kernels.spec import Choice, Need, PeerLinks

NEED = Need("all_reduce", ranks=8)
INSTALLED = frozenset({"sm120_sgl_kernel", "triton"})
COLLECTIVES = Path(__file__).resolve().parents[3] / "sgl-kernel" / "sm120_sgl_kernel" / "collectives.py"


def chosen(need: Need, arch: ArchTraits, packages: frozenset[str] = INSTALLED) -> Choice:
    return resolve(need, arch, Ledger.load(), packages)


def reason(choice: Choice, kernel: str) -> str:
    return next("; ".join(each.reasons) for each in choice.rejected if each.kernel == kernel)


@pytest.mark.parametrize("topology", Topology)
@pytest.mark.parametrize("ranks", range(2, tables.MAX_RANKS + 1))
def test_bands_rise_and_say_why(topology: Topology, ranks: int) -> None:
    """No band is hidden by one before it, and none is larger than what its algorithm takes."""
    rows = ranges_for(topology, ranks)
    sizes = [row.max_bytes for row in rows]
    assert sizes and sizes == sorted(set(sizes)) and sizes[-1] <= LARGEST
    packed_bytes = int(eval(re.search(r"PACKED_BYTES = (.+)", COLLECTIVES.read_text())[1]))  # type: ignore[index]
    for row in rows:
        assert row.reason and row.max_bytes % 16 == 0
        assert row.algorithm != "packed" or row.max_bytes <= packed_bytes
        assert row.algorithm in algorithms(topology, ranks) and row.reason in algorithms(topology, ranks)
    assert algorithms(topology, ranks).endswith("nccl above")


def test_every_row_serves_somebody() -> None:
    served = {row for topology in Topology for ranks in range(2, 9) for row in ranges_for(topology, ranks)}
    assert served == set(SIZE_RANGES)


def test_most_ranks_is_the_library_s() -> None:
    assert f"MAX_RANKS = {tables.MAX_RANKS}\n" in COLLECTIVES.read_text()


def test_chosen_where_it_is_installed() -> None:
    card, h200 = arch_by_name("sm_120"), arch_by_name("h200")
    choice = chosen(NEED, card)
    assert choice.name == "sgl_kernel" and "across NUMA nodes" in choice.remark and "assumed" in choice.remark
    assert "NVLink" in chosen(NEED, h200).remark
    seen = replace(NEED, ranks=2, links=PeerLinks(Topology.SWITCH))
    assert chosen(seen, card).remark.startswith("2 ranks over one PCIe switch: packed up to 32 KiB")
    assert "assumed" not in chosen(seen, card).remark


def test_refused_with_the_reason() -> None:
    card = arch_by_name("sm_120")
    choice = chosen(NEED, card, frozenset())
    assert choice.name == "nccl" and reason(choice, "sgl_kernel") == "sm120_sgl_kernel is not installed"
    problem = "ranks 0 and 1: rank 1 reads the values from before rank 0 wrote"
    choice = chosen(replace(NEED, links=PeerLinks(Topology.SWITCH, problem)), card)
    assert choice.name == "nccl" and reason(choice, "sgl_kernel") == problem
    choice = chosen(replace(NEED, ranks=16), card)
    assert choice.name == "nccl" and "no row for 16 ranks" in reason(choice, "sgl_kernel")
    choice = chosen(NEED, arch_by_name("cpu"))
    assert choice.name == "gloo" and "cp_async" in reason(choice, "sgl_kernel")


def test_rows_that_are_normed_fit_a_block() -> None:
    row_vectors = int(re.search(r"ROW_VECTORS = (.+)", COLLECTIVES.read_text())[1])  # type: ignore[index]
    assert NORMED_ROW_BYTES <= 16 * row_vectors and NORMED_ROWS * NORMED_ROW_BYTES <= LARGEST


def test_bands_are_in_bytes() -> None:
    assert min(row.max_bytes for row in SIZE_RANGES) >= 8 * KIB


@pytest.mark.parametrize("name", ["sm_120", "h200"])
def test_flashinfer_adds_up_only_where_it_was_asked_for(name: str) -> None:
    arch, installed = arch_by_name(name), INSTALLED | {"flashinfer"}
    asked = replace(NEED, traits=frozenset({tables.FLASHINFER_FUSION}))
    choice = chosen(NEED, arch, installed)
    assert choice.name == "sgl_kernel"
    assert "only with --enable-flashinfer-allreduce-fusion" in reason(choice, "flashinfer")
    assert chosen(asked, arch, installed).name == "flashinfer"
    choice = chosen(asked, arch)
    assert choice.name == "sgl_kernel" and reason(choice, "flashinfer") == "flashinfer is not installed"
    seen = replace(asked, links=PeerLinks(Topology.SWITCH, fusion_problem="no workspace"))
    choice = chosen(seen, arch, installed)
    assert choice.name == "sgl_kernel" and reason(choice, "flashinfer") == "no workspace"
    off = replace(asked, links=PeerLinks(Topology.SWITCH, "--disable-custom-all-reduce"))
    assert chosen(off, arch, installed).name == "flashinfer"
    assert chosen(replace(asked, q_dtype="float32"), arch, installed).name == "sgl_kernel"


@pytest.mark.parametrize("topology", Topology)
@pytest.mark.parametrize("ranks", range(2, tables.MAX_RANKS + 1))
def test_parts_are_exchanged_wherever_sums_are_taken(topology: Topology, ranks: int) -> None:
    row = exchanges_for(topology, ranks)
    assert row is not None and ranges_for(topology, ranks)
    assert row.reason and 0 < row.packed <= min(row.max_bytes, 128 * KIB) and row.packed % 16 == row.max_bytes % 16 == 0
    assert sum(topology in row.topologies and ranks in row.ranks for row in EXCHANGES) == 1


def test_more_ranks_exchange_through_nccl() -> None:
    assert exchanges_for(Topology.NVLINK, tables.MAX_RANKS + 1) is None
