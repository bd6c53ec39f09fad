"""What nvcc makes of kernels in C++ and Triton does not: structs as parameters, generic addresses, loads of nibbles."""

from __future__ import annotations

import ctypes

import pytest
import torch
from ledger.ptx_text import HEADER, module, run

from sglang.ledger.ptx.launch import launch
from sglang.ledger.ptx.problems import Hazard


class Arguments(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int32), ("out", ctypes.c_void_p), ("pair", ctypes.c_float * 2))


TAKES_STRUCT = f"""{HEADER}.entry k(
    .param .align 8 .b8 k_param_0[{ctypes.sizeof(Arguments)}],
    .param .u32 k_param_1
)
.maxntid 32
{{
.reg .b32 %r<9>;
.reg .b64 %rd<9>;
mov.b64 %rd1, k_param_0;
ld.param.u64 %rd2, [%rd1+8];
cvta.to.global.u64 %rd3, %rd2;
ld.param.u32 %r1, [k_param_0];
ld.param.v2.f32 {{%r2, %r3}}, [k_param_0+16];
ld.param.u32 %r4, [k_param_1];
st.global.u32 [%rd3], %r1;
st.u32 [%rd2+4], %r2;
st.global.u32 [%rd3+8], %r3;
st.global.u32 [%rd3+12], %r4;
ret;
}}
"""


def given(out: torch.Tensor) -> Arguments:
    return Arguments(5, out.data_ptr(), (ctypes.c_float * 2)(1.5, -2.0))


def test_a_struct_with_a_pointer() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    launch(TAKES_STRUCT, (1, 1, 1), {"args": given(out), "last": 9}, threads=32)
    assert out[0] == 5 and out[3] == 9 and out[1:3].view(torch.float32).tolist() == [1.5, -2.0]


def test_its_pointers_end_where_the_tensor_does() -> None:
    short = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(Hazard, match="out of bounds: 4 bytes at byte 12 of out, which has 12"):
        launch(TAKES_STRUCT, (1, 1, 1), {"args": given(short), "last": 9}, threads=32)
    with pytest.raises(Hazard, match="where no tensor is"):
        launch(TAKES_STRUCT, (1, 1, 1), {"args": Arguments(5, 64), "last": 9}, threads=32)


def test_rows_of_nibbles_become_bytes() -> None:
    """9.7.14.5.15: of .b4x16_p64 a row is 8 bytes and 8 of padding; a thread gets four elements of its row."""
    body = (
        "ld.param.b64 %rd0, [k_param_0];\nld.param.b64 %rd3, [k_param_1];\nmov.u32 %r0, %tid.x;\n"
        "mul.wide.u32 %rd1, %r0, 16;\nadd.s64 %rd2, %rd0, %rd1;\nadd.s64 %rd4, %rd3, %rd1;\n"
        "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2];\nmov.b32 %r5, buffer;\nshl.b32 %r6, %r0, 4;\n"
        "add.s32 %r7, %r5, %r6;\nst.shared.v4.b32 [%r7], {%r1, %r2, %r3, %r4};\nbar.warp.sync -1;\n"
        "ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {%r11, %r12, %r13, %r14}, [%r7];\n"
        "st.global.v4.b32 [%rd4], {%r11, %r12, %r13, %r14};"
    )
    rows = torch.randint(0, 256, (32, 16), dtype=torch.uint8)
    out = torch.zeros(32, 4, 4, dtype=torch.uint8)  # lane, matrix, element
    run(module(body, parameters=2, shared=512), rows, out)
    codes = torch.stack([rows & 15, rows >> 4], dim=-1).view(32, 32)[:, :16].view(4, 8, 4, 4)
    assert torch.equal(out.view(8, 4, 4, 4), codes.permute(1, 2, 0, 3))
