"""Whether a fault shows on a launch, has no effect there, or one that no result depends on."""

from __future__ import annotations

import pytest
import torch
from ledger.ptx_text import module

from sglang.ledger.ptx.effect import DEAD, NO_EFFECT
from sglang.ledger.ptx.mutate import Mutation, mutations
from sglang.ledger.ptx.trial import Trial, copies

POINTERS = (
    "ld.param.b64 %rd0, [k_param_0];\nld.param.b64 %rd3, [k_param_1];\nmov.u32 %r0, %tid.x;\n"
    "mul.wide.u32 %rd1, %r0, 4;\nadd.s64 %rd2, %rd0, %rd1;\nadd.s64 %rd4, %rd3, %rd1;\n"
)
MASKED = (
    POINTERS + "setp.lt.s32 %p1, %r0, {limit};\nmov.b32 %r1, 0;\n@%p1 ld.global.b32 {{ %r1 }}, [ %rd2 + 0 ];\n"
    "{rest}st.global.b32 [ %rd4 + 0 ], {{ %r1 }};"
)


def outcomes(body: str, shared: int = 0, size: int = 64) -> dict[str, str]:
    """How each fault of a kernel of 32 threads shows, which has `size` integers and writes 32."""
    text = module(body, parameters=2, shared=shared)
    given = {"given": torch.arange(size, dtype=torch.int32), "out": torch.zeros(32, dtype=torch.int32)}
    trial = Trial(text, (1, 1, 1), given, 0, 32)
    return {fault.kind: trial.outcome(fault) for fault in mutations(text)}


def test_a_mask_that_is_needed() -> None:
    """Behind the limit is more of the array, which the right text never reads: it is filled with ones."""
    assert outcomes(MASKED.format(limit=20, rest="")) == {"limit": "result", "mask": "result"}
    assert outcomes(MASKED.format(limit=20, rest=""), size=20) == {"limit": "out of bounds", "mask": "out of bounds"}


def test_a_mask_that_holds_everywhere_has_no_effect() -> None:
    assert outcomes(MASKED.format(limit=32, rest="")) == {"limit": NO_EFFECT, "mask": NO_EFFECT}


def test_what_is_masked_again_is_dead() -> None:
    """The predicate itself is not spoiled: a limit counts."""
    again = "setp.ge.s32 %p2, %r0, 20;\n@%p2 mov.b32 %r1, 3;\n"
    assert outcomes(MASKED.format(limit=20, rest=again)) == {"limit": "", "mask": DEAD}


def test_what_is_spoiled_shows_where_the_fault_does_not() -> None:
    """A maximum with 100 hides other lanes' numbers, but only of signed ones what spoils them."""
    body = POINTERS + ("shfl.sync.bfly.b32 %r1, %r0, 16, 31, -1;\nmax.s32 %r2, %r1, 100;\nst.global.b32 [%rd4], %r2;")
    assert outcomes(body) == {"shuffle": DEAD}
    assert outcomes(body.replace("max.s32", "max.u32")) == {"shuffle": ""}


COPIES = POINTERS + (
    "mov.b32 %r3, buffer;\nshl.b32 %r4, %r0, 2;\nadd.s32 %r5, %r3, %r4;\nmov.b32 %r6, {length};\n"
    "cp.async.ca.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x4, %r6;\ncp.async.commit_group;\n"
    "cp.async.wait_group 0;\n{rest}"
)


def test_a_wait_for_nothing_has_no_effect() -> None:
    read = "ld.shared.b32 %r7, [%r5];\nst.global.b32 [%rd4], %r7;"
    assert outcomes(COPIES.format(length=4, rest=read), shared=128) == {
        "mask": NO_EFFECT, "wait": "race", "place": "out of bounds",
    }  # fmt: skip
    assert outcomes(COPIES.format(length=0, rest=""), shared=128) == {"mask": DEAD, "wait": NO_EFFECT}
    assert outcomes(COPIES.format(length=4, rest=""), shared=128) == {"mask": NO_EFFECT, "wait": ""}


def test_a_barrier_of_threads_that_touched_nothing_has_no_effect() -> None:
    place = POINTERS + "mov.b32 %r3, buffer;\nshl.b32 %r4, %r0, 2;\nadd.s32 %r5, %r3, %r4;\n"
    for barrier in ("bar.sync 0;\n", "bar.warp.sync -1;\n"):
        assert outcomes(place + barrier + "st.shared.b32 [%r5], %r0;", shared=256)["barrier"] == NO_EFFECT
        assert outcomes(place + "st.shared.b32 [%r5], %r0;\n" + barrier, shared=256)["barrier"] == ""


def test_threads_that_store_what_others_do_have_no_effect() -> None:
    """All store to one place."""
    body = POINTERS + "setp.eq.s32 %p1, %r0, 0;\n{}@%p1 st.global.b32 [ %rd3 + 0 ], {{ %r1 }};"
    assert outcomes(body.format("mov.b32 %r1, 7;\n")) == {"mask": NO_EFFECT}
    assert outcomes(body.format("add.s32 %r1, %r0, 7;\n")) == {"mask": "result"}


def test_bytes_that_the_right_text_leaves_alone_must_stay() -> None:
    """An element is written that differs by less than a rounding, in a result that is not written otherwise."""
    text = module(POINTERS + "setp.lt.s32 %p1, %r0, 5;\n@%p1 st.global.b32 [ %rd4 + 0 ], { %r0 };", parameters=2)
    given = {"given": torch.zeros(1), "out": torch.zeros(32)}
    trial = Trial(text, (1, 1, 1), given, 0, 32)
    assert {fault.kind: trial.outcome(fault) for fault in mutations(text)} == {"limit": "result", "mask": "result"}


def test_differences_that_tests_allow_do_not_show() -> None:
    text = module(POINTERS + "mov.b32 %r1, 0x3f800000;\nst.global.b32 [%rd4], %r1;", parameters=2)
    given = {"given": torch.zeros(1), "out": torch.zeros(32)}
    trial = Trial(text, (1, 1, 1), given, 0, 32)
    line = next(i for i, each in enumerate(text.split("\n"), 1) if "0x3f800000" in each)
    before = "mov.b32 %r1, 0x3f800000;"
    for bits, shown in (("0x3f800001", ""), ("0x3f810000", "result")):
        assert trial.outcome(Mutation("x", line, before, before.replace("0x3f800000", bits))) == shown


def test_copies_share_storages_as_before() -> None:
    both = torch.arange(8)
    given = copies({"a": both[:4], "b": both[2:], "n": 3})
    given["a"][3] = 9
    assert given["b"].tolist() == [2, 9, 4, 5, 6, 7] and both[3] == 3 and given["n"] == 3


@pytest.mark.parametrize("opcode", ["ld.global.b64 %rd5, [%rd0];\nst.global.b32 [%rd5], 1;"])
def test_tables_of_addresses_are_refused(opcode: str) -> None:
    from sglang.ledger.ptx.problems import Unsupported

    kept = torch.zeros(1, dtype=torch.int32)
    given = {"table": torch.tensor([kept.data_ptr()]), "out": torch.zeros(1)}
    with pytest.raises(Unsupported, match="table of addresses"):
        Trial(module(POINTERS + opcode, parameters=2), (1, 1, 1), given, 0, 32)
