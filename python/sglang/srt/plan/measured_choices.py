"""Puts what was measured on this GPU in the place of what the tables choose: kernels, tiles of attention, and tile
configs of products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.ledger_file import Ledger
from sglang.srt.kernels.measured.choices import MeasuredChoices
from sglang.srt.kernels.measured.decision import Decision
from sglang.srt.kernels.measured.questions import (
    ATTENTION,
    KERNELS,
    attention_question,
    bucket_ranges,
    candidate_name,
    kernel_question,
    name_of_config,
    product_question,
)
from sglang.srt.kernels.spec import Choice, Need
from sglang.srt.kernels.tile_configs import OpTileConfigs, Shape, TileConfig, TileConfigs, config_for, joined

Force = Callable[[Need, str], Choice]
"""Resolves a need with a kernel that is named."""


def measured_choice(choice: Choice, arch: ArchTraits, measured: MeasuredChoices, force: Force) -> Choice:
    """Returns the choice with the kernel, or attention's tile, that was measured to be fastest."""
    need = choice.need
    if choice.tile is not None and need.op in ATTENTION:
        return _with_tile(choice, arch, measured)
    kernels = KERNELS.get(need.op, ())
    if need.quant is not None or choice.name not in kernels:
        return choice
    decision = measured.decision(kernel_question(need), choice.name, kernels)
    if decision is None:
        return choice
    chosen = force(need, decision.chosen.candidate) if decision.changes else choice
    return replace(chosen, note=str(decision))


def _with_tile(choice: Choice, arch: ArchTraits, measured: MeasuredChoices) -> Choice:
    assert choice.tile is not None
    by_name = {candidate_name("tiles", (tile,)): tile for tile in (choice.tile, *choice.smaller_tiles)}
    table = next(iter(by_name))
    decision = measured.decision(attention_question(choice.need), table, by_name)
    if decision is None:
        return choice
    tile = by_name[decision.chosen.candidate]
    others = tuple(other for other in by_name.values() if other is not tile)
    record = Ledger.load().record(choice.need, tile, arch)
    return replace(choice, tile=tile, smaller_tiles=others, record=record, note=str(decision))


def measured_tile_configs(
    choice: Choice, configs: OpTileConfigs, arch: ArchTraits, measured: MeasuredChoices
) -> OpTileConfigs:
    """Returns the tile configs of a product with the tiles that were measured to be fastest, and a line for each size
    that was measured."""
    if not choice.spec.alternatives or not measured.by_question:
        return configs
    by_shape, lines = dict(configs.by_shape), list[str]()
    for shape, table in configs.by_shape.items():
        decisions = dict(_decisions(choice, shape, table, arch, measured))
        by_shape[shape] = _changed(table, decisions)
        if shape is None or not shape[2] or (*shape[:2], False) not in configs.by_shape:
            name = "" if shape is None else f"{shape[0]}x{shape[1]}, "
            lines += [f"{name}{first} to {last} tokens: {d}" for (first, last), (d, _) in decisions.items()]
    return replace(configs, by_shape=by_shape, measured=tuple(lines))


def _decisions(
    choice: Choice, shape: Shape | None, table: TileConfigs, arch: ArchTraits, measured: MeasuredChoices
) -> Iterator[tuple[tuple[int, int], tuple[Decision, TileConfig]]]:
    """Yields the decision for each range of tokens that was measured, and the tile config that it is for."""
    for first, last in bucket_ranges():
        question = product_question(choice.need, shape, last)
        if question not in measured.by_question:
            continue
        table_config = config_for(table, last)
        by_name = {name_of_config(each): each for each in choice.make_alternatives(arch, shape, last)}
        by_name[name_of_config(table_config)] = table_config
        decision = measured.decision(question, name_of_config(table_config), by_name)
        if decision is not None:
            yield (first, last), (decision, by_name[decision.chosen.candidate])


def _changed(table: TileConfigs, decisions: dict[tuple[int, int], tuple[Decision, TileConfig]]) -> TileConfigs:
    """Returns the table's tile configs with those of the decisions that change something in their ranges."""
    changes = {span: decision for span, decision in decisions.items() if decision[0].changes}
    if not changes:
        return table
    pieces: list[TileConfig] = []
    done = 0.0
    for (first, last), (decision, config) in changes.items():
        pieces += _between(table, done, first - 1)
        pieces.append(replace(config, max_tokens=last, why=str(decision)))
        done = last
    return joined((*pieces, *_between(table, done, float("inf"))))


def _between(table: TileConfigs, done: float, last: float) -> Iterator[TileConfig]:
    """Yields the tile configs of more than `done` and at most `last` tokens."""
    for config in table:
        if done < min(config.max_tokens, last):
            yield replace(config, max_tokens=min(config.max_tokens, last))
            done = min(config.max_tokens, last)
