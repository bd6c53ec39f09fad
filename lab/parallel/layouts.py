#!/usr/bin/env python3
"""All GPUs of a machine in every layout beside one GPU: greedy tokens of small models, and kill -9 of each process.

    python lab/parallel/layouts.py --out DIR [--gpus 4] [--models NAMES] [--layouts NAMES] [--drafts no]
        [--dtype float32] [--faults] [--rounds 1] [--limit 480] [--kill]

Models are one of each kind: dense, experts, latents (MLA), states beside attention, an indexer's selections, and the
embedded model with its own draft layer. Each runs in every layout, without drafts and then with them, in a server of
its own. Two servers are as far apart at a place as the log probabilities that both give to the likeliest tokens
(median of at most TOP), or as half of what a first other token was less likely. Places behind that do not count. The
90th percentile of all places and the median of the worst answer must be within BOUNDS, but for one of FLIPPING.

With weights of one spread these models are chaotic: over gloo, where float32 gives equal tokens, 16 bits were 0.2 to
0.6 nats apart (median), as wrong layouts are. `calm.py` gives them weights in which roundings stay small. What float32
and bfloat16 differ by on a CPU, and what faults add (median / 90th percentile of places):

    dense       0.014/0.020   a summand left out 0.53/0.74, heads rotated 0.19/0.29, a cache mixed up 0.15/0.24
    experts     0.015/0.021   0.48/0.64, 0.19/0.31, two experts swapped 0.15/0.46, 0.18/0.30
    latents     0.018/0.028   0.51/0.77, 0.76/1.10, 0.09/0.33, 0.20/0.45
    states      0.019/0.028   0.16/0.31, 0.16/0.31, 0.26/0.57, 0.76/1.67
    selections  0.028/0.095   0.63/0.90, 0.89/1.33, 0.18/0.37, 0.43/0.59

Over gloo in bfloat16 TP2 of latents was 0.015/0.021 apart from one rank, and DCP2 in which ranks forget their newest
token 0.046/0.090, the worst answer 0.074.

The server on one GPU is asked twice, which must be within BOUNDS, and then with prompts as a mixed-up cache has them;
with --faults there are servers of faulty weights. Both must be beyond BOUNDS. `--dtype float32` is exact arithmetic: it
runs without CUDA graphs and most Triton kernels, and so tells the layouts from the kernels. `--device cpu` tries all of
it over gloo. `--rounds` asks so many times as much, for faults that are rare. What a wrong server answered is in
wrong_NAME.json. `--kill` kills each process of the layouts of the embedded model, instead.

About 40 s for the first servers (their kernels are compiled) and 25 s for each further AT_ONCE of them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BENCHMARK = ROOT / "benchmark"
sys.path[:0] = [str(HERE), *(str(BENCHMARK / name) for name in ("parallel", "evals", "peers")), str(ROOT / "test")]

import calm  # noqa: E402
import requirements  # noqa: E402
import two_gpus  # noqa: E402
from parts import Row, table  # noqa: E402
from served import first_gpu, served  # noqa: E402
from two_gpus import EMBEDDED, SERVER_LIMIT_S, Server, Servers, Window, kill_a_rank  # noqa: E402

AT_ONCE, NEW_TOKENS, TOP = 5, 24, 20
BOUNDS = {"bfloat16": (0.05, 0.05), "float32": (0.002, 0.002)}
"""Nats, by type: of the 90th percentile and of the worst answer."""
WIDER = {"selections": (0.2, 0.15), "embedded": (0.12, 0.08)}
"""In 16 bits: of a model with an indexer, and of one whose weights are trained."""
FLIPPING = {"embedded": 30}
"""In 16 bits: of so many answers of a model one may be further apart. Where two experts are as likely, a rounding
chooses, and the embedded model then says something else: over gloo seven of 1,080 answers of two ranks of two stages
were 0.11 to 1.00 nats apart, no two of one set of 30. Calm weights have no such places."""
ONE = "one GPU"
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
        if shares > 2:
            found[f"TP2 x DCP{shares // 2}"] = (*every, "--dcp-size", str(shares // 2))
    return found


@dataclass(frozen=True)
class Answer:
    """`likely`: log probabilities by token of the TOP likeliest tokens, at each place."""

    tokens: list[int]
    likely: list[dict[int, float]]


def prompts_of(count: int, vocab: int, seed: int = 4) -> list[list[int]]:
    """Prompts with common beginnings, some longer than a chunk."""
    rng = random.Random(seed)
    trunk = [rng.randrange(2, vocab) for _ in range(150)]
    alone = [[rng.randrange(2, vocab) for _ in range(rng.randrange(5, 300))] for _ in range(count)]
    return [*alone, *(trunk + ids[:20] for ids in alone[: count // 2])]


def answers(server: Server, prompts: Sequence[list[int]], limit_s: float) -> list[Answer]:
    """Greedy tokens behind the prompts, of which 16 come at once."""

    def post(ids: list[int]) -> Answer:
        params = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": TOP}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=limit_s) as reply:
            said = json.load(reply)
        likely = [{token: value for value, token, _ in row} for row in said["meta_info"]["output_top_logprobs"]]
        return Answer(said["output_ids"], likely)

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(post, prompts))


def apart(wanted: Answer, got: Answer) -> list[float]:
    """How far the answers are apart at each place, in nats, up to the first token that differs."""
    values: list[float] = []
    for mine, theirs, ours, others in zip(wanted.tokens, got.tokens, wanted.likely, got.likely, strict=True):
        both = [abs(ours[token] - others[token]) for token in ours.keys() & others.keys()]
        gap = ours[mine] - ours.get(theirs, float("-inf"))
        values.append(max(median(both) if both else float("inf"), gap / 2))
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
    def fault(self) -> str:
        return self.draft if self.draft in calm.FAULTS else ""

    @property
    def log(self) -> str:
        return f"server_{self.name.replace(', ', '_').replace(' ', '_')}.log"


def runs(names: Sequence[str], gpus: int, only: Sequence[str], drafts: bool = True, faults: bool = False) -> list[Run]:
    """Those on one GPU come first. Then each layout of each model comes once, without drafts or with some in turn, and
    after these the others. A fault has the place of a draft."""
    alone = [Run(name, ONE, "", NO_DRAFT) for name in names]
    wrong = [
        Run(name, ONE, fault, NO_DRAFT)
        for name in names
        for fault in calm.FAULTS
        if faults and MODELS[name].tiny and (MODELS[name].experts or "experts" not in fault)
    ]
    many = []
    for row, name in enumerate(names):
        ways = (("", NO_DRAFT), *(MODELS[name].drafts if drafts else ()))
        for column, (layout, flags) in enumerate(layouts_of(MODELS[name], gpus).items()):
            if not only or layout in only:
                for number, (draft, more) in enumerate(ways):
                    turn = (number - row - column) % len(ways)
                    many.append((turn, Run(name, layout, draft, (*flags, *more))))
    return [*alone, *wrong, *(run for _, run in sorted(many, key=lambda pair: pair[0]))]


class Layouts:
    """Small models, and servers of them side by side."""

    def __init__(self, window: Window, cpu: bool, dtype: str = "bfloat16", rounds: int = 1) -> None:
        self.window, self.cpu, self.dtype = window, cpu, dtype
        self.rows: list[Row] = []
        small = ("--max-total-tokens", "16384", "--max-running-requests", "16", "--chunked-prefill-size", "128")
        self.flags = (*small, "--device", "cpu") if cpu else (*small, "--cuda-graph-max-bs", "16")
        sets = (prompts_of(4 if cpu else 20, 250, 4 + i) for i in range(rounds))
        self.prompts = [*chain.from_iterable(sets)]
        self.again: dict[str, list[Answer]] = {}
        """What one GPU answers the second time, when it has all prompts in its cache."""
        self.mixed_up: dict[str, list[Answer]] = {}
        self.turn = threading.Lock()  # kernels that wait for their peers keep the GPUs from other servers

    def save(self, name: str, fault: str = "") -> Path:
        folder = self.window.out / f"model_{name}"
        if not MODELS[name].tiny:
            return EMBEDDED
        if not (folder / "config.json").exists():
            from srt.models.harness import save_tiny

            save_tiny(MODELS[name].tiny, folder, **MODELS[name].changes)
            calm.calm(folder)
        return calm.save_with(fault, folder, Path(f"{folder}_{fault.replace(' ', '_')}")) if fault else folder

    def answers_of(self, run: Run) -> list[Answer] | None:
        """None: no time is left."""
        if time.monotonic() > self.window.end:
            return None
        flags = (*self.flags, *run.flags, "--skip-tokenizer-init", "--dtype", self.dtype)
        gpu = first_gpu() if run.layout == ONE and not self.cpu else {}
        folder, limit = self.save(run.model, run.fault), self.window.left(SERVER_LIMIT_S)
        with served(folder, self.window.out / run.log, flags, limit, **gpu) as server, self.turn:
            found = answers(server, self.prompts, self.window.left(120))
            if run.layout == ONE and not run.draft:
                self.again[run.model] = answers(server, self.prompts, self.window.left(120))
                others = [calm.with_other_tokens(prompt) for prompt in self.prompts]
                self.mixed_up[run.model] = answers(server, others, self.window.left(120))
            return found

    def compare(self, wanted: list[Answer], name: str, got: list[Answer], alike: bool = True) -> None:
        """alike: what is right."""
        equal = sum(one.tokens == other.tokens for one, other in zip(wanted, got, strict=True))
        each = [apart(one, other) for one, other in zip(wanted, got, strict=True)]
        values = sorted(chain.from_iterable(each))
        middle, high = (values[int(share * len(values))] for share in (0.5, 0.9))
        by_answer = sorted((median(values), i) for i, values in enumerate(each))
        bounds, spare = BOUNDS[self.dtype], 0
        if self.dtype == "bfloat16":
            bounds = WIDER.get(model := name.split(",")[0], bounds)
            spare = len(each) // FLIPPING.get(model, len(each) + 1)
        worst, number = by_answer[-1 - spare]
        text = f"{equal} of {len(got)} equal, apart by {middle:.4f}, 90% {high:.4f}, worst answer {worst:.4f}"
        right = (high <= bounds[0] and worst <= bounds[1]) == alike
        asked = f"{'within' if alike else 'beyond'} {bounds[0]}, {bounds[1]}"
        self.rows.append(Row(name, text, asked, right))
        self.window.say(f"{name}: {text}{'' if right else f', WRONG (answer {number}, {len(each[number])} places)'}")
        if alike and not right:
            both = [asdict(answers[number]) for answers in (wanted, got)]
            path = self.window.out / f"wrong_{name.replace(', ', '_').replace(' ', '_')}.json"
            path.write_text(json.dumps({"answer": number, "wanted": both[0], "got": both[1], "apart": each}))

    def tokens(self, all_runs: Sequence[Run], at_once: int) -> None:
        for run in all_runs:
            self.save(run.model, run.fault)
        wanted: dict[str, list[Answer]] = {}
        with ThreadPoolExecutor(1 if self.cpu else at_once) as pool:
            started = [(run, pool.submit(self.answers_of, run)) for run in all_runs]
            for run, future in started:
                with self.window.part(run.name):
                    if (got := future.result()) is None:
                        self.window.say(f"{run.name}: left out, no time is left")
                    elif run.layout == ONE and not run.fault:
                        wanted[run.model] = got
                        self.compare(got, f"{run.model}, {ONE} again", self.again[run.model])
                        self.compare(got, f"{run.model}, a cache mixed up", self.mixed_up[run.model], alike=False)
                    elif run.model in wanted:
                        self.compare(wanted[run.model], run.name, got, alike=not run.fault)

    def kill(self, gpus: int, only: Sequence[str]) -> None:
        """Each rank and the detokenizer of each layout, while it decodes."""
        for layout, flags in layouts_of(MODELS["embedded"], gpus).items():
            if (only and layout not in only) or time.monotonic() > self.window.end:
                continue
            with ExitStack() as stack, ThreadPoolExecutor(gpus + 1) as pool:
                servers = Servers(self.window, stack)
                for number in range(gpus + 1):
                    name = f"kill_{layout.replace(' ', '_')}_{number}"
                    future = servers.start(name, EMBEDDED, *self.flags, *flags)
                    what = f"{layout}, {f'rank {number}' if number < gpus else 'detokenizer'} killed"
                    pool.submit(self.kill_one, what, future, self.window.out / f"server_{name}.log", number)

    def kill_one(self, what: str, future: Future[Server], log: Path, number: int) -> None:
        with self.window.part(what):
            took, right = kill_a_rank(self.window, future.result(self.window.left(480)), log, number)
            self.rows.append(Row(what, f"all gone after {took:.1f} s", "named, all gone", right))


def names_of(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, help="default: all that there are")
    parser.add_argument("--models", type=names_of, default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--layouts", type=names_of, default=[], help="as the table names them; default: all")
    parser.add_argument("--drafts", choices=("yes", "no"), default="yes")
    parser.add_argument("--faults", action="store_true", help="servers of faulty weights too, which must be told apart")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="servers")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=tuple(BOUNDS), help="default: bfloat16, on CPUs float32")
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
    layouts = Layouts(window, cpu, args.dtype or ("float32" if cpu else "bfloat16"), args.rounds)
    if args.kill:
        layouts.kill(gpus, args.layouts)
    else:
        layouts.tokens(runs(args.models, gpus, args.layouts, args.drafts == "yes", args.faults), args.at_once)
    print(f"\n{table(layouts.rows)}\n\n{time.monotonic() - window.started:.0f} s", flush=True)
    print("\n".join(window.failures) or "nothing failed", flush=True)
    return 1 if window.failures or any(row.right is False for row in layouts.rows) or not layouts.rows else 0


if __name__ == "__main__":
    sys.exit(main())
