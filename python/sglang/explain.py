"""`python -m sglang.explain --arch sm_120 --model-path DIR [server flags] [--json]`: which kernels would run, and why.

Works on any machine: nothing is asked of a device, nothing is compiled, the model's weights are not read.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.hf_config import merge_overrides, read_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.quant_scheme import SCHEMES, expert_share
from sglang.srt.configs.quantization import agree, detect
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits, arch_by_name, current_arch
from sglang.srt.kernels.ledger_file import Ledger, judged_as, tile_key
from sglang.srt.kernels.resolve import resolve
from sglang.srt.kernels.spec import Choice, Need, NoKernel, Rejection
from sglang.srt.layers.moe.fused_moe_triton.capacity import recorded_cost
from sglang.srt.layers.moe.fused_moe_triton.config_files import find
from sglang.srt.plan.kv_spec import kv_cache_dtype
from sglang.srt.plan.model_facts import ModelFacts, facts_from_config
from sglang.srt.plan.needs import needs_of
from sglang.srt.plan.plan import forced_kernels, kv_spec, make_plan
from sglang.srt.server_args import ServerArgs

USUAL_FREE_SHARE = 0.97
"""Of a GPU's memory, once the driver and a CUDA context have theirs."""

COLUMNS = ("op", "kernel", "tile", "smem", "regs", "spill", "mma")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that is printed. A need without a kernel has a NoKernel instead of a Choice."""

    arch: ArchTraits
    facts: ModelFacts
    not_implemented: str | None  # why this model cannot be served yet
    kv: dict[str, Any]
    outcomes: tuple[Choice | NoKernel, ...]
    moe_tiles: str | None  # where the experts' tiles come from
    plan: dict[str, Any] | None  # sizes and memory, of implemented models
    notes: tuple[str, ...]


def explain(args: ServerArgs, arch: ArchTraits, packages: frozenset[str]) -> Explanation:
    """Raises UserError: a model or configuration that cannot be read."""
    directory = resolve_model_path(args.model_path, args.revision, args.download_dir, False)
    config = merge_overrides(read_config(directory), args.model_overrides())
    quantization = agree(args.quantization, detect(config, directory), str(directory))
    facts = facts_from_config(config, quantization)
    dtype = facts.dtype if args.dtype == "auto" else args.dtype
    kv_dtype = kv_cache_dtype(args.kv_cache_dtype, dtype, quantization)
    needs = needs_of(facts, dtype, kv_dtype, args.page_size or 1, args.tp_size)
    forced = forced_kernels(args)
    outcomes = tuple(_outcome(need, arch, packages, forced.get(need.op)) for need in needs)
    try:
        model: ModelConfig | None = ModelConfig.from_server_args(args)
        not_implemented = None
    except UserError as error:
        model, not_implemented = None, str(error)
    plan, notes = _plan(args, model, arch, packages) if model else (None, ())
    spec = kv_spec(facts, kv_dtype, args.tp_size)
    kv = {"dtype": kv_dtype, "layers": spec.num_layers, "bytes_per_token": spec.bytes_per_token}
    tiles = _moe_tiles(args, arch, config, facts)
    return Explanation(arch, facts, not_implemented, kv, outcomes, tiles, plan, notes)


def _moe_tiles(args: ServerArgs, arch: ArchTraits, config: Mapping[str, Any], facts: ModelFacts) -> str | None:
    """The tuning file that the experts' layers will find, and those that they will reject."""
    if not facts.num_experts or arch.capability is None:
        return None
    text = config.get("text_config") or config
    scheme, bias = facts.expert_quant, text.get("model_type") == "gpt_oss"
    try:
        share = expert_share(facts.expert_inter, args.tp_size, SCHEMES[scheme] if scheme else None)
    except UserError as error:
        return str(error)
    experts = facts.num_experts + (facts.shared_as_routed and not args.disable_shared_experts_fusion)
    return find(experts, share, scheme, arch, hidden=facts.hidden_size, bias=bias, cost=recorded_cost).describe()


def _outcome(need: Need, arch: ArchTraits, packages: frozenset[str], forced: str | None) -> Choice | NoKernel:
    try:
        return resolve(need, arch, Ledger.load(), packages, forced)
    except NoKernel as none:
        return none


def _plan(
    args: ServerArgs, model: ModelConfig, arch: ArchTraits, packages: frozenset[str]
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    if arch.device == "cpu":
        return None, ()
    try:
        plan = make_plan(args, model, arch, int(arch.memory * USUAL_FREE_SHARE), packages)
    except UserError as error:
        return None, (str(error),)
    described = plan.describe()
    return {key: value for key, value in described.items() if key != "kernels"}, (*plan.errors, *plan.warnings)


def to_json(explanation: Explanation) -> dict[str, Any]:
    """Stable keys; sizes in bytes."""
    arch, facts = explanation.arch, explanation.facts
    return {
        "arch": arch.name,
        "product": arch.product,
        "features": sorted(arch.features),
        "model": facts.architecture,
        "not_implemented": explanation.not_implemented,
        "kv_cache": explanation.kv,
        "moe_tiles": explanation.moe_tiles,
        "ops": {outcome.need.key: _op_json(outcome) for outcome in explanation.outcomes},
        "plan": explanation.plan,
        "notes": list(explanation.notes),
    }


def _op_json(outcome: Choice | NoKernel) -> dict[str, Any]:
    rejected = {rejection.kernel: list(rejection.reasons) for rejection in outcome.rejected}
    need = outcome.need.describe()
    if isinstance(outcome, NoKernel):
        return {"need": need, "kernel": None, "not_chosen": rejected}
    record = outcome.record
    return {
        "need": need,
        "kernel": outcome.name,
        "note": outcome.note,
        "remark": outcome.remark,
        "tile": dict(outcome.tile) if outcome.tile else None,
        "smem": record.smem if record else None,
        "registers": record.registers if record else None,
        "spills": record.spills if record else None,
        "mma": list(record.mma) if record else [],
        "not_chosen": rejected,
    }


def to_text(explanation: Explanation) -> str:
    """The table, for people."""
    arch, facts = explanation.arch, explanation.facts
    lines = [
        f"{facts.architecture} on {arch.name}" + (f" ({arch.product}, {arch.num_sms} SMs)" if arch.product else "")
    ]
    if explanation.not_implemented:
        lines.append(f"This model is not implemented yet: {explanation.not_implemented}")
        lines.append("The table says which of its ops have a kernel already.")
    kv = explanation.kv
    lines.append(f"KV cache: {kv['dtype']}, {kv['layers']} layers, {kv['bytes_per_token']:,} B a token and GPU")
    if arch.capability and judged_as(arch) != arch.name:
        lines.append(f"{arch.name} is not verified: tiles and numbers are those of {judged_as(arch)}.")
    rows = [COLUMNS, *(_cells(outcome) for outcome in explanation.outcomes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines.append("")
    for row, outcome in zip(rows, (None, *explanation.outcomes), strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if outcome is not None:
            lines += _details(outcome, explanation.moe_tiles)
    if explanation.plan:
        lines += ["", *(f"{key}: {value}" for key, value in explanation.plan.items() if key != "warnings")]
    lines += ["", *explanation.notes] if explanation.notes else []
    return "\n".join(lines)


def _cells(outcome: Choice | NoKernel) -> tuple[str, ...]:
    if isinstance(outcome, NoKernel):
        return (outcome.need.key, "none", "", "", "", "", "")
    record = outcome.record
    if record is None:
        return (outcome.need.key, outcome.name, "", "", "", "", "")
    tile = tile_key(outcome.tile) if outcome.tile else ""
    mma = ", ".join(record.mma)
    return (outcome.need.key, outcome.name, tile, f"{record.smem:,}", str(record.registers), str(record.spills), mma)


def _details(outcome: Choice | NoKernel, moe_tiles: str | None) -> list[str]:
    """The need, the note, and the rejected candidates; those with the same reason share an entry."""
    by_reason: dict[tuple[str, ...], list[str]] = {}
    for rejection in outcome.rejected:
        by_reason.setdefault(rejection.reasons, []).append(rejection.kernel)
    entries = [str(Rejection(", ".join(kernels), reasons)) for reasons, kernels in by_reason.items()]
    texts = [f"for {outcome.need.describe()}"]
    if isinstance(outcome, Choice) and outcome.note:
        texts.append(f"because {outcome.note}")
    if isinstance(outcome, Choice) and outcome.need.op == "fused_moe" and outcome.name == "triton" and moe_tiles:
        texts.append(f"tiles: {moe_tiles}")
    if isinstance(outcome, Choice) and outcome.remark:
        texts.append(f"how: {outcome.remark}")
    if entries:
        texts.append("not chosen: " + " | ".join(entries))
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, 116, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang.explain",
        description="Print which kernels would serve a model on a GPU, and why the others would not. Any other"
        " flag of the server may be given and counts.",
        allow_abbrev=False,
    )
    parser.add_argument("--arch", help="sm_120, ..., a product such as rtx-5090, or cpu; this machine's if not given")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--with-package", action="append", default=[], metavar="NAME", help="count on flashinfer, ...")
    own, rest = parser.parse_known_args(argv)
    try:
        args = ServerArgs.from_cli(rest, prog="python -m sglang.explain")
        arch = arch_by_name(own.arch) if own.arch else current_arch(device=args.device)
        explanation = explain(args, arch, frozenset({"triton", *own.with_package}))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(to_json(explanation), indent=2) if own.json else to_text(explanation))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
