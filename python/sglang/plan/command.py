"""The command line of `sglang plan`, and what it prints."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from sglang.plan.cache_forms import EXPLANATION, form_rows, forms_json
from sglang.plan.floors import Floor
from sglang.plan.host_memory import Machine
from sglang.plan.layouts import CLEARLY, GIB, Load, Prospect, Survey, check_counts, survey
from sglang.srt.configs.speculative import MAX_DRAFT_TOKENS
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.srt.plan.host_cache import LARGEST_UNASKED
from sglang.tuning.report import data_sheet_lines
from sglang.tuning.steps import StepTime

CAVEAT = (
    "Floors are lower bounds: they count only the bytes and multiplications of a step, at the card's full rates. A real"
    ' step takes longer. "with NCCL" adds all-reduces as they were measured on eight RTX PRO 6000 Server cards.'
)
PREDICTED = (
    "Predicted, not measured: no card of this kind has run this server. Device time of a step (low - high: the range"
    " of the errors of its ops), without the host, from times that others measured on an RTX PRO 6000 Server or this"
    " project on an H200. docs/performance.md says how far off they may be. The recommendation rests on these figures."
)
MACHINES = (
    "Between machines nobody has measured collectives of this server: they are counted at 200 Gb/s, and take no less"
    ' time than between two cards of one machine ("with NCCL"). A network takes longer; start it and see.'
)
ACCEPT_LENGTH = 2.5
"""Default of --accept-length: tokens of a request in a step with drafts. What a model reaches depends on the texts."""
DRAFTED = (
    "Predicted with drafts, at {length:g} tokens of a request and step (--accept-length), which is assumed: a step that"
    " verifies all draft tokens and makes the next ones. Pays from: the accept length from which drafts are faster than"
    " none."
)
MOST_GIB, MOST_CHANNELS = 1 << 20, 64
"""Larger numbers are mistakes."""
COLUMNS = (
    ("layout", "servers and GPUs of each"),
    ("weights", "GiB of one GPU"),
    ("cache", "GiB of one GPU"),
    ("tokens", "KV tokens of one server"),
    ("requests", "of that length at once, all servers"),
    ("1 req ms", "decode step of one request, floor"),
    ("with NCCL", "the same, all-reduces as measured"),
    ("load ms", "decode step with the load, floor; of PP stages, which requests pass in turns, of one turn in all"),
    ("with NCCL", "the same, all-reduces as measured"),
    ("tok/s", "of all servers with the load, at most"),
    ("prefill ms", "prompt of that length, floor"),
)


def run_plan(argv: Sequence[str]) -> None:
    """Runs `sglang plan` with these command-line words and prints the result. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="sglang plan",
        description="Print the memory and the speed of a model on some GPUs, for every layout that the server can run."
        " Needs no GPU and reads no weights. Any other flag of the server may be given and counts; a first word without"
        " dashes is the model.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=int, help="how many in all; default: one, or as many as --nodes machines have")
    parser.add_argument("--nodes", type=int, default=1, help="machines that a server may span; default: 1")
    parser.add_argument("--gpu", help="rtx-pro-6000, rtx-5090, gb10, ...; this machine's if not given")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a request, prompt and answer; default 8192")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at once, of all servers; default: 64")
    parser.add_argument(
        "--accept-length",
        type=float,
        default=ACCEPT_LENGTH,
        help="tokens of a request and step with drafts, where the flags ask for some; default: %(default)s",
    )
    parser.add_argument("--free-memory", type=float, help="GiB free on a GPU; default: 97%% of what the card has")
    parser.add_argument(
        "--main-memory",
        type=float,
        help="GiB of main memory that are free on a machine: experts of weights that do not fit then lie there",
    )
    parser.add_argument(
        "--memory-channels",
        type=int,
        default=0,
        help="channels of DDR5 of a machine; default: as many as the GPUs need",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    first = ["--model-path"] if argv and not argv[0].startswith("-") else []
    options, words = parser.parse_known_args([*first, *argv])
    load = Load(options.length, options.concurrency)
    arch = arch_by_name(options.gpu) if options.gpu else current_arch()
    gpus = options.nodes * max(1, arch.gpus_per_machine) if options.gpus is None else options.gpus
    check_counts(gpus, load, options.nodes, arch)
    free, main = _num_bytes("--free-memory", options.free_memory), _num_bytes("--main-memory", options.main_memory)
    if not 0 <= options.memory_channels <= MOST_CHANNELS:
        raise UserError(f"--memory-channels must be from 0 to {MOST_CHANNELS}; got {options.memory_channels:,}.")
    if not 1 <= options.accept_length <= MAX_DRAFT_TOKENS:
        raise UserError(
            f"--accept-length must be from 1 to {MAX_DRAFT_TOKENS} tokens, the most of a step; got"
            f" {options.accept_length:g}."
        )
    result = survey(words, gpus, arch, load, free, options.nodes, Machine(main, channels=options.memory_channels))
    length = options.accept_length
    print(json.dumps(to_json(result, length), indent=2) if options.json else to_text(result, length))


def _num_bytes(flag: str, gib: float | None) -> int | None:
    """Returns the bytes of a number of GiB. Raises UserError for what no machine has."""
    if gib is not None and not 0 <= gib <= MOST_GIB:
        raise UserError(f"{flag} must be from 0 to {MOST_GIB:,} GiB; got {gib:g}.")
    return None if gib is None else int(gib * GIB)


def to_json(result: Survey, accept_length: float = ACCEPT_LENGTH) -> dict[str, Any]:
    """Returns the survey for JSON, in bytes and seconds. `accept_length`: assumed for steps with drafts."""
    best = result.best()
    return {
        "caveat": CAVEAT,
        "model": result.explanation.model.architecture,
        "not_implemented": result.explanation.not_implemented,
        "gpu": result.explanation.arch.product or result.explanation.arch.name,
        "gpus": result.gpus,
        "nodes": result.nodes,
        "length": result.load.length,
        "concurrency": result.load.concurrency,
        "layouts": [_prospect_json(prospect, accept_length) for prospect in result.prospects],
        "refused": [{"layout": str(layout), "reason": reason} for layout, reason in result.refused],
        "tuned_files": {str(layout): file for layout, file in result.tuned_files},
        "cache_forms": {"layout": None if result.forms_of is None else str(result.forms_of)}
        | {"forms": forms_json(result.forms)},
        "gains": [_gain_json(*pair) for pair in result.gains()],
        "recommended": None if best is None else str(best.layout),
        "reasons": reasons(result),
    }


def _step_seconds(prospect: Prospect) -> tuple[float, float]:
    """Returns the seconds of a decode step of one request and of one with the load: predicted, or floors where nobody
    timed the card."""
    prediction = prospect.predicted
    if prediction is None:
        return prospect.one.seconds_with_nccl, prospect.loaded.seconds_with_nccl
    return prediction.one.seconds, prediction.loaded.seconds


def _gain_json(prospect: Prospect, whole: Prospect) -> dict[str, Any]:
    """Returns what DCP or DP attention gains in tokens and costs a step, compared with `whole`."""
    one, loaded = (here - there for here, there in zip(_step_seconds(prospect), _step_seconds(whole), strict=True))
    return {
        "layout": str(prospect.layout),
        "beside": str(whole.layout),
        "tokens": prospect.tokens / whole.tokens,
        "decode_one_seconds": one,
        "decode_load_seconds": loaded,
        "requests_per_server": prospect.requests_per_server,
        "requests_per_server_beside": whole.requests_per_server,
    }


def _gains(result: Survey) -> list[str]:
    """Returns lines that say what DCP or DP attention gains in tokens and costs a step."""
    lines = []
    for prospect, whole in result.gains():
        gain = _gain_json(prospect, whole)
        how = "at least" if prospect.predicted is None else "predicted"
        lines.append(
            f"{prospect.layout}: {gain['tokens']:.1f} times the tokens of {whole.layout}; a decode step takes, {how},"
            f" {_more(gain['decode_one_seconds'])} with one request and {_more(gain['decode_load_seconds'])} with the"
            f" load ({prospect.requests_per_server} requests a server, {whole.requests_per_server} there)"
        )
    return lines


def _in_main_memory(result: Survey) -> list[str]:
    """Returns lines about experts in main memory, and about the weights of a sleeping server."""
    slots = {prospect.layout: prospect.expert_slots for prospect in result.prospects if prospect.expert_slots}
    lines = [line for layout, plan in slots.items() for line in textwrap.wrap(f"{layout}: {plan}", 116)]
    if lines:
        lines.append("Floors do not count what crosses the bus; these predictions do.")
    return lines + [f"{each.layout}: {each.weights_copy}" for each in result.prospects if each.weights_copy]


def _more(seconds: float) -> str:
    return f"{abs(seconds) * 1e3:.2f} ms {'less' if seconds < 0 else 'more'}"


def _prospect_json(prospect: Prospect, accept_length: float) -> dict[str, Any]:
    return {
        "layout": str(prospect.layout),
        "tp_size": prospect.layout.tp_size,
        "ep_size": prospect.layout.ep_size,
        "pp_size": prospect.layout.pp_size,
        "dcp_size": prospect.layout.dcp_size,
        "attn_dp_size": prospect.layout.attn_dp_size,
        "machines": prospect.layout.machines,
        "servers": prospect.layout.servers,
        "weights": prospect.weights,
        "cache": prospect.cache,
        "tokens": prospect.tokens,
        "requests": prospect.max_requests,
        "decode_one": _floor_json(prospect.one),
        "decode_load": _floor_json(prospect.loaded) | {"requests_per_server": prospect.requests_per_server},
        "tokens_per_second_at_most": prospect.tokens_per_second,
        "prefill": _floor_json(prospect.prefill),
        "predicted": _predicted_json(prospect),
        "loaded": {"bytes": prospect.loaded_bytes, "seconds": prospect.loaded_seconds},
        "with_drafts": _drafted_json(prospect, accept_length),
        **({"expert_slots": prospect.expert_slots.describe()} if prospect.expert_slots is not None else {}),
        **({"weights_copy": prospect.weights_copy.describe()} if prospect.weights_copy is not None else {}),
        "commands": list(prospect.commands),
        "notes": list(prospect.notes),
    }


def _predicted_json(prospect: Prospect) -> dict[str, Any] | None:
    """Returns predicted seconds with their range, and the ops for which this server has no kernel; None for a card that
    nobody timed."""
    prediction, speeds = prospect.predicted, prospect.predicted_tokens_per_second
    if prediction is None or speeds is None:
        return None

    def times(time: StepTime) -> dict[str, float]:
        return {"seconds": time.seconds, "low": time.low, "high": time.high, "best_measured_ops": time.best}

    return {
        "decode_one": times(prediction.one),
        "decode_load": times(prediction.loaded),
        "prefill": times(prediction.prefill),
        "tokens_per_second": dict(zip(("predicted", "low", "high"), speeds, strict=True)),
        "missing": list(dict.fromkeys((*prediction.one.missing, *prediction.prefill.missing))),
    }


def _drafted_json(prospect: Prospect, accept_length: float) -> dict[str, Any] | None:
    """Returns the seconds of the parts of steps with drafts, and tokens a second; None without drafts or a
    prediction."""
    if prospect.predicted is None or prospect.predicted.drafted is None:
        return None
    names = ("decode_one", "decode_load")
    steps: dict[str, Any] = {
        name: {
            "verify_seconds": step.verify.seconds,
            "draft_seconds": step.draft.seconds,
            "pays_from": step.pays_from,
            "tokens_per_second": prospect.layout.servers * step.tokens_per_second(accept_length)
            if name == "decode_load"
            else step.tokens_per_second(accept_length),
        }
        for name, step in zip(names, prospect.predicted.drafted, strict=True)
    }
    return {"accept_length": accept_length, **steps}


def _floor_json(floor: Floor) -> dict[str, Any]:
    return {
        "read_bytes": round(floor.read_bytes),
        "read_seconds": floor.read_seconds,
        "flops": round(floor.flops),
        "flop_seconds": floor.flop_seconds,
        "all_reduce_bytes": round(floor.reduced_bytes),
        "link_seconds": floor.link_seconds,
        "nccl_seconds": floor.nccl_seconds,
        "seconds": floor.seconds,
    }


def to_text(result: Survey, accept_length: float = ACCEPT_LENGTH) -> str:
    """Returns the report for people. `accept_length`: assumed for steps with drafts."""
    arch, load = result.explanation.arch, result.load
    lines = [
        f"{result.explanation.model.title} on {result.gpus} x {arch.product or arch.name},"
        f" {load.concurrency} requests of {load.length:,} tokens",
        *textwrap.wrap(CAVEAT, 116),
    ]
    if any(prospect.layout.ep_size > 1 for prospect in result.prospects):
        lines.append("EP: whole experts on each rank; the average rank is counted, the busiest one has more to do.")
    if any(prospect.layout.machines > 1 for prospect in result.prospects):
        lines.extend(textwrap.wrap(MACHINES, 116))
    if any(prospect.layout.dcp_size > 1 for prospect in result.prospects):
        lines.append(
            "DCP: the ranks share out the tokens of latents, for two more collectives a layer when they decode."
        )
    if any(prospect.layout.attn_dp_size > 1 for prospect in result.prospects):
        lines.append(
            "DP attention: each rank has requests of its own, with all heads; dense layers and experts stay shared."
        )
    if result.explanation.not_implemented is not None:
        lines.append(f"This model is not implemented yet, sizes are estimates: {result.explanation.not_implemented}")
    if result.explanation.missing:
        names = ", ".join(outcome.need.key for outcome in result.explanation.missing)
        lines.append(f"No kernel here serves {names}.")
    lines += ["", *_table(result), ""]
    lines += [f"{name}: {meaning}" for name, meaning in dict(COLUMNS).items() if name != "layout"]
    lines += ["", *_forms(result), *_gains(result)]
    lines += _in_main_memory(result)
    lines += ["", *_traffic(result), *_predictions(result), *_drafted(result, accept_length)]
    best = result.best()
    if best is not None:
        lines += ["", f"Recommended: {best.layout}", *(f"  - {reason}" for reason in reasons(result))]
        lines += ["  " + command for command in best.commands]
        lines += [f"  note: {note}" for note in best.notes]
    else:
        lines += ["", *(f"No recommendation: {reason}" for reason in reasons(result))]
    if result.tuned_files:
        lines += ["", "Tuned tiles of the experts:"]
        lines += [f"  {layout}: {file}" for layout, file in result.tuned_files]
    if result.refused:
        lines += ["", "Not possible:", *(f"  {layout}: {reason}" for layout, reason in result.refused)]
    return "\n".join(lines)


def _table(result: Survey) -> list[str]:
    rows = [tuple(name for name, _ in COLUMNS), *(_row(prospect) for prospect in result.prospects)]
    return _aligned(rows)


def _forms(result: Survey) -> list[str]:
    """Returns the table of tokens by the form of the cache, with the reasons why one is not served."""
    if not result.forms:
        return []
    lines = [
        f"Tokens of a server with {result.forms_of}, by the form of its cache:",
        *_aligned([*form_rows(result.forms)]),
    ]
    for form in result.forms:
        if form.refused is not None:
            lines += textwrap.wrap(f"{form.bits} bits: not served: {form.refused}", 116)
    return [*lines, *textwrap.wrap(EXPLANATION, 116), ""]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _row(prospect: Prospect) -> tuple[str, ...]:
    one, loaded, prefill = prospect.one, prospect.loaded, prospect.prefill
    return (
        str(prospect.layout),
        f"{prospect.weights / GIB:.2f}",
        f"{prospect.cache / GIB:.2f}",
        f"{prospect.tokens:,}",
        f"{prospect.max_requests:,}",
        f"{one.seconds * 1e3:.2f}",
        f"{one.seconds_with_nccl * 1e3:.2f}",
        f"{loaded.seconds * 1e3:.2f}",
        f"{loaded.seconds_with_nccl * 1e3:.2f}",
        f"{prospect.tokens_per_second:,.0f}",
        f"{prefill.seconds * 1e3:,.0f}",
    )


def _traffic(result: Survey) -> list[str]:
    """Returns lines with the bytes and operations of the floors."""
    lines = []
    for prospect in result.prospects:
        for name, floor in (("decode with the load", prospect.loaded), ("prefill", prospect.prefill)):
            flop = "unknown" if floor.flop_seconds is None else f"{floor.flop_seconds * 1e3:,.2f} ms"
            text = (
                f"{prospect.layout}, {name}: {floor.read_bytes / 1e9:,.2f} GB read {floor.read_seconds * 1e3:,.2f} ms,"
                f" {floor.flops / 1e12:,.3f} TFLOP {flop}"
            )
            if floor.reduced_bytes:
                text += f", all-reduce {floor.reduced_bytes / 1e6:,.1f} MB {floor.link_seconds * 1e3:,.2f} ms"
            lines.append(text)
    return lines


def _predictions(result: Survey) -> list[str]:
    """Returns the table of predicted steps; empty for a card that nobody timed."""
    head = (
        "layout",
        "1 req ms",
        "low - high",
        "load ms",
        "low - high",
        "tok/s",
        "low - high",
        "prefill ms",
        "low - high",
    )
    rows: list[tuple[str, ...]] = [head]
    for prospect in result.prospects:
        if prospect.predicted is None or prospect.predicted_tokens_per_second is None:
            continue
        cells = [str(prospect.layout)]
        for time, digits in ((prospect.predicted.one, 2), (prospect.predicted.loaded, 2)):
            cells += [f"{time.seconds * 1e3:.{digits}f}", f"{time.low * 1e3:.{digits}f} - {time.high * 1e3:.{digits}f}"]
        speed, low, high = prospect.predicted_tokens_per_second
        prefill = prospect.predicted.prefill
        cells += [f"{speed:,.0f}", f"{low:,.0f} - {high:,.0f}"]
        cells += [f"{prefill.seconds * 1e3:,.0f}", f"{prefill.low * 1e3:,.0f} - {prefill.high * 1e3:,.0f}"]
        rows.append(tuple(cells))
    if len(rows) == 1:
        return []
    missing = dict.fromkeys(name for p in result.prospects if p.predicted for name in p.predicted.one.missing)
    lines = ["", *textwrap.wrap(PREDICTED, 116), *data_sheet_lines(result.explanation.arch), "", *_aligned(rows)]
    if missing:
        lines.append(
            f"No kernel here computes {', '.join(missing)}: counted as the best that others measured, or as bytes."
        )
    return lines


def _drafted(result: Survey, accept_length: float) -> list[str]:
    """Returns the table of predicted steps with drafts; empty without drafts, or for a card that nobody timed."""
    rows: list[tuple[str, ...]] = [
        ("layout", "1 req ms", "pays from", "tok/s", "load ms", "pays from", "tok/s"),
    ]
    for prospect in result.prospects:
        if prospect.predicted is None or prospect.predicted.drafted is None:
            continue
        cells = [str(prospect.layout)]
        for step, servers in zip(prospect.predicted.drafted, (1, prospect.layout.servers), strict=True):
            speed = servers * step.tokens_per_second(accept_length)
            cells += [f"{step.seconds * 1e3:.2f}", f"{step.pays_from:.2f}", f"{speed:,.0f}"]
        rows.append(tuple(cells))
    if len(rows) == 1:
        return []
    text = DRAFTED.format(length=accept_length)
    return ["", *textwrap.wrap(text, 116), "", *_aligned(rows)]


def reasons(result: Survey) -> list[str]:
    """Returns the reasons for the recommended layout, or why there is none."""
    best = result.best()
    if best is None:
        if result.prospects and not any(prospect.starts for prospect in result.prospects):
            why = result.explanation.problem or "no layout has a kernel for every op"
            return [f"no server starts: {why.splitlines()[0].rstrip('.:')}"]
        if result.prospects:
            return [f"no layout holds a request of {result.load.length:,} tokens; a shorter --length fits more"]
        return [f"the weights fit in no layout of {result.gpus} such GPUs"]
    others = [p for p in result.prospects if p is not best and p.max_requests > 0]
    figures = best.predicted_tokens_per_second
    speed = (
        f"at most {best.tokens_per_second:,.0f} tok/s"
        if figures is None
        else f"predicted {figures[0]:,.0f} tok/s ({figures[1]:,.0f} - {figures[2]:,.0f}; at most"
        f" {best.tokens_per_second:,.0f})"
    )
    texts = [
        f"{speed} with {result.load.concurrency} requests at once"
        + (f"; {_next(best, others)}" if others else ", and no other layout holds the model")
    ]
    at_once = best.requests_per_server * best.layout.servers
    if at_once < result.load.concurrency:
        texts.append(f"only {at_once} of {result.load.concurrency} requests run at once; the others wait")
    else:
        texts.append(f"its cache holds {best.max_requests:,} requests of {result.load.length:,} tokens at once")
    if best.predicted is not None and 0 < best.loaded_seconds < best.predicted.prefill.seconds:
        texts.append(
            f"a session of {result.load.length:,} tokens that the GPUs have evicted and main memory has"
            f" gets its first token after {1e3 * (best.loaded_seconds + best.predicted.one.seconds):,.0f} ms at least:"
            f" {best.loaded_seconds * 1e3:,.0f} ms to load ({best.loaded_bytes / 1e9:.2f} GB to each GPU) and a step,"
            f" predicted, where computing it takes {best.predicted.prefill.seconds * 1e3:,.0f} ms; up to"
            f" {LARGEST_UNASKED * best.cache / GIB:,.1f} GiB of main memory for each GPU, at its NUMA node, keep such"
            " prefixes (four times its cache, or half of what is free there)"
        )
    alone = result.fastest_solo()
    if alone is not None and alone.one_request_per_second >= CLEARLY * best.one_request_per_second:
        how = "at most" if alone.predicted is None else "predicted"
        texts.append(
            f"for one request at a time {alone.layout} is faster: {alone.one_request_per_second:,.0f} tok/s {how},"
            f" {best.one_request_per_second:,.0f} here"
        )
    whole = max((p for p in others if p.layout.whole == p.layout), key=lambda p: p.rating, default=None)
    if best.layout.whole != best.layout and whole is not None:
        texts.append(f"no GPU has run ranks that hold different tokens here yet; without them {whole.layout} is next")
    machine = result.explanation.arch.gpus_per_machine
    if 0 < machine < result.gpus and result.nodes == 1:
        nodes = -(-result.gpus // machine)
        text = f"a machine has {machine} of these GPUs: one server on each; --nodes {nodes} has layouts across machines"
        texts.append(text)
    idle = result.gpus - best.layout.gpus
    if idle:
        texts.append(f"{idle} GPUs stay idle")
    return texts


def _next(best: Prospect, others: Sequence[Prospect]) -> str:
    """Compares the best layout with the next one, and says why it is preferred where both are as fast."""
    second = max(others, key=lambda p: p.rating)
    speed, ratio = _tokens_per_second(second), _tokens_per_second(best) / _tokens_per_second(second)
    text = f"{second.layout}: {speed:,.0f}, of which that is {ratio:.2f} times"
    if ratio >= CLEARLY or second.layout.ep_size > best.layout.ep_size:
        return text if ratio >= 1 else f"{text}, as the average rank has it; the busiest one is slower"
    return f"{text}, and one request alone is faster here: {best.one_request_per_second:,.0f} tok/s"


def _tokens_per_second(prospect: Prospect) -> float:
    figures = prospect.predicted_tokens_per_second
    return prospect.tokens_per_second if figures is None else figures[0]
