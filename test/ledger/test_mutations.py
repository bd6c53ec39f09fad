"""Faults in PTX: what each kind changes, and that an execution sees it."""

from __future__ import annotations

import pytest
import torch
from ledger.ptx_text import module, run

from sglang.ledger.ptx.mutate import KINDS, mutations
from sglang.ledger.ptx.problems import Hazard

SCALED = (
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
    " { %r1, %r2 }, { %r3, %r4 }, { %r5 }, { %r1, %r2 }, %r6, { 0, 0 }, %r7, { 0, 0 };"
)
CHANGES = {
    "mask": ("\t@%p3 ld.global.b32 { %r1 }, [ %rd1 + 0 ];", "\tld.global.b32 { %r1 }, [ %rd1 + 0 ];"),
    "barrier": ("\tbar.sync \t0;", ""),
    "wait": ("\tcp.async.wait_group 1;", "\tcp.async.wait_group 2;"),
    "scale": (SCALED, SCALED.replace("%r7", "%r6")),
    "fragment": (SCALED, SCALED.replace("%r3, %r4", "%r4, %r3")),
    "shuffle": ("\tshfl.sync.bfly.b32 \t%r1, %r2, 16, 31, -1;", "\tshfl.sync.bfly.b32 \t%r1, %r2, 8, 31, -1;"),
    "limit": ("\tsetp.lt.s32 \t%p1, %r1, %r2;", "\tsetp.le.s32 \t%p1, %r1, %r2;"),
    "place": ("\tld.shared.v2.b32 \t{%r1, %r2}, [%r5+16];", "\tld.shared.v2.b32 \t{%r1, %r2}, [%r5+24];"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_changes_its_line(kind: str) -> None:
    before, after = CHANGES[kind]
    (mutation,) = [m for m in mutations(f"// %p1\n{before}\n\tmov.b32 %r1, %r2;") if m.kind == kind]
    assert (mutation.line, mutation.before, mutation.after) == (2, before, after)
    assert mutation.applied(f"// %p1\n{before}") == f"// %p1\n{after}"


def test_a_sum_through_shared_memory() -> None:
    """Each fault of a small kernel stops it or changes its result."""
    text = module(
        "ld.param.b64 %rd0, [k_param_0];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %rd1, %r0, 4;\nadd.s64 %rd2, %rd0, %rd1;\n"
        "setp.lt.s32 %p1, %r0, 50;\nmov.b32 %r1, 0;\n@%p1 ld.global.b32 { %r1 }, [ %rd2 + 0 ];\n"
        "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\nadd.s32 %r3, %r1, %r2;\nmov.b32 %r4, buffer;\n"
        "shl.b32 %r5, %r0, 2;\nadd.s32 %r6, %r4, %r5;\nst.shared.b32 [%r6], %r3;\nbar.sync 0;\n"
        "xor.b32 %r7, %r6, 128;\nld.shared.b32 %r8, [%r7+0];\n@%p1 st.global.b32 [ %rd2 + 0 ], { %r8 };",
        threads=64, shared=256,
    )  # fmt: skip
    right = torch.arange(50, dtype=torch.int32)
    run(text, right)
    every = list(mutations(text))
    assert {mutation.kind for mutation in every} == {"mask", "barrier", "shuffle", "limit", "place"}
    for mutation in every:
        out = torch.arange(50, dtype=torch.int32)
        try:
            run(mutation.applied(text), out)
        except Hazard:
            continue
        assert not torch.equal(out, right), mutation
