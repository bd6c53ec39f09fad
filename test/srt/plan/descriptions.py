"""What a published config comes to, as text that names nothing of how it is computed: weights as the checkpoint stores
them and as a rank holds them, caches, ops and their kernels, memory, or why it is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import groups_of
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.layers.parameter import Param, TensorPart
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weight_names import WeightMap
from sglang.srt.server_args import ServerArgs

CARD = "rtx-pro-6000-server"
ROOM = 4 << 40
"""Bytes of memory of a rank: what does not fit is another test's."""
RANKS = 2


def describe(folder: Path) -> str:
    """Returns the description of the model in `folder` on one of two ranks, or on one where two are refused."""
    return "\n".join(_describe(folder)) + "\n"


def _describe(folder: Path) -> Iterator[str]:
    try:
        plan = _plan(folder, RANKS)
        check_layout(plan.description, RankLayout(RANKS))
    except UserError as error:
        yield f"on {RANKS} ranks: {reason(error, folder)}"
        try:
            plan = _plan(folder, 1)
        except UserError as refusal:
            yield f"refused: {reason(refusal, folder)}"
            return
    yield f"{plan.description.architecture}, rank {plan.ranks.tp_size - 1} of {plan.ranks.tp_size}"
    yield ""
    yield "caches"
    yield from (f"  {group}" for group in plan.caches)
    yield ""
    yield "ops"
    yield from (f"  {op}: {choice.name}, {choice.need.describe()}" for op, choice in sorted(plan.choices.items()))
    yield ""
    memory = plan.memory
    yield f"memory: weights {memory.weights:,}, activations {memory.activations:,}, logits {memory.logits:,}"
    yield ""
    yield "weights: held as, from"
    groups = groups_of(plan.ranks, plan.ranks.tp_size - 1)
    with patch.object(parallel_state, "groups", lambda: groups):
        model = CausalLM(plan, device="meta")
    yield from weights(model.params.values(), model.weights)


def reason(error: UserError, folder: Path) -> str:
    """Returns the message without the folder, and without the list of all architectures."""
    return str(error).partition(" Supported: ")[0].replace(str(folder), "MODEL")


def _plan(folder: Path, tp_size: int) -> Plan:
    args = ServerArgs.from_kwargs(model_path=str(folder), load_format="dummy", tp_size=tp_size)
    return make_plan(args, ModelConfig.from_server_args(args), arch_by_name(CARD), ROOM, frozenset({"triton"}))


def weights(params: Sequence[Param], names: WeightMap) -> Iterator[str]:
    """Yields a line for parameters that differ in numbers of layers and experts alone."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for param in params:
        held = f"{pattern(param.name)} {list(param.tensor.shape)} {str(param.tensor.dtype).removeprefix('torch.')}"
        experts = {key.expert for key in param.parts}
        shown = {min(experts), max(experts)} if experts else set()  # those between are alike
        parts = dict.fromkeys(
            f"    {pattern(names.checkpoint_name(param.name, key))} {_part(part)}"
            for key, part in param.parts.items()
            if key.expert in shown
        )
        number = re.search(r"\d+", param.name)
        alike.setdefault((held, *parts), []).append(int(number.group()) if number else 0)
    for (held, *parts), layers in alike.items():
        yield f"  {held} x {len(layers)}: {ranges(layers)}"
        yield from parts


def pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def ranges(numbers: Sequence[int]) -> str:
    """Returns the numbers with runs of equal distance as first-last/step.

    >>> ranges([0, 1, 2, 5, 8, 11, 20])
    '0-2 5-11/3 20'
    """
    texts, left = [], list(numbers)
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        count = 1
        while count < len(left) and left[count] - left[count - 1] == step:
            count += 1
        if count < 3 and step != 1:
            count = 1
        texts.append(f"{left[0]}" if count == 1 else f"{left[0]}-{left[count - 1]}" + (f"/{step}" if step != 1 else ""))
        left = left[count:]
    return " ".join(texts)


def _part(part: TensorPart) -> str:
    source = ", ".join(f"{cut.start or 0}:{'' if cut.stop is None else cut.stop}" for cut in part.source)
    kinds = "/".join(part.dtypes)
    return f"{list(part.shape)} [{source}] {kinds}{' optional' if part.optional else ''}"
