"""Plans experts in main memory, for models whose weights a GPU has no room for. All sizes are bytes. No torch.

Each rank has the experts of all its layers in page-locked main memory, and in GPU memory slots for the experts that
are in use, of every layer as many, and two buffers for the others, which layers share (`layers/moe/expert_slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Protocol

from sglang.srt.configs.quant_scheme import EXL3
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.capacity import Trial
from sglang.srt.plan.cpu_experts import LAYER_S as CPU_LAYER_S
from sglang.srt.plan.cpu_experts import with_threads
from sglang.srt.plan.defaults import BESIDE_SLOTS
from sglang.srt.plan.draft_plan import DraftPlan, tables_on_host
from sglang.srt.plan.equal_layers import interned
from sglang.srt.plan.expert_slot_plan import (
    BUFFERS,
    FETCHED,
    LAYER_S,
    READ_RATE,
    STEP_S,
    ExpertSlotPlan,
    MainMemory,
    SlotCounts,
    bus_rate,
)
from sglang.srt.plan.host_cache import SYSTEM_RESERVE
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.memory import GIB, DoesNotFit
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weights import expert_bytes
from sglang.srt.server_args import ServerArgs

MAX_EXPERTS = 1024
"""Most experts of a layer; a test holds it to the kernels'."""
RESERVED_TOKENS = 32768
"""Tokens that the caches hold before slots get memory, unless --max-total-tokens or --context-length say how many; a
request of the context length if that is less, or what a quarter of the room holds."""
RESERVED_REQUESTS = 8
"""Requests that have room for their states, likewise."""
ROOM_OF_CACHES = 4
"""Largest part of the memory besides everything but slots and caches that this reserve takes: a quarter."""
ROOM_OF_BUFFERS = (4, 8, 16)
"""Parts of the memory besides other weights that buffers take: a quarter, or less where prompts then come in longer
chunks. What buffers do not hold comes in waves, which cost launches and no bytes; every chunk costs all bytes again."""
LONGEST_CHUNK = BESIDE_SLOTS[0].chunked_prefill_size
"""Tokens of the longest chunk that is planned without a flag."""
FEWEST_BUFFERED = 16
"""A buffer holds at least a sixteenth of a layer's experts."""


class Planner(Protocol):
    """A planner of one model with one set of flags."""

    @property
    def args(self) -> ServerArgs: ...

    @property
    def arch(self) -> ArchTraits: ...

    @property
    def available(self) -> int: ...

    @property
    def main_memory(self) -> MainMemory: ...

    def with_slots(self, counts: SlotCounts) -> Planner: ...

    def describe(self) -> tuple[ModelDescription, ParallelConfig]: ...

    def draft(self, target: ModelDescription) -> DraftPlan | None: ...

    def weights(self) -> int: ...

    def trial(self) -> Trial: ...


def with_slots(model: ModelDescription, counts: SlotCounts | None) -> ModelDescription:
    """Returns the model with the experts of all layers in main memory; None: as it is."""
    if counts is None:
        return model
    layers = (replace(layer, ffn=layer.ffn.with_slots(counts.slots, counts.buffered)) for layer in model.layers)
    return replace(model, layers=interned(layers))


def why_not(planner: Planner) -> str:
    """Returns why the model's experts cannot lie in main memory; "" if they can."""
    model, parallel = planner.describe()
    experts = model.experts
    if experts is None:
        return f"{model.title} has no experts, and other weights stay in GPU memory"
    if model.transformers_class is not None:
        return "experts of a class of transformers stay in GPU memory"
    if (quant := model.expert_quant) is not None and quant.scheme == EXL3.name:
        return "experts in EXL3 stay in GPU memory"
    if planner.arch.unified_memory:
        return f"the memory of {planner.arch.product or planner.arch.name} is main memory"
    numbers = _experts_of_rank(model, parallel)
    if max(numbers) > MAX_EXPERTS:
        return f"a layer has {max(numbers)} experts, and slots are for up to {MAX_EXPERTS}"
    if min(numbers) <= _fewest(model):
        return f"a rank holds {min(numbers)} experts of a layer, and a token may choose all of them"
    return ""


def plan_in_main_memory(planner: Planner) -> Trial:
    """Plans the model with its experts in main memory, and as many slots as there is room for, or as a flag says.
    Raises UserError where no server would start."""
    if problem := why_not(planner):
        raise UserError(f"--enable-paged-experts: {problem}. Remove the flag.")
    model, parallel = planner.describe()
    fewest, most = _fewest(model), min(_experts_of_rank(model, parallel))
    asked = planner.args.paged_experts_num_resident
    if asked is not None and asked < fewest:
        raise UserError(
            f"--paged-experts-num-resident {asked}: a token needs {fewest} experts at once; use at least as many"
        )
    if asked is not None and asked >= most:
        raise UserError(
            f"--paged-experts-num-resident {asked}: a layer has {most} experts, and all of them would be in GPU memory;"
            " use fewer, or remove the flag and --enable-paged-experts"
        )
    _check_main_memory(planner.with_slots(SlotCounts(fewest, 1)))
    counts, trial, wanted = _smallest(planner, fewest, most)
    chunk = trial.capacity.chunk
    slots = _largest(planner, counts, trial, wanted, most - 1, chunk) if asked is None else asked
    chosen = planner.with_slots(replace(counts, slots=slots))
    try:
        trial = chosen.trial()
    except DoesNotFit:
        largest = _largest(planner, counts, trial, 1, most - 1, 0)
        raise UserError(
            f"--paged-experts-num-resident {asked}: slots for so many experts do not fit; the largest number that does"
            f" is {largest}"
        ) from None
    return trial


def _smallest(planner: Planner, fewest: int, num_experts: int) -> tuple[SlotCounts, Trial, int]:
    """Returns the counts with the fewest slots for a layer of `num_experts`, the plan with them, and the tokens that
    the caches should hold. Raises DoesNotFit."""
    one, two = (planner.with_slots(SlotCounts(fewest, number)).weights() for number in (1, 2))
    of_expert = max(1, two - one)  # in each of the buffers
    others = num_experts - fewest
    room = planner.available - one + of_expert
    least = min(others, -(-others // FEWEST_BUFFERED))
    sizes = sorted({min(others, max(least, room // part // of_expert)) for part in ROOM_OF_BUFFERS}, reverse=True)
    counts, trial = _longest_chunk(planner, [SlotCounts(fewest, buffered) for buffered in sizes])
    capacity = trial.capacity
    tokens, memory = capacity.max_total_num_tokens, capacity.memory
    if asked := planner.args.max_total_tokens or planner.args.context_length:
        return counts, trial, min(tokens, asked)
    share = (memory.caches + _unused(trial)) / ROOM_OF_CACHES / max(1, memory.caches)
    return counts, trial, min(tokens, capacity.sizes.context_len, RESERVED_TOKENS, max(1, int(tokens * share)))


def _longest_chunk(planner: Planner, choices: Sequence[SlotCounts]) -> tuple[SlotCounts, Trial]:
    """Returns the first of the counts with the longest chunk that the caches hold, and the plan with them. Raises
    DoesNotFit."""
    best: tuple[int, SlotCounts, Trial] | None = None
    refusal: DoesNotFit | None = None
    for counts in choices:
        try:
            trial = planner.with_slots(counts).trial()
        except DoesNotFit as error:
            refusal = error
            continue
        chunk = min(trial.capacity.chunk, trial.capacity.max_total_num_tokens)
        if best is None or chunk > best[0]:
            best = chunk, counts, trial
        if planner.args.chunked_prefill_size or chunk >= LONGEST_CHUNK:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1:]


def _unused(trial: Trial) -> int:
    """Returns the bytes that the plan leaves unused, as with --max-total-tokens."""
    memory: dict[str, int] = asdict(trial.capacity.memory)
    return max(0, 2 * memory["available"] - sum(memory.values()))


def _largest(planner: Planner, counts: SlotCounts, smallest: Trial, wanted: int, most: int, chunk: int) -> int:
    """Returns the largest number of slots, up to `most`, beside caches of `wanted` tokens and prompts in chunks of at
    least `chunk`. `smallest`: the plan with the fewest."""
    memory, tokens = smallest.capacity.memory, smallest.capacity.max_total_num_tokens
    base = planner.with_slots(counts).weights()
    of_slot = max(1, planner.with_slots(replace(counts, slots=counts.slots + 1)).weights() - base)
    spare = memory.caches * (1 - wanted / max(1, tokens)) + _unused(smallest)
    slots = min(most, counts.slots + int(spare / of_slot))
    requests = min(RESERVED_REQUESTS, smallest.capacity.sizes.max_running_requests)

    def fits(number: int) -> bool:
        try:
            trial = planner.with_slots(replace(counts, slots=number)).trial()
        except UserError:
            return False
        enough = trial.capacity.sizes.max_running_requests >= requests and trial.capacity.chunk >= chunk
        return enough and trial.capacity.max_total_num_tokens >= wanted

    while slots > counts.slots and not fits(slots):
        slots -= max(1, slots // 64)
    while slots < most and fits(slots + 1):
        slots += 1
    return slots


def _check_main_memory(planner: Planner) -> None:
    """Raises DoesNotFit where main memory has no room for the experts."""
    free = planner.main_memory.free
    if free is None:
        return
    model, parallel = planner.describe()
    needed = _host_bytes(planner) * banks_of(planner.args, parallel.ranks)
    needed += tables_on_host(model, planner.draft(model), parallel) * processes_of(planner.args, parallel.ranks)
    usable = max(free - SYSTEM_RESERVE, free // 2)
    if needed > usable:
        raise DoesNotFit(
            f"the experts take {needed / GIB:.2f} GiB of main memory, and {usable / GIB:.2f} GiB of it may be taken"
        )


def processes_of(args: ServerArgs, ranks: RankLayout) -> int:
    """Returns the number of ranks on one machine."""
    return -(-ranks.world_size * args.dp_size // args.nnodes)


def banks_of(args: ServerArgs, ranks: RankLayout) -> int:
    """Returns the number of banks in the main memory of one machine: replicas share theirs, unless Ray places them."""
    return processes_of(args if args.use_ray else replace(args, dp_size=1), ranks)


def _host_bytes(planner: Planner) -> int:
    model, parallel = planner.describe()
    features = planner.arch.features if planner.arch.device == "cuda" else None
    return sum(expert_bytes(rank_weights(model, parallel.ranks), parallel.dtype, features))


def _fewest(model: ModelDescription) -> int:
    """Returns the most experts that a token chooses of a layer, the shared one included."""
    return max(experts.top_k + experts.fused_shared for experts in model.kinds_of_experts)


def _experts_of_rank(model: ModelDescription, parallel: ParallelConfig) -> list[int]:
    """Returns the number of experts that a rank holds of each kind of layers."""
    padded = parallel.ranks.padded_experts
    return [padded(experts.num_experts) + experts.fused_shared for experts in model.kinds_of_experts]


def describe_slots(planner: Planner, trial: Trial, counts: SlotCounts) -> ExpertSlotPlan:
    """Describes the experts in main memory of a plan."""
    of_rank, parallel, memory = trial.of_rank, trial.parallel, trial.capacity.memory
    model = of_rank.model
    features = planner.arch.features if planner.arch.device == "cuda" else None
    layers = expert_bytes(of_rank, parallel.dtype, features)
    total, experts = sum(layers), max(_experts_of_rank(model, parallel))
    processes = processes_of(planner.args, parallel.ranks)
    rate = FETCHED * bus_rate(planner.arch, planner.main_memory, processes)
    share, buffered = counts.slots / experts, min(counts.buffered, experts - counts.slots)
    dense = memory.weights - total * share - BUFFERS * buffered * max(layers) / experts
    chosen = _fewest(model) / parallel.ranks.ep_size

    banks = banks_of(planner.args, parallel.ranks)
    sizes = ExpertSlotPlan(
        len(layers), experts, counts.slots, buffered, total, processes, banks, 0.0, 0.0, 0.0,
        trial.capacity.sizes.tokens_per_step, chosen, rate,
    )  # fmt: skip

    threads = max(layer.ffn.experts.cpu_threads for layer in model.layers if layer.ffn.experts)
    cpus = with_threads(rate, threads, planner.main_memory, processes) if threads else None
    layer_s, missing_rate = (LAYER_S, rate) if cpus is None else (LAYER_S + CPU_LAYER_S, cpus.together)

    def decode(tokens: int) -> float:
        missing = sizes.copied_bytes(tokens)
        hits = sizes.used_bytes(tokens) - missing
        read = (dense + hits) / (READ_RATE * planner.arch.bandwidth) if planner.arch.bandwidth else 0.0
        return len(layers) * layer_s + STEP_S + read + missing / missing_rate

    prompt = total * (1 - share) / rate
    return replace(sizes, decode_one=decode(1), decode_eight=decode(8), prompt=prompt, cpu_threads=threads)
