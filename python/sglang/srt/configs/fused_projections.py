"""Finds out how often [q; k; v] is repeated in a checkpoint's fused tensor, which config.json does not say. No torch.

MiMo-V2.5 in FP8 was written by the ranks that trained it: each has the rows of q, k and v of its heads, whose scales of
128 x 128 begin anew (`plan.fused_rows`). Checkpoints that were written again with transformers have [q; k; v] once,
under the same names and in the same shape. Where blocks of 128 rows do not divide a rank's rows, the number of rows of
scales tells them apart; the other layers follow these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.checkpoint_header import Stored, stored_tensors
from sglang.srt.errors import UserError

LAYOUT, FUSED, SPLIT = "attention_projection_layout", "fused_qkv", "split"
TP_BLOCKS = "attention_projection_tp_blocks"
"""Key that is not part of published configs; --json-model-override-args may set it."""
PUBLISHED_TP_BLOCKS = (1, 4, 8)
"""Numbers of TP blocks in published checkpoints: rewritten ones, MiMo-V2.5's and MiMo-V2.5-Pro's."""
_MODULE = ".self_attn.qkv_proj"
_SCALES = (f"{_MODULE}.weight_scale_inv", f"{_MODULE}.weight_scale")
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class _Rows:
    """A layer's fused tensor: its rows, and the rows of its scales."""

    module: str
    rows: int
    scales: int

    def of(self, tp_blocks: int) -> int:
        """Returns the rows of scales that `tp_blocks` TP blocks would have."""
        return tp_blocks * -(-self.rows // tp_blocks // _BLOCK)

    def fits(self, tp_blocks: int) -> bool:
        return self.rows % tp_blocks == 0 and self.scales == self.of(tp_blocks)


def with_tp_blocks(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns config.json with the number of TP blocks of the fused q, k and v of the checkpoint in `folder`, where it
    fuses them and does not state the number. Raises UserError where the tensors do not tell."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    if text.get(LAYOUT) != FUSED or text.get(TP_BLOCKS) is not None:
        return dict(config)
    stored = stored_tensors(folder, lambda name: name.endswith((f"{_MODULE}.weight", *_SCALES)))
    if not stored:
        return dict(config)
    stated = {**text, TP_BLOCKS: _tp_blocks(text, stored, folder)}
    return {**config, "text_config": stated} if text is inner else stated


def _tp_blocks(text: Mapping[str, Any], stored: Mapping[str, Stored], folder: Path) -> int:
    heads = [text[key] for key in ("num_key_value_heads", "swa_num_key_value_heads") if isinstance(text.get(key), int)]
    possible = [count for count in PUBLISHED_TP_BLOCKS if all(number % count == 0 for number in heads)]
    fitting = possible
    for layer in _in_blocks(stored):
        fitting = [count for count in fitting if layer.fits(count)]
        if not fitting:
            counts = ", ".join(f"{layer.of(count)} with {_times(count)}" for count in possible)
            raise UserError(
                f"{folder}: {layer.module} has {layer.rows} rows and {layer.scales} rows of scales. Supported are as"
                f" many as [q; k; v] stored {counts}, the same number of times in every layer."
            )
    if len(fitting) == 1:
        return fitting[0]
    first = next(_in_blocks(stored), None)
    if first is None:
        seen = "without scales of blocks of rows"
    else:
        seen = f"{first.module} with {first.rows} rows and {first.scales} rows of scales"
    ways = " or ".join(map(_times, fitting))
    raise UserError(
        f"{folder}: q, k and v are one tensor, {seen}, which is the same for [q; k; v] stored {ways}, and the wrong one"
        " would answer with garbage. Checkpoints that were saved again with transformers have it once; of the first"
        " ones MiMo-V2.5 has it 4 times and MiMo-V2.5-Pro 8 times. State which: --json-model-override-args"
        f" '{{\"{TP_BLOCKS}\": {fitting[0]}}}'."
    )


def _in_blocks(stored: Mapping[str, Stored]) -> Iterator[_Rows]:
    """Yields the layers with scales for blocks of rows; scales for each row tell nothing."""
    for name, scale in sorted(stored.items()):
        if not name.endswith(_SCALES) or len(scale.shape) != 2:
            continue
        module = name.rpartition(".")[0]
        weight = stored.get(f"{module}.weight")
        if weight is not None and scale.shape[0] < weight.shape[0]:
            yield _Rows(module, weight.shape[0], scale.shape[0])


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
