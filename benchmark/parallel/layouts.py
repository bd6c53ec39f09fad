#!/usr/bin/env python3
"""All GPUs of a machine in every layout beside one GPU: greedy tokens of small models, and kill -9 of each process.

    python benchmark/parallel/layouts.py --out DIR [--gpus 4] [--models NAMES] [--layouts NAMES] [--limit 480] [--kill]

Models are one of each kind: dense, experts, latents (MLA), states beside attention, an indexer's selections, and the
embedded model with its own draft layer. Each runs in every layout, without drafts and with them, in a server of its own
whose tokens are compared with those of a server on one GPU. In 16 bits and with random weights two tokens are often as
likely as one another, and sums in another order then decide, as they do between two experts and two selected blocks. So
what counts is the log probabilities behind equal tokens, of the TOP likeliest of both servers: their median difference
must be at most APART. A layout that lost or mixed up a part of a cache is apart by more than 1. `--device cpu` tries it
over gloo, where all answers must be equal, and in 16 bits with `--dtype bfloat16`. `--kill` kills each process of the
layouts of the dense model, instead.

About 40 s for the first servers (their kernels are compiled) and 25 s for each further AT_ONCE of them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "evals"), str(HERE.parent / "peers"), str(HERE.parents[1] / "test")]

import requirements  # noqa: E402
import two_gpus  # noqa: E402
from parts import Row, table  # noqa: E402
from served import first_gpu, served  # noqa: E402
from two_gpus import EMBEDDED, SERVER_LIMIT_S, Server, Servers, Window, kill_a_rank  # noqa: E402

AT_ONCE, NEW_TOKENS, TOP = 6, 24, 20
APART = 0.2
"""Nats."""
HEADS: dict[str, Any] = {"num_attention_heads": 16, "max_position_embeddings": 4096, "num_hidden_layers": 4}
LATENTS: dict[str, Any] = {"num_key_value_heads": 16, "n_routed_experts": 8, "moe_intermediate_size": 512}
NO_DRAFT: tuple[str, ...] = ()
NGRAM = ("--speculative-algorithm", "NGRAM")
NEXTN = ("--speculative-algorithm", "NEXTN", "--speculative-draft-load-format", "dummy")
EMBEDDED_NEXTN = ("--speculative-algorithm", "NEXTN")


@dataclass(frozen=True)
class Small:
    """`tiny`: a model of test/srt/models/harness.py, whose sizes GPU kernels take, with changes that let eight ranks
    share it. `heads`: ranks that its attention is cut for at most; `kv_heads`: how often its entries are cut by heads;
    `drafts`: flags, by name."""

    tiny: str
    changes: dict[str, Any] = field(default_factory=dict)
    heads: int = 16
    kv_heads: int = 1
    experts: bool = False
    drafts: tuple[tuple[str, tuple[str, ...]], ...] = (("n-grams", NGRAM),)


WITH_LAYER = (("n-grams", NGRAM), ("NEXTN", NEXTN))
MODELS = {
    "dense": Small("qwen3_wide", HEADS, kv_heads=2),
    "experts": Small(
        "qwen3_moe_wide", HEADS | {"num_experts": 8, "moe_intermediate_size": 512}, kv_heads=2, experts=True
    ),
    "latents": Small("deepseek_v3_wide", HEADS | LATENTS, experts=True, drafts=WITH_LAYER),
    "states": Small(
        "qwen3_next_wide",
        HEADS | {
            "hidden_size": 256, "layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 8,
            "linear_num_key_heads": 8, "linear_num_value_heads": 16, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        kv_heads=2, experts=True,
    ),
    "selections": Small(
        "glm_moe_dsa_wide",
        HEADS | LATENTS | {"index_topk": 64, "num_hidden_layers": 8, "indexer_types": ["full", "shared"] * 4},
        experts=True, drafts=WITH_LAYER,
    ),
    "embedded": Small("", heads=4, kv_heads=2, drafts=(("NEXTN", EMBEDDED_NEXTN),)),
}  # fmt: skip


def layouts_of(model: Small, gpus: int) -> dict[str, tuple[str, ...]]:
    """Flags of each layout of so many GPUs, by name."""
    every, half = ("--tp", str(gpus)), gpus // 2
    found: dict[str, tuple[str, ...]] = {}
    if gpus <= model.heads:
        found[f"TP{gpus}"] = every
    if gpus <= 4:
        found[f"PP{gpus}"] = ("--pp-size", str(gpus))
    if gpus > 2:
        found[f"TP{half} x PP2"] = ("--tp", str(half), "--pp-size", "2")
    if gpus > 4:
        found[f"TP2 x PP{half}"] = ("--tp", "2", "--pp-size", str(half))
    if model.experts:
        found[f"EP{gpus}"] = (*every, "--ep-size", str(gpus))
    found[f"DP attention {gpus}"] = (*every, "--enable-dp-attention", "--attn-dp-size", str(gpus))
    if (shares := gpus // model.kv_heads) > 1 and gpus <= model.heads:
        found[f"DCP{shares}"] = (*every, "--dcp-size", str(shares))
    return found


@dataclass(frozen=True)
class Answer:
    """`likely`: log probabilities by token of the TOP likeliest tokens, at each place."""

    tokens: list[int]
    likely: list[dict[int, float]]


def answers(server: Server, count: int, vocab: int) -> list[Answer]:
    """Greedy tokens behind prompts with common beginnings, some longer than a chunk; 16 of them come at once."""
    rng = random.Random(4)
    trunk = [rng.randrange(2, vocab) for _ in range(150)]
    alone = [[rng.randrange(2, vocab) for _ in range(rng.randrange(5, 300))] for _ in range(count)]
    prompts = [*alone, *(trunk + ids[:20] for ids in alone[: count // 2])]

    def post(ids: list[int]) -> Answer:
        params = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": TOP}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=120) as reply:
            said = json.load(reply)
        likely = [{token: value for value, token, _ in row} for row in said["meta_info"]["output_top_logprobs"]]
        return Answer(said["output_ids"], likely)

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(post, prompts))


def apart(wanted: Answer, got: Answer) -> list[float]:
    """How far the log probabilities are apart that both name, in nats, up to the first token that differs."""
    values: list[float] = []
    for mine, theirs, ours, others in zip(wanted.tokens, got.tokens, wanted.likely, got.likely, strict=True):
        values += [abs(ours[token] - others[token]) for token in ours.keys() & others.keys()]
        if mine != theirs:
            break
    return values


@dataclass(frozen=True)
class Run:
    """One server."""

    model: str
    layout: str
    draft: str
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.model, self.layout, self.draft)))

    @property
    def log(self) -> str:
        return f"server_{self.name.replace(', ', '_').replace(' ', '_')}.log"


def runs(names: Sequence[str], gpus: int, only: Sequence[str]) -> list[Run]:
    """Those on one GPU come first."""
    alone = [Run(name, "one GPU", "", NO_DRAFT) for name in names]
    many = [
        Run(name, layout, draft, (*flags, *more))
        for name in names
        for layout, flags in layouts_of(MODELS[name], gpus).items()
        if not only or layout in only
        for draft, more in (("", NO_DRAFT), *MODELS[name].drafts)
    ]
    return [*alone, *many]


class Layouts:
    """Small models, and servers of them side by side."""

    def __init__(self, window: Window, cpu: bool, dtype: str = "bfloat16") -> None:
        self.window, self.cpu, self.dtype = window, cpu, dtype
        self.exact = dtype == "float32"
        self.rows: list[Row] = []
        small = ("--max-total-tokens", "16384", "--max-running-requests", "16", "--chunked-prefill-size", "128")
        self.flags = (*small, "--device", "cpu") if cpu else (*small, "--cuda-graph-max-bs", "16")

    def save(self, name: str) -> Path:
        folder = self.window.out / f"model_{name}"
        if not MODELS[name].tiny:
            return EMBEDDED
        if not (folder / "config.json").exists():
            from srt.models.harness import save_tiny

            save_tiny(MODELS[name].tiny, folder, **MODELS[name].changes)
        return folder

    def answers_of(self, run: Run) -> list[Answer] | None:
        """None: no time is left."""
        if time.monotonic() > self.window.end:
            return None
        flags = (*self.flags, *run.flags, "--skip-tokenizer-init", "--dtype", self.dtype)
        gpu = first_gpu() if run.layout == "one GPU" and not self.cpu else {}
        limit = self.window.left(SERVER_LIMIT_S)
        with served(self.save(run.model), self.window.out / run.log, flags, limit, **gpu) as server:
            return answers(server, 4 if self.cpu else 20, 250)

    def compare(self, wanted: list[Answer], run: Run, got: list[Answer]) -> None:
        equal = sum(one.tokens == other.tokens for one, other in zip(wanted, got, strict=True))
        values = sorted(value for one, other in zip(wanted, got, strict=True) for value in apart(one, other))
        median, high = (values[int(share * len(values))] for share in (0.5, 0.9))
        text = f"{equal} of {len(got)} equal, log probabilities apart by {median:.3f} (median), {high:.3f} (90%)"
        right = equal == len(got) if self.exact else median <= APART
        self.rows.append(Row(run.name, text, "all equal" if self.exact else f"{APART}", right))
        self.window.say(f"{run.name}: {text}")

    def tokens(self, names: Sequence[str], gpus: int, only: Sequence[str]) -> None:
        for name in names:
            self.save(name)
        wanted: dict[str, list[Answer]] = {}
        with ThreadPoolExecutor(1 if self.cpu else AT_ONCE) as pool:
            started = [(run, pool.submit(self.answers_of, run)) for run in runs(names, gpus, only)]
            for run, future in started:
                with self.window.part(run.name):
                    if (got := future.result()) is None:
                        self.window.say(f"{run.name}: left out, no time is left")
                    elif run.layout == "one GPU":
                        wanted[run.model] = got
                    elif run.model in wanted:
                        self.compare(wanted[run.model], run, got)

    def kill(self, gpus: int, only: Sequence[str]) -> None:
        """Each rank and the detokenizer of each layout, while it decodes."""
        for layout, flags in layouts_of(MODELS["embedded"], gpus).items():
            if only and layout not in only:
                continue
            with ExitStack() as stack, self.window.part(f"kill, {layout}"):
                servers = Servers(self.window, stack)
                names = [f"kill_{layout.replace(' ', '_')}_{number}" for number in range(gpus + 1)]
                started = {name: servers.start(name, EMBEDDED, *self.flags, *flags) for name in names}
                for number, (name, future) in enumerate(started.items()):
                    server = future.result(self.window.left(SERVER_LIMIT_S))
                    took, right = kill_a_rank(self.window, server, self.window.out / f"server_{name}.log", number)
                    what = f"rank {number}" if number < gpus else "detokenizer"
                    text = f"all gone after {took:.1f} s"
                    self.rows.append(Row(f"{layout}, {what} killed", text, "named, all gone", right))


def names_of(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, help="default: all that there are")
    parser.add_argument("--models", type=names_of, default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--layouts", type=names_of, default=[], help="as the table names them; default: all")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on GPUs")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.models if name not in MODELS]:
        parser.error(f"no model is named {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if why := requirements.complaint():
        print(why, flush=True)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    window, cpu = Window(args.out.resolve(), args.limit), args.device == "cpu"
    gpus = args.gpus or (2 if cpu else two_gpus.num_gpus())
    if not cpu:
        with window.part("sgl-kernel"):
            two_gpus.install_kernels(window)
    layouts = Layouts(window, cpu, args.dtype or ("float32" if cpu else "bfloat16"))
    if args.kill:
        layouts.kill(gpus, args.layouts)
    else:
        layouts.tokens(args.models, gpus, args.layouts)
    print(f"\n{table(layouts.rows)}\n\n{time.monotonic() - window.started:.0f} s", flush=True)
    print("\n".join(window.failures) or "nothing failed", flush=True)
    return 1 if window.failures or any(row.right is False for row in layouts.rows) or not layouts.rows else 0


if __name__ == "__main__":
    sys.exit(main())
