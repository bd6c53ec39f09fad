"""The Triton codec of sums that travel as e4m3 gives the bits of the reference."""

from __future__ import annotations

import interpreter
import pytest
import torch
from srt.distributed.test_quantized_sums import DTYPES, partial_sum, shape_of

from sglang.srt.distributed.quantized_sums import GROUP, WIRE, TorchCodec
from sglang.srt.layers.triton_ops.quantized_sums import TritonCodec

DEVICE = interpreter.DEVICE


@interpreter.kernel_test
@pytest.mark.parametrize("seed", range(4))
def test_the_same_bits(seed: int) -> None:
    ours, torchs = TritonCodec(), TorchCodec()
    dtype, (rows, hidden), ranks = DTYPES[seed % 2], shape_of(seed), 2 + seed % 3
    x = partial_sum(3 * seed, 0, (rows, hidden), dtype).flatten().to(DEVICE)
    if seed == 3:
        x[3], x[40] = torch.inf, torch.nan
    share = -(-x.numel() // (GROUP * ranks)) + seed % 2
    message, wanted = (torch.empty((ranks, share * WIRE), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    ours.encode(x, message)
    torchs.encode(x, wanted)
    finite = x.view(-1, GROUP).isfinite().all(1)
    assert torch.equal(_bytes(message, finite), _bytes(wanted, finite))
    for ask, size in (("decode", x.numel()), ("add", share * GROUP - GROUP)):
        actual, expected = (torch.empty(size, dtype=dtype, device=DEVICE) for _ in range(2))
        getattr(ours, ask)(wanted, actual)
        getattr(torchs, ask)(wanted, expected)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    total, wanted_total = (torch.empty((1, share * WIRE), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    ours.add_encoded(wanted, total)
    torchs.add_encoded(wanted, wanted_total)
    decoded, expected = (torch.empty(share * GROUP, dtype=dtype, device=DEVICE) for _ in range(2))
    torchs.decode(total, decoded)
    torchs.decode(wanted_total, expected)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)


def _bytes(message: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Of a message: the scales, and the values of groups whose bytes matter."""
    share = message.shape[1] // WIRE
    values, scales = message[:, : share * GROUP].reshape(-1, GROUP), message[:, share * GROUP :].reshape(-1)
    return torch.cat((scales, values[: len(finite)][finite].flatten(), values[len(finite) :].flatten()))


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
