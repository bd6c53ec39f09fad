"""Arrays reach the device whole, under their names, at addresses that stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.srt.utils.device_arrays import DeviceArrays, Field, send, to_device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_of_any_size_and_type(device: str) -> None:
    arrays = {
        "longs": np.array([1 << 40, -2, 3]),
        "nothing": np.zeros(0, np.int32),
        "rows": np.arange(14, dtype=np.int32).reshape(7, 2),
        "flags": np.array([True, False, True]),
        "strided": np.arange(10, dtype=np.int32)[::-2],
    }
    sent = send(device, **arrays)
    for name, array in arrays.items():
        assert sent[name].device.type == device
        np.testing.assert_array_equal(sent[name].cpu().numpy(), array, strict=True)
    arrays["longs"][0] = 0
    assert sent["longs"][0] == 1 << 40, "the device has a copy"
    assert to_device(np.array([4, 5], np.int32), device).tolist() == [4, 5]


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_load_does_not_give(device: str) -> None:
    arrays = DeviceArrays({"lens": Field((4,), np.int32, 1), "rows": Field((2, 3), np.int64)}, device)
    lens, rows = arrays["lens"], arrays["rows"]
    arrays.load(lens=np.array([7, 8], np.int32), rows=np.array([[1, 2, 3]]))
    assert lens.tolist() == [7, 8, 1, 1] and rows.tolist() == [[1, 2, 3], [0, 0, 0]]
    arrays.load(lens=np.array([9], np.int32))
    assert lens.tolist() == [9, 1, 1, 1] and not rows.any()
    assert lens.data_ptr() == arrays["lens"].data_ptr() and lens.data_ptr() % 16 == rows.data_ptr() % 16 == 0
    assert lens.dtype is torch.int32
