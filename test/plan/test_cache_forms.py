"""The table of `sglang plan` that shows tokens by the form of the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.cli import main
from sglang.plan.cache_forms import ROUNDING
from sglang.srt.layers.native_fp4 import dequantize_fp4_rows, quantize_fp4_rows
from sglang.srt.layers.native_sparse_ops import pack_latents, unpack_latents
from sglang.srt.plan.kv_spec import FP4_KV

CONFIGS = Path(__file__).parents[1] / "srt" / "kernels" / "configs"
CARDS = ["--gpus", "8", "--gpu", "rtx-pro-6000"]
Forms = dict[int, dict[str, Any]]


def planned(capsys: pytest.CaptureFixture[str], folder: Path, name: str, *flags: str) -> tuple[dict[str, Any], Forms]:
    """Returns the whole plan, and its forms by their bits."""
    (folder / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    assert main(["plan", str(folder), *CARDS, *flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    return result, {form["bits"]: form for form in result["cache_forms"]["forms"]}


def test_tokens_are_those_that_each_flag_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, forms = planned(capsys, tmp_path, "qwen3")
    layout = result["cache_forms"]["layout"]
    assert layout == result["recommended"] and list(forms) == [16, 8, 4]
    assert [form["asked"] for form in forms.values()] == [True, False, False]
    for bits, form in forms.items():
        alone, again = planned(capsys, tmp_path, "qwen3", "--kv-cache-dtype", form["kv_cache_dtype"])
        (row,) = (each for each in alone["layouts"] if each["layout"] == layout)
        assert form["tokens"] == row["tokens"] > 0
        assert [each["bits"] for each in again.values() if each["asked"]] == [bits]
    per_token = [form["bytes_per_token"] for form in forms.values()]
    assert per_token == [per_token[0], per_token[0] / 2, per_token[0] * 0.5625 / 2]


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("deepseek_v32", {}),
        ("qwen38_flash_next_nvfp4", {4: "fp4_e2m1 becomes fp8_e4m3"}),
        ("deepseek_v4", {}),
    ],
)
def test_what_is_not_served_says_why(
    name: str, reasons: dict[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, forms = planned(capsys, tmp_path, name)
    refused = {bits: form["refused"] for bits, form in forms.items() if "tokens" not in form}
    assert set(refused) == set(reasons) and all(reasons[bits] in refused[bits] for bits in refused)


@pytest.mark.parametrize(
    ("name", "eight", "four"),
    [
        ("qwen3", ("fp8_e4m3", "2.00", "2.7%"), (FP4_KV, "3.56", "9.5%")),
        ("deepseek_v4", ("fp8_e4m3", "1.86", "2.7%"), (FP4_KV, "2.85", "9.5%")),
        ("deepseek_v32", ("fp8_e4m3", "1.63", "2.7%"), (FP4_KV, "2.37", "9.5%")),
        ("qwen38_flash_next_nvfp4", ("fp8_e4m3", "1.30", "2.7%"), None),
    ],
)
def test_the_table_for_people(
    name: str,
    eight: tuple[str, ...] | None,
    four: tuple[str, ...] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    assert main(["plan", str(tmp_path), *CARDS]) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if "by the form of its cache" in line)
    rows = [line.split() for line in lines[begin + 2 : begin + 5]]
    assert rows[0][:5] == ["16", "bits", "(as", "asked)", "bfloat16"] and rows[0][-1] == "0.17%"
    for bits, row, served in ((8, rows[1], eight), (4, rows[2], four)):
        if served is None:
            assert row[-2:] == ["not", "served"]
            assert any(line.startswith(f"{bits} bits: not served: ") for line in lines)
        else:
            assert (row[2], row[4], row[-1]) == served


def error(stored: torch.Tensor, rows: torch.Tensor) -> float:
    return float(((stored.float() - rows).norm(dim=-1) / rows.norm(dim=-1)).mean())


def test_errors_are_what_rounding_costs() -> None:
    rows = torch.randn(512, 128, generator=torch.Generator().manual_seed(1))
    stored = {name: rows.to(getattr(torch, name)) for name in ("float32", "float16", "bfloat16")}
    stored["fp8_e4m3"] = rows.to(torch.float8_e4m3fn)
    stored[FP4_KV] = dequantize_fp4_rows(*quantize_fp4_rows(rows, 1.0), 1.0)
    assert {name: error(values, rows) for name, values in stored.items()} == pytest.approx(ROUNDING, rel=0.05)


def test_packed_latents_are_no_worse() -> None:
    """Their rotary columns stay in 16 bits."""
    rows = torch.randn(256, 576, generator=torch.Generator().manual_seed(1))
    assert (
        0.8 * ROUNDING["fp8_e4m3"] < error(unpack_latents(pack_latents(rows.bfloat16())), rows) < ROUNDING["fp8_e4m3"]
    )
