"""torch's flash attention for the patches of images, against attention in float32; its row in the table of kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.spec import Need
from sglang.srt.kernels.tables import TABLES
from sglang.srt.layers.attention import flash_varlen
from sglang.srt.layers.attention.flash_varlen import flash_attention, problem_of

BOUND = 4e-3
LENGTHS = ([1], [300], [64] * 5, [700, 3, 129, 64], [16, 1000, 16])


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float) -> torch.Tensor:
    parts = zip(*(x.double().transpose(0, 1).split(list(lengths), dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*part, scale=scale) for part in parts], dim=1).transpose(0, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 88, 96, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_sequences_and_shares(lengths: list[int], head_dim: int, dtype: torch.dtype) -> None:
    """Queries, keys and values are views of one product, as encoders have them. Nothing but the share is written, and
    its bits are those of the whole."""
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = torch.randn(sum(lengths), 3, 4, head_dim, generator=generator).to("cuda", dtype).unbind(1)
    starts = torch.tensor((0, *lengths), device="cuda").cumsum(0).int()
    for scale, shares in ((head_dim**-0.5, 1), (1.0, 3)):
        got = torch.full(v.shape, float("nan"), dtype=dtype, device="cuda")
        want = expected(q, k, v, lengths, scale)
        for i in range(shares):
            flash_attention(q, k, v, got, starts, longest=max(lengths), is_causal=False, scale=scale, share=(i, shares))
            done = len(q) * (i + 1) // shares
            assert not got[:done].isnan().any() and got[done:].isnan().all()
        assert float((got.double() - want).norm() / want.norm()) < BOUND
        whole = torch.empty_like(got)
        flash_attention(q, k, v, whole, starts, longest=max(lengths), is_causal=False, scale=scale)
        assert torch.equal(got, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_works_on_this_gpu() -> None:
    assert problem_of(Need("prefill_attention", 72, 72)) == ""


def test_what_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that raises, and one that computes something else, leave the op to the next kernel of the table."""
    need = Need("prefill_attention", 72, 72)

    def raises(*args: object) -> float:
        raise RuntimeError("no kernel\nfor this GPU")

    for probe, text in ((raises, "fails here: no kernel"), (lambda *args: 0.5, "is wrong here: 5.0e-01")):
        flash_varlen._problem.cache_clear()
        monkeypatch.setattr(flash_varlen, "probe_error", probe)
        problem = problem_of(need)
        assert text in problem
        flash_varlen._problem.cache_clear()
        (row,) = (spec for spec in TABLES["prefill_attention"] if spec.name == "torch_flash")
        arch = arch_by_name("sm_120")
        assert not row.why_not(need, arch, frozenset())
        assert row.why_not(Need("prefill_attention", 72, 72, library_problem=problem), arch, frozenset()) == [problem]


@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 96, 128])
def test_who_attends(head_dim: int) -> None:
    """With wgmma Triton's kernel is faster with heads of 64, 80, 96 and 128 elements, on SM120 with 64 alone."""
    need = Need("prefill_attention", head_dim, head_dim)
    (row,) = (spec for spec in TABLES["prefill_attention"] if spec.name == "torch_flash")
    flash = [not row.why_not(need, arch_by_name(name), frozenset()) for name in ("sm_90", "sm_120")]
    assert flash == [head_dim in (72, 88), head_dim != 64]


@pytest.mark.parametrize(("head_dim", "dtype"), [(20, "bfloat16"), (264, "bfloat16"), (72, "float32")])
def test_what_it_has_no_kernel_for(head_dim: int, dtype: str) -> None:
    (row,) = (spec for spec in TABLES["prefill_attention"] if spec.name == "torch_flash")
    assert row.why_not(Need("prefill_attention", head_dim, head_dim, dtype), arch_by_name("sm_120"), frozenset())
