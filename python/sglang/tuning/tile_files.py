"""Names and contents of MoE tuning files, as tuners write them. Serving only reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.layers.moe.fused_moe_triton.config_format import KEYS, Content, TilePair
from sglang.srt.layers.moe.fused_moe_triton.config_names import UPSTREAM_SELECTORS, FileName
from sglang.srt.layers.moe.fused_moe_triton.tiles import GroupedTile


def directory_name(triton_version: str) -> str:
    """Returns "triton_3_6_0" for "3.6.0"."""
    return "triton_" + "_".join(triton_version.split("+")[0].split(".")[:3])


def own_name(num_experts: int, intermediate: int, hidden: int, scheme: str | None, arch: ArchTraits) -> FileName:
    """Returns the file's name by architecture and SM count, so that every edition of a card finds it."""
    assert scheme is None or scheme in SCHEMES
    return FileName(num_experts, intermediate, (scheme, None, False), hidden, arch=arch.name, num_sms=arch.num_sms)


def upstream_name(num_experts: int, intermediate: int, scheme: str | None, device_name: str) -> FileName:
    """Returns the file's name by the driver's name of the GPU, as upstream's tuner writes it; with our scheme's name
    where it has none."""
    selectors = UPSTREAM_SELECTORS.get(scheme, ((scheme, None, False),))
    return FileName(num_experts, intermediate, selectors[0], device=device_name.replace(" ", "_"))


def write_content(path: Path, content: Content) -> None:
    """Writes one line an entry, replacing the file as a whole."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.about.items()]
    lines += [f'  "{tokens}": {json.dumps(to_entry(pair))}' for tokens, pair in sorted(content.by_tokens.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(path)


def to_entry(pair: TilePair) -> dict[str, Any]:
    """Returns an entry with upstream's keys, and "down" where its tile differs."""
    up = _to_keys(pair.gate_up, 2)
    down = _to_keys(pair.down, 1)
    del down["BLOCK_SIZE_M"]
    return up if up == up | down else up | {"down": down}


def _to_keys(tile: GroupedTile, width: int) -> dict[str, Any]:
    entry: dict[str, Any] = {key: tile[ours] for key, ours in KEYS.items()}
    entry["BLOCK_SIZE_N"] *= width
    return entry
