"""What hardware lets pass and an execution does not, each in a small kernel: with the fault refused, without it run."""

from __future__ import annotations

import pytest
import torch
from ledger.ptx_text import module, run

from sglang.ledger.ptx.launch import run as execute
from sglang.ledger.ptx.memory import GlobalMemory
from sglang.ledger.ptx.parser import parse
from sglang.ledger.ptx.problems import Hazard, Unsupported
from sglang.ledger.ptx.program import program

POINTER = (
    "ld.param.b64 %rd0, [k_param_0];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %rd1, %r0, 4;\nadd.s64 %rd2, %rd0, %rd1;\n"
)
SHARED = POINTER + "mov.b32 %r1, buffer;\nshl.b32 %r2, %r0, 2;\nadd.s32 %r3, %r1, %r2;\n"


def fails(kind: str, body: str, message: str, size: int = 32, **options: int) -> None:
    with pytest.raises(Hazard, match=message) as caught:
        run(module(body, **options), torch.zeros(size, dtype=torch.int32))
    assert caught.value.kind == kind


def test_access_outside_of_an_array() -> None:
    body = POINTER + ".loc 1 77 3\n ld.global.b32 %r4, [%rd2+{}];"
    run(module(body.format(0)), torch.zeros(32, dtype=torch.int32))
    for offset, byte in ((4, 128), (-4, -4)):
        with pytest.raises(Hazard, match=rf"out of bounds: 4 bytes at byte {byte} of array 0, which has 128") as caught:
            run(module(body.format(offset)), torch.zeros(32, dtype=torch.int32))
        assert "kernel.py:77" in str(caught.value)


def test_an_array_is_not_another_one() -> None:
    """Two arrays that lie behind each other here do not for the kernel."""
    both = torch.zeros(64, dtype=torch.int32)
    fails("out of bounds", POINTER + "st.global.b32 [%rd2+131072], %r0;", "array 0")
    run(module(POINTER + "st.global.b32 [%rd2+128], %r0;"), both)
    assert both[32:].tolist() == list(range(32))


def test_addresses_from_a_table() -> None:
    """A kernel may be given tensors by their addresses in another one; what is behind them is refused."""
    text = module(
        "ld.param.b64 %rd0, [k_param_0];\nld.global.b64 %rd1, [%rd0];\nmov.u32 %r0, %tid.x;\n"
        "mul.wide.u32 %rd2, %r0, 4;\nadd.s64 %rd3, %rd1, %rd2;\nst.global.b32 [%rd3], %r0;"
    )
    for size in (32, 31):
        kept = torch.zeros(size, dtype=torch.int32)
        table = torch.tensor([kept.data_ptr()])
        if size == 32:
            run(text, table)
            assert kept.tolist() == list(range(32))
        else:
            with pytest.raises(Hazard, match="out of bounds"):
                run(text, table)


def test_launches_with_fewer_arrays() -> None:
    """One kernel, first with two arrays and then with one in the place of both."""
    text = module(POINTER.replace("k_param_0", "k_param_1") + "st.global.b32 [%rd2], %r0;", parameters=2)
    first, second = (torch.zeros(32, dtype=torch.int32) for _ in range(2))
    run(text, torch.zeros(1, dtype=torch.int32), first)
    run(text, second, second)
    assert first.tolist() == second.tolist() == list(range(32))


def test_misaligned_access() -> None:
    fails("misaligned", POINTER + "ld.global.v2.b32 {%r4, %r5}, [%rd2];", "8 bytes at byte 4 of array 0", size=33)
    fails("misaligned", SHARED + "st.shared.b32 [%r3+2], %r0;", "shared memory", shared=256)


def test_access_outside_of_shared_memory() -> None:
    fails("out of bounds", SHARED + "st.shared.b32 [%r3], %r0;", "byte 124 of shared memory, which has 124", shared=124)


def test_read_of_what_nobody_wrote() -> None:
    body = SHARED + "setp.ne.s32 %p0, %r0, {};\n@%p0 st.shared.b32 [%r3], %r0;\nld.shared.b32 %r4, [%r3];"
    run(module(body.format(99), shared=128), torch.zeros(1, dtype=torch.int32))
    fails("uninitialized", body.format(5), "byte 20 of shared memory", shared=128)
    skipped = "setp.eq.s32 %p0, %r0, %r0;\n@%p0 bra OUT;\nmov.b32 %r5, 1;\nOUT:\nadd.s32 %r6, %r5, 1;"
    fails("uninitialized", POINTER + skipped, "the register %r5")


NEIGHBOUR = "xor.b32 %r4, %r3, {};\nld.shared.b32 %r5, [%r4];\nst.global.b32 [%rd2], %r5;"


def test_race_between_warps() -> None:
    write, read = SHARED + "st.shared.b32 [%r3], %r0;\n", NEIGHBOUR.format(128)
    out = torch.zeros(64, dtype=torch.int32)
    run(module(write + "bar.sync 0;\n" + read, threads=64, shared=256), out)
    # buffer is at a multiple of 256 and the threads' words exchange halves
    assert out.tolist() == [i ^ 32 for i in range(64)]
    fails("race", write + read, "reads byte .* of shared memory, which thread .* wrote", 64, threads=64, shared=256)
    fails(
        "race", write + "bar.warp.sync -1;\n" + read, "without a barrier between", 64, threads=64, shared=256
    )  # fmt: skip


def test_race_within_a_warp() -> None:
    write, read = SHARED + "st.shared.b32 [%r3], %r0;\n", NEIGHBOUR.format(4)
    run(module(write + "bar.warp.sync -1;\n" + read, shared=128), torch.zeros(32, dtype=torch.int32))
    fails("race", write + read, "reads byte", shared=128)


def test_a_read_is_not_overwritten() -> None:
    """A warp writes what another one has read, with the next barrier still ahead."""
    body = SHARED + "st.shared.b32 [%r3], %r0;\nbar.sync 0;\n" + NEIGHBOUR.format(128) + "\n{}st.shared.b32 [%r3], 7;"
    run(module(body.format("bar.sync 0;\n"), threads=64, shared=256), torch.zeros(64, dtype=torch.int32))
    fails("race", body.format(""), "writes byte .* read", 64, threads=64, shared=256)


def test_a_read_within_a_warp_is_not_overwritten() -> None:
    written = SHARED + "st.shared.b32 [%r3], %r0;\nbar.warp.sync -1;\n"
    body = written + NEIGHBOUR.format(4) + "\n{}st.shared.b32 [%r3], 7;"
    run(module(body.format("bar.warp.sync -1;\n"), shared=128), torch.zeros(32, dtype=torch.int32))
    fails("race", body.format(""), "writes byte .* read", shared=128)
    own = SHARED + "st.shared.b32 [%r3], %r0;\nld.shared.b32 %r5, [%r3];\nst.shared.b32 [%r3], 7;"
    run(module(own, shared=128), torch.zeros(32, dtype=torch.int32))


def test_a_matrix_is_no_single_threads() -> None:
    """ldmatrix reads a row at the address of a thread that wrote it, but for other threads."""
    row = POINTER + "mov.b32 %r1, buffer;\nshl.b32 %r2, %r0, 4;\nadd.s32 %r3, %r1, %r2;\n"
    body = row + (
        "st.shared.v4.b32 [%r3], {%r0, %r0, %r0, %r0};\n{}"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r3];"
    )
    run(module(body.replace("{}", "bar.warp.sync -1;\n"), shared=512), torch.zeros(1, dtype=torch.int32))
    fails("race", body.replace("{}", ""), "reads byte", shared=512)


def test_blocks_that_are_alone() -> None:
    """Where they are, two may write the same to one place, or have atomic operations to agree on an order."""
    body = "ld.param.b64 %rd0, [k_param_0];\nmov.u32 %r0, %ctaid.x;\n{}st.global.b32 [%rd0], {};"
    atomic = "atom.global.gpu.acq_rel.add.u32 %r2, [%rd0+4], 1;\n"
    out = {"out": torch.zeros(2, dtype=torch.int32)}
    for alone, before, value in ((True, "", "5"), (True, atomic, "%r0"), (False, "", "%r0")):
        execute(program(parse(module(body.format(before, value)))), GlobalMemory(alone=alone), (3, 1, 1), out)
    with pytest.raises(Hazard, match="race: two blocks write byte 0 of out"):
        execute(program(parse(module(body.format("", "%r0")))), GlobalMemory(alone=True), (3, 1, 1), out)


def test_what_a_thread_has_not_written_is_nan() -> None:
    """A register that only some threads write."""
    body = POINTER + "setp.lt.s32 %p0, %r0, 5;\n@%p0 mov.b32 %r4, 7;\nst.global.b32 [%rd2], %r4;"
    out = torch.zeros(32, dtype=torch.int32)
    run(module(body), out)
    assert out.tolist() == [7] * 5 + [-1] * 27


def test_two_values_in_one_place() -> None:
    body = SHARED + "st.shared.b32 [%r1], {};"
    run(module(body.format(5), shared=128), torch.zeros(1, dtype=torch.int32))
    fails("race", body.format("%r0"), "two threads write", shared=128)


@pytest.mark.parametrize("first", ["0x3f800000", "0x7fc00000"], ids=["1", "not a number"])
def test_two_roundings_in_one_place_are_a_choice(first: str) -> None:
    """Half of the threads write one number, the others the next: what a fused product makes of a sum of two threads."""
    last = f"and.b32 %r4, %r0, 1;\nadd.s32 %r5, %r4, {first};\n"
    done = run(module(SHARED + last + "st.shared.b32 [%r1], %r5;", shared=128), torch.zeros(1, dtype=torch.int32))
    assert done.choices == 1


COPY = SHARED + "cp.async.ca.shared.global [%r3], [%rd2], 4;\ncp.async.commit_group;\n{}ld.shared.b32 %r5, [%r3];"


def test_copies_are_waited_for() -> None:
    run(module(COPY.format("cp.async.wait_group 0;\n"), shared=128), torch.zeros(32, dtype=torch.int32))
    fails("race", COPY.format("cp.async.wait_group 1;\n"), "before the wait for its cp.async", shared=128)
    fails("race", COPY.format(""), "before the wait for its cp.async", shared=128)


def test_what_is_on_its_way_is_not_overwritten() -> None:
    body = COPY.replace("ld.shared.b32 %r5, [%r3];", "st.shared.b32 [%r3], 5;")
    run(module(body.format("cp.async.wait_group 0;\n"), shared=128), torch.zeros(32, dtype=torch.int32))
    fails("race", body.format(""), "is written before the wait for its cp.async", shared=128)


def test_a_barrier_that_some_threads_pass_by() -> None:
    body = POINTER + "setp.lt.s32 %p0, %r0, {};\n@%p0 bra BEHIND;\nbar.sync 0;\nBEHIND:\nmov.b32 %r4, 1;"
    run(module(body.format(0)), torch.zeros(32, dtype=torch.int32))
    fails("barrier", body.format(3), "29 of 32 threads of block 0 reach it")


def test_threads_of_a_warp_that_have_parted() -> None:
    body = POINTER + "setp.lt.s32 %p0, %r0, {};\n@%p0 bra BEHIND;\nshfl.sync.bfly.b32 %r4, %r0, 1, 31, -1;\nBEHIND:"
    body += "\nmov.b32 %r5, 1;"
    run(module(body.format(0)), torch.zeros(32, dtype=torch.int32))
    fails("divergence", body.format(3), "does not execute an instruction of the warp")


def test_divergent_paths_meet_again() -> None:
    """Each half of a warp computes, then all exchange."""
    body = POINTER + (
        "setp.lt.s32 %p0, %r0, 16;\n@%p0 bra LOW;\nadd.s32 %r4, %r0, 100;\nbra.uni MEET;\n"
        "LOW:\nadd.s32 %r4, %r0, 200;\nMEET:\nshfl.sync.idx.b32 %r5, %r4, 0, 31, -1;\n"
        "add.s32 %r6, %r4, %r5;\nst.global.b32 [%rd2], %r6;"
    )
    out = torch.zeros(32, dtype=torch.int32)
    run(module(body), out)
    assert out.tolist() == [i + (200 if i < 16 else 100) + 200 for i in range(32)]


def test_blocks_have_loops_of_their_own_length() -> None:
    body = (
        "ld.param.b64 %rd0, [k_param_0];\nmov.u32 %r0, %ctaid.x;\nmul.wide.u32 %rd1, %r0, 4;\n"
        "add.s64 %rd2, %rd0, %rd1;\nmov.b32 %r1, 0;\nmov.b32 %r2, 0;\n"
        "AGAIN:\nadd.s32 %r2, %r2, %r0;\nadd.s32 %r1, %r1, 1;\nsetp.le.s32 %p0, %r1, %r0;\n@%p0 bra AGAIN;\n"
        "bar.sync 0;\nst.global.b32 [%rd2], %r2;"
    )
    out = torch.zeros(5, dtype=torch.int32)
    run(module(body), out, grid=(5, 1, 1))
    assert out.tolist() == [b * (b + 1) for b in range(5)]


def test_what_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"k, \?, line \d+: frobnicate.b32 %r1, %r0"):
        run(module(POINTER + "frobnicate.b32 %r1, %r0;"), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize(("kind", "expected"), [("add.s32", 96), ("max.s32", 3), ("exch.b32", 3), ("cas.b32", 3)])
def test_atomics(kind: str, expected: int) -> None:
    compare = ", 0" if "cas" in kind else ""
    out = torch.zeros(1, dtype=torch.int32)
    run(module(f"ld.param.b64 %rd0, [k_param_0];\natom.global.gpu.acq_rel.{kind} %r1, [%rd0]{compare}, 3;"), out)
    assert out.item() == expected
