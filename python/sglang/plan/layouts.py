"""Surveys the layouts of a model on some GPUs: what each holds, how fast it is, and which one to take."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang.explain import Explanation, explain
from sglang.plan.cache_forms import CacheForm, cache_forms
from sglang.plan.floors import Floor, StepFloors
from sglang.plan.host_memory import UNKNOWN, Machine
from sglang.plan.predictions import Prediction, predict
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Choice
from sglang.srt.plan.expert_slot_plan import ExpertSlotPlan
from sglang.srt.plan.host_cache import BUS_RATE
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.pool_checks import with_pages
from sglang.srt.plan.pool_sizes import cache_cost
from sglang.srt.plan.weights_copy import WeightsCopy
from sglang.srt.server_args import ServerArgs

GIB = 1024**3
CLEARLY = 1.02
"""Factor by which a layout must be faster than another to be called faster."""
ADDRESS = "10.0.0.1:50000"
"""Example address of machine 0 in the network between the machines."""
UNEVEN = 0.9
"""Factor on the speed of layouts with whole experts on a rank, whose busiest rank is slower than the average: a guess,
so that they are taken only where they are clearly better."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout: `servers` servers of `pp_size` pipeline stages of `tp_size` GPUs each, each server on `machines`
    machines. In a stage `ep_size` groups have whole experts each, `dcp_size` ranks shard the tokens of the cache, and
    `attn_dp_size` groups have requests of their own."""

    tp_size: int
    servers: int
    ep_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    machines: int = 1
    attn_dp_size: int = 1

    @property
    def flags(self) -> list[str]:
        """Command-line flags of one server of this layout."""
        experts = ["--ep", str(self.ep_size)] if self.ep_size > 1 else []
        stages = ["--pp", str(self.pp_size)] if self.pp_size > 1 else []
        tokens = ["--dcp-size", str(self.dcp_size)] if self.dcp_size > 1 else []
        requests = ["--enable-dp-attention", "--attn-dp-size", str(self.attn_dp_size)] if self.attn_dp_size > 1 else []
        return ["--tp", str(self.tp_size), *experts, *stages, *tokens, *requests]

    @property
    def gpus_each(self) -> int:
        """Number of GPUs of one server."""
        return self.tp_size * self.pp_size

    @property
    def gpus(self) -> int:
        """Returns the number of GPUs of all replicas."""
        return self.gpus_each * self.servers

    def __str__(self) -> str:
        experts = f" EP {self.ep_size}" if self.ep_size > 1 else ""
        stages = f" x PP {self.pp_size}" if self.pp_size > 1 else ""
        tokens = f" DCP {self.dcp_size}" if self.dcp_size > 1 else ""
        requests = f" DP attention {self.attn_dp_size}" if self.attn_dp_size > 1 else ""
        machines = f" on {self.machines} machines" if self.machines > 1 else ""
        return f"TP {self.tp_size}{experts}{stages}{tokens}{requests}{machines}" + (
            f" x {self.servers} servers" if self.servers > 1 else ""
        )

    @property
    def whole(self) -> Layout:
        """The layout without DCP and DP attention: all ranks of a stage hold the same tokens."""
        return replace(self, dcp_size=1, attn_dp_size=1)

    @property
    def crosses_machines(self) -> bool:
        """Returns whether the ranks of one stage are on several machines."""
        return (self.gpus_each // self.machines) % self.tp_size > 0

    def commands(self, words: Sequence[str], a_machine: int | None = None) -> list[str]:
        """Returns the command that starts the servers of a machine, as replicas behind one address; for a server on
        several machines the command of each machine. `words`: the other flags. `a_machine`: most servers on one
        machine; None: all."""
        replicas = self.servers if a_machine is None else min(self.servers, a_machine)
        together = ["--dp", str(replicas)] if replicas > 1 and self.machines == 1 else []
        command = ["sglang", "serve", *words, *self.flags, *together]
        if self.machines == 1:
            return [shlex.join(command)]
        meeting = ["--nnodes", str(self.machines), "--dist-init-addr", ADDRESS]
        return [shlex.join([*command, *meeting, "--node-rank", str(rank)]) for rank in range(self.machines)]


@dataclass(frozen=True, slots=True)
class Load:
    """The load of all servers together: requests at once, and their length."""

    length: int  # tokens of a request, prompt and answer
    concurrency: int


@dataclass(frozen=True, slots=True)
class Prospect:
    """A layout that has room for the weights, with its sizes and speeds. Bytes are those of one GPU, requests those of
    all servers."""

    layout: Layout
    weights: int
    cache: int
    tokens: int  # KV tokens of one server
    max_requests: int
    one: Floor  # a decode step of one request
    loaded: Floor  # a decode step of a server's share of the load
    requests_per_server: int
    prefill: Floor
    commands: tuple[str, ...]
    notes: tuple[str, ...]
    predicted: Prediction | None = None
    starts: bool = True
    loaded_bytes: int = 0
    """Bytes that a GPU loads for a request of the load whose whole prefix is in main memory: tokens and a state,
    without windows. 0: unified memory, where nothing is loaded."""
    expert_slots: ExpertSlotPlan | None = None
    """The experts in main memory, whose predictions then hold: floors do not count the bus."""
    weights_copy: WeightsCopy | None = None
    """The copy of the weights that a sleeping server keeps in main memory; None: the server does not sleep."""

    @property
    def loaded_seconds(self) -> float:
        """Seconds to load a request's whole prefix from main memory, at the bus's predicted rate."""
        return self.loaded_bytes / BUS_RATE

    @property
    def tokens_per_second(self) -> float:
        """Upper bound of the tokens a second of all servers with the load, with all-reduces as measured with NCCL."""
        if not self.max_requests:
            return 0.0
        return self.layout.servers * self.requests_per_server / self.loaded.seconds_with_nccl

    @property
    def predicted_tokens_per_second(self) -> tuple[float, float, float] | None:
        """Predicted tokens a second of all servers with the load: (figure, low, high), by the range of the prediction's
        error; None where nothing is predicted."""
        if self.expert_slots is not None:
            speed = self.layout.servers * self.expert_slots.tokens_per_second(self.requests_per_server)
            return (speed, speed, speed) if self.max_requests else (0.0, 0.0, 0.0)
        if self.predicted is None:
            return None
        time, requests = self.predicted.loaded, self.layout.servers * self.requests_per_server
        if not self.max_requests:
            return 0.0, 0.0, 0.0
        return requests / time.seconds, requests / time.high, requests / time.low

    @property
    def rating(self) -> float:
        """Tokens a second by which layouts are compared: predicted if possible, else the upper bound. Reduced where
        ranks have whole experts, because the busiest rank holds up the others."""
        figures = self.predicted_tokens_per_second
        speed = self.tokens_per_second if figures is None else figures[0]
        return speed * (UNEVEN if self.layout.ep_size > 1 else 1.0)

    @property
    def one_request_per_second(self) -> float:
        """Tokens a second of a single request: predicted if possible, else the upper bound."""
        if self.expert_slots is not None:
            return self.expert_slots.tokens_per_second(1)
        return 1 / (self.one.seconds_with_nccl if self.predicted is None else self.predicted.one.seconds)


@dataclass(frozen=True, slots=True)
class Survey:
    """All layouts of a model on some GPUs: `prospects` that have room, and `refused` ones with the reason."""

    explanation: Explanation  # that of the first layout
    gpus: int
    nodes: int
    load: Load
    prospects: tuple[Prospect, ...]
    refused: tuple[tuple[Layout, str], ...]
    tuned_files: tuple[tuple[Layout, str], ...]
    forms_of: Layout | None = None
    """The layout of `forms`: the best one, or without one that with the most tokens."""
    forms: tuple[CacheForm, ...] = ()

    def best(self) -> Prospect | None:
        """Returns the best layout in which a server starts, or None: the one with the most tokens a second for the
        load; of those within 2% the fastest for one request. Compares predictions where the card was timed, else
        floors."""
        able = [p for p in self.prospects if p.max_requests > 0 and p.starts]
        maximum = max((p.rating for p in able), default=0.0)
        close = [p for p in able if p.rating >= maximum / CLEARLY]
        return max(close, key=lambda p: p.one_request_per_second, default=None)

    def gains(self) -> Iterator[tuple[Prospect, Prospect]]:
        """Yields (layout with DCP or DP attention, the same layout without it), if the latter holds tokens."""
        by_layout = {prospect.layout: prospect for prospect in self.prospects}
        for prospect in self.prospects:
            whole = by_layout.get(prospect.layout.whole)
            if whole is not None and whole is not prospect and whole.tokens:
                yield prospect, whole

    def fastest_solo(self) -> Prospect | None:
        """Returns the layout that is fastest for a single request, or None."""
        able = [p for p in self.prospects if p.max_requests > 0]
        return max(able, key=lambda p: p.one_request_per_second, default=None)


def survey(
    words: Sequence[str],
    gpus: int,
    arch: ArchTraits,
    load: Load,
    free_memory: int | None,
    nodes: int = 1,
    machine: Machine = UNKNOWN,
) -> Survey:
    """Plans the model in every layout.

        words: flags of the server, without those of the layout
        free_memory: bytes free on a GPU before anything is loaded; None: the usual share
        nodes: machines that a server may span, each with an equal part of the GPUs
        machine: what is known of its main memory

    Raises UserError for a model or flags that cannot be read.
    """
    each = gpus // nodes
    gpus_of_one = each if nodes > 1 else arch.gpus_per_machine
    prospects, refused, tuned = [], [], []
    explanations: dict[Layout, tuple[ServerArgs, Explanation]] = {}
    first: Explanation | None = None
    for layout in _layouts(gpus, gpus if nodes > 1 else arch.gpus_per_machine or gpus):
        if nodes > 1:
            if layout.gpus_each > each and layout.gpus_each % each:
                continue
            layout = replace(layout, machines=-(-layout.gpus_each // each))
        if layout.ep_size > 1 and (first is None or first.model.experts is None):
            continue
        if layout.whole != layout and (first is None or not _offers(layout, first.model, words)):
            continue
        meeting = ["--nnodes", str(layout.machines), "--dist-init-addr", ADDRESS] if layout.machines > 1 else []
        args = ServerArgs.from_cli([*words, *layout.flags, *meeting], prog="sglang plan")
        explained = explain(args, arch, frozenset({"triton"}), free_memory, advises=False, machine=machine)
        first = first or explained
        problem = explained.refused or explained.unfit or _unplanned(explained)
        if problem is not None:
            refused.append((layout, problem))
            continue
        prospects.append(_prospect(args, words, layout, explained, load, gpus_of_one))
        explanations[layout] = args, explained
        if explained.moe_tiles:
            tuned.append((layout, explained.moe_tiles))
    assert first is not None
    result = Survey(first, gpus, nodes, load, tuple(prospects), tuple(refused), tuple(tuned))
    shown = result.best() or max(prospects, key=lambda prospect: prospect.tokens, default=None)
    if shown is None:
        return result
    forms = cache_forms(*explanations[shown.layout], arch, free_memory, machine)
    return replace(result, forms_of=shown.layout, forms=forms)


def _layouts(gpus: int, maximum: int) -> Iterator[Layout]:
    """Yields layouts with every number of GPUs a server, at most `maximum`: experts divided by their dims or whole,
    with DCP, with DP attention; and one server of all GPUs in pipeline stages (for models that need the memory of all),
    with DP attention too."""
    for tp_size in range(1, min(gpus, maximum) + 1):
        yield Layout(tp_size, gpus // tp_size)
        if tp_size > 1:
            yield Layout(tp_size, gpus // tp_size, tp_size)
            yield Layout(tp_size, gpus // tp_size, dcp_size=tp_size)
            if gpus % tp_size == 0:
                yield Layout(tp_size, gpus // tp_size, attn_dp_size=tp_size)
                yield Layout(tp_size, gpus // tp_size, tp_size, attn_dp_size=tp_size)
        if gpus % tp_size == 0 and tp_size < gpus <= maximum:
            yield Layout(tp_size, 1, pp_size=gpus // tp_size)
            if tp_size > 1:
                yield Layout(tp_size, 1, pp_size=gpus // tp_size, attn_dp_size=tp_size)


_NAMED_BY_HAND = ("--dcp-size", "--attn-dp-size", "--enable-dp-attention", "--dp-size")


def _offers(layout: Layout, model: ModelDescription, words: Sequence[str]) -> bool:
    """Returns whether DCP or DP attention may help: the ranks would otherwise hold the same latents, or with DP
    attention the same KV heads. False where the flags already decide it."""
    if any(word.partition("=")[0] in _NAMED_BY_HAND for word in words):
        return False
    mixers = [layer.mixer for layer in model.layers]
    if any(mixer.latents for mixer in mixers):
        return True
    heads = [mixer.kv_heads for mixer in mixers if mixer.kv_heads and mixer.caches_tokens]
    return layout.attn_dp_size > max(heads, default=layout.attn_dp_size)


def _unplanned(explained: Explanation) -> str | None:
    return None if explained.plan is not None else "nothing is planned for this device"


def _prospect(
    args: ServerArgs, words: Sequence[str], layout: Layout, explained: Explanation, load: Load, a_machine: int
) -> Prospect:
    """Computes a layout's prospect. `a_machine`: the GPUs of one machine; 0: all."""
    assert explained.plan is not None
    model, plan = explained.model, explained.plan
    parallel = with_pages(args, model, explained.parallel)
    choices = {outcome.need.key: outcome for outcome in explained.outcomes if isinstance(outcome, Choice)}
    floors = StepFloors(model, parallel, explained.arch, choices, layout.crosses_machines)
    groups = layout.attn_dp_size  # the plan's sizes are those of one group
    maximum = groups * requests_that_fit(plan, load.length)
    each = max(1, min(-(-load.concurrency // layout.servers), maximum))
    a_step = -(-each // layout.pp_size)  # pipeline stages compute different microbatches of requests at the same time
    slots = ExpertSlotPlan.from_json(plan["expert_slots"]) if "expert_slots" in plan else None
    memory, cost = plan["memory"], cache_cost(explained.groups)
    return Prospect(
        layout=layout,
        weights=memory["weights"],
        cache=memory["kv_cache"] + memory["windows"] + memory["states"],
        tokens=groups * plan["max_total_num_tokens"],
        max_requests=maximum * layout.servers,
        one=floors.decode(1, load.length),
        loaded=floors.decode(a_step, load.length),
        requests_per_server=each,
        prefill=floors.prefill(load.length),
        commands=tuple(layout.commands(words, a_machine // layout.gpus_each if a_machine else None)),
        notes=explained.notes,
        predicted=_predicted(explained, model, parallel, a_step, load.length)
        if layout.machines == 1 and slots is None
        else None,
        expert_slots=slots,
        weights_copy=WeightsCopy(**plan["weights_copy"]) if "weights_copy" in plan else None,
        starts=explained.problem is None,
        loaded_bytes=0 if explained.arch.unified_memory else int(cost.bytes_per_token * load.length) + cost.state_bytes,
    )


def _predicted(
    explained: Explanation, model: ModelDescription, parallel: ParallelConfig, requests: int, length: int
) -> Prediction | None:
    draft = None if explained.draft is None else explained.draft.description
    return predict(model, parallel, explained.arch, requests, length, draft, explained.width)


def requests_that_fit(plan: dict[str, Any], length: int) -> int:
    """Returns how many requests of `length` tokens fit on one server at once. `plan`: as `Plan.describe` returns it."""
    fits = [plan["max_running_requests"], plan["max_total_num_tokens"] // length]
    fits += [tokens // min(length, int(window)) for window, tokens in plan.get("window_tokens", {}).items()]
    return int(min(fits)) if length <= plan["context_len"] else 0


def check_counts(gpus: int, load: Load, nodes: int = 1, arch: ArchTraits | None = None) -> None:
    """Raises UserError for numbers out of range, or GPUs that the machines do not divide or cannot hold."""
    for flag, value, maximum in (
        ("--gpus", gpus, 1024),
        ("--nodes", nodes, 1024),
        ("--length", load.length, 1 << 24),
        ("--concurrency", load.concurrency, 1 << 20),
    ):
        if not 1 <= value <= maximum:
            raise UserError(f"{flag} must be from 1 to {maximum:,}; got {value:,}.")
    if gpus % nodes:
        raise UserError(f"--nodes {nodes} does not divide --gpus {gpus}: every machine has as many.")
    if arch is not None and nodes > 1 and 0 < arch.gpus_per_machine < gpus // nodes:
        raise UserError(
            f"--gpus {gpus} over --nodes {nodes} are {gpus // nodes} GPUs a machine, and one with a"
            f" {arch.product} has {arch.gpus_per_machine}."
        )
