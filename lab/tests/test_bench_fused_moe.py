"""The benchmark against upstream: its inputs, its reference and its table. The kernels' own tests are elsewhere."""

from __future__ import annotations

import bench_fused_moe as bench
import pytest
import torch

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.layers.quantization import reference

KINDS = ("bf16", "fp8_block", "fp8_channel", "int4")


def inputs(kind: str) -> bench.Inputs:
    return bench.Inputs(bench.Shape("small", kind, 4, 128, 256, 2), "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_get_the_same_inputs(kind: str) -> None:
    one, two = inputs(kind), inputs(kind)
    two.batch(7)  # another batch size before it changes nothing
    assert torch.equal(one.w13.data.view(torch.uint8), two.w13.data.view(torch.uint8))
    (x, routings), (same_x, same_routings) = one.batch(3), two.batch(3)
    assert torch.equal(x, same_x) and torch.equal(routings[-1][1], same_routings[-1][1])
    assert not torch.equal(routings[0][1], routings[1][1]), "routings differ, so that caches are cold"


@pytest.mark.parametrize("kind", KINDS[1:])
def test_weights_mean_what_the_scheme_says(kind: str) -> None:
    matrix = inputs(kind).w13
    scheme = SCHEMES["int4_g32" if kind == "int4" else kind]
    wanted = reference.dequantize(reference.Quantized(matrix.data, matrix.scale), scheme)
    assert torch.equal(bench.dequantized(matrix, 2, kind), wanted[2])
    assert 0.2 < wanted[2].norm() / 256**0.5 < 5, "neither vanishing nor exploding"


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_results_end_the_run(kind: str) -> None:
    own = inputs(kind)
    x, routings = own.batch(2)
    assert bench.error_of(own.reference, own, x, *routings[0]) == 0
    with pytest.raises(SystemExit, match="wrong results"):
        bench.error_of(lambda *args: own.reference(*args) * 1.1, own, x, *routings[0])


def test_table_has_ratios_and_their_mean() -> None:
    row = {"shape": "kimi-int4", "batch": 8, "error": 0.0, "seconds": 1e-4, "bytes": 2e8, "flops": 4e9}
    peer = [row | {"seconds": 2e-4}, row | {"batch": 64, "seconds": 0.5e-4}]
    limits = {"read": 4e12, "bf16": 8e14, "fp8": 16e14}
    text = bench.table({"ceilings": limits, "ours": [row, row | {"batch": 64}], "peer": peer})
    assert "2.000" in text and "50.0" in text
    assert text.splitlines()[-1] == "geometric mean 1.000, least 0.500"
