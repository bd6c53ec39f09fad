"""A window of GPU time for the levers of FP8 prefill: what it would do, and files that a server understands."""

from __future__ import annotations

import json
from pathlib import Path

import fp8_prefill
import pytest

from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.layers.moe.fused_moe_triton.config_files import find


def test_what_does_not_fit_the_limit_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "a/glm", "--model", "a/dsv3", "--out", str(tmp_path), "--dry-run"]
    assert fp8_prefill.main([*words, "--limit", "10000"]) == 0
    said = capsys.readouterr().out
    for part in ("products", "steps of glm", "steps of dsv3", "tune of glm", "tune of dsv3", "rows"):
        assert f"{part} (about " in said
    assert fp8_prefill.main([*words, "--parts", "products,steps", "--limit", "100"]) == 1
    assert "steps of glm: left out, it takes 190 s" in capsys.readouterr().out


def test_a_part_that_fails_is_one_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    session = fp8_prefill.Session(tmp_path, float("inf"), dry=False)
    session.part("steps", 1, lambda: session.command("steps", ["-c", "raise SystemExit('no memory')"], 30))
    session.part("rows", 1, lambda: session.command("rows", ["-c", "print('made')"], 30))
    assert session.failures == ["steps: RuntimeError: no memory\n"] and "made" in (tmp_path / "rows.log").read_text()


@pytest.mark.parametrize(
    ("scheme", "sizes", "name"),
    [
        ("fp8_channel", (161, 1536, 5120), "E=161,N=1536,device_name=NVIDIA_H200,dtype=fp8_channel"),
        ("fp8_block", (257, 2048, 7168), "E=257,N=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128]"),
    ],
)
def test_former_tiles_are_what_the_server_takes(
    scheme: str, sizes: tuple[int, int, int], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name.replace("fp8_channel", "fp8_w8a8,per_channel_quant=True")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / f"{name}.json").write_text(json.dumps(fp8_prefill.former_file(scheme)))
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    experts, columns, hidden = sizes
    tiles = find(experts, columns, scheme, arch_by_name("h200"), hidden=hidden).tiles
    assert tiles is not None and tiles.path.is_relative_to(tmp_path)
    assert [tiles.at(tokens) for tokens in (64, 1024, 16384)] == list(fp8_prefill.FORMER_TILES[scheme].values())
