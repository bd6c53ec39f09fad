"""Runs steps on one rank's device: owns the weights, the cache pools, the request tables and the graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.drafts.drafter import Drafter
from sglang.srt.layers.adapter_memory import HostAdapter
from sglang.srt.layers.adapters import AdapterLayers
from sglang.srt.layers.attention import workspaces
from sglang.srt.layers.attention.sites import create_attention_sites
from sglang.srt.layers.row_exchange import RowExchange
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.mem_cache.layerwise_load import FIRST, LayerWaits
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.mem_cache.storage.engine import StorageEngine
from sglang.srt.model_executor.device_state import AdapterSlots, DeviceState, shape_of
from sglang.srt.model_executor.draft_runner import DraftRunner
from sglang.srt.model_executor.graph_runner import GraphRunner, GraphSizes, graph_sizes
from sglang.srt.model_executor.group_output import GroupOutput
from sglang.srt.model_executor.host_copies import create_copies
from sglang.srt.model_executor.input_ops import InputOps
from sglang.srt.model_executor.media_setup import CreateEncoder, create_features
from sglang.srt.model_executor.media_timing import measured_pace
from sglang.srt.model_executor.memory_saver.saver import MemorySaver
from sglang.srt.model_executor.quantized_sums import quantize_sums
from sglang.srt.model_executor.step import (
    GroupSteps,
    LaunchedForward,
    ModelOutput,
    PromptLaunches,
    StepInput,
    StepResult,
    no_prompts,
    padding_decodes,
    padding_prompt,
    step_arrays,
)
from sglang.srt.model_executor.step_output import StepOutput
from sglang.srt.model_executor.token_receiver import TokenReceiver
from sglang.srt.model_executor.two_batch_overlap import TwoBatchOverlap
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.plan import Plan
from sglang.srt.plan.step_widths import StepWidths
from sglang.srt.sampling.sampling_table import SamplingTable
from sglang.srt.utils.device_arrays import send
from sglang.srt.utils.engine_state import KV_CACHE, WEIGHTS

logger = logging.getLogger(__name__)

SHORT_PROMPT = 16
SELECTING_OPS = frozenset({"sparse_indexer", "block_indexer"})
MIN_SELECTION = 4096
"""Entries that the smallest launch of `select_entries` takes."""
SHARED_PROMPTS = (1, *(length << bit for bit in range(9) for length in (2, 3)), 1024)
"""Prompt lengths that together meet every launch by which programs share the selected entries of a token: with more
tokens than the last no GPU shares any."""

CreateDrafter = Callable[[CausalLM, Plan], Drafter]
"""Creates the drafter for a model that has its weights."""


def selection_lengths(reach: int) -> list[int]:
    """Returns the lengths of requests that together meet every launch of `select_entries`, whose tiles are powers of
    two, as are the tokens of an entry. reach: positions that a request can have."""
    longest = reach - 1
    powers = range(MIN_SELECTION.bit_length() - 1, longest.bit_length())
    return [*(1 << bit for bit in powers), longest] if powers else []


class ModelRunner:
    """Owns and runs everything on the device. Called by one thread; calls return before the device is done."""

    def __init__(
        self,
        plan: Plan,
        load_format: str = "auto",
        seed: int = 0,
        create_drafter: CreateDrafter | None = None,
        keeps_hidden: bool = False,
        widths: StepWidths | None = None,
        create_encoder: CreateEncoder | None = None,
        memory_saver: MemorySaver | None = None,
        before_launches: Callable[[], None] = lambda: None,
    ) -> None:
        """keeps_hidden: any step may be asked for final hidden states, not only those with prompts. create_drafter: all
        pipeline stages get a drafter, but only the last one asks it for draft tokens. widths: tokens per request in
        steps without prompts; None: always the maximum. create_encoder: of images and videos; None: the
        server reads text only. memory_saver: has the memory that can be given back; None: none can. before_launches:
        waits for what is to be ready when the first step is launched, behind the weights."""
        self.plan = plan
        self.memory_saver = memory_saver
        self.device = plan.device
        pdl.enable("pdl" in plan.arch.features)
        quantize_sums(parallel_state.groups(), plan)
        with self._region(WEIGHTS):
            self.model = load_model(plan, load_format, seed)
        self.pp_tokens = parallel_state.groups().pp_tokens
        self.samples = plan.description.last_stage
        """Receives the last pipeline stage's tokens in the stages before it."""
        with self._region(WEIGHTS):
            self.drafter = drafter = None if create_drafter is None else create_drafter(self.model, plan)
        with self._region(KV_CACHE):
            self.pools = CachePools(plan.caches, plan.pool_sizes, plan.device)
        self.pools.bind([*self.model.caches, *(drafter.caches if drafter is not None else ())])
        self.copies = None if plan.host_cache is None else create_copies(plan, plan.host_cache, self.pools)
        """Copies of cached prefixes to main memory and back."""
        self.storage: StorageEngine | None = None
        """Copies between main memory and a store; set once the fingerprint is known."""
        self.sampling_table = SamplingTable(plan.max_running_requests + 1, plan.model.vocab_size, plan.device)
        with workspaces.allocated_in(partial(self._region, KV_CACHE)):
            attention = create_attention_sites(plan, plan.device)
        tables, width = len(self.pools.tables), 1 if drafter is None else drafter.num_tokens
        self.state = DeviceState(self.model, attention, tables, plan.pool_sizes, plan.device, width, InputOps(plan))
        self.state.context = parallel_state.groups().context
        if plan.adapters is not None:
            self.state.adapters = AdapterSlots(plan.pool_sizes.max_requests, plan.device)
        with self._region(WEIGHTS):
            self.media = None if create_encoder is None else create_features(plan, self.state, create_encoder)
        before_launches()
        sampler = Sampler(use_triton=plan.device != "cpu")
        sampler.warm_up(self.sampling_table, None if self.state.has_drafts else self.state.next_tokens[:, 0])
        self.widths = widths or StepWidths((width,))
        drafts = DraftRunner(self.state, drafter, self.sampling_table, sampler) if drafter and self.samples else None
        self.groups = groups = parallel_state.groups()
        of_groups = GroupOutput(self.state, self.sampling_table, sampler, groups) if groups.dp.size > 1 else None
        self.two_batch_overlap = TwoBatchOverlap.from_plan(plan, self.state, groups)
        """Steps that run as two microbatches; they have no graph."""
        self.launches = PromptLaunches()
        self.output = StepOutput(self.state, self.sampling_table, sampler, self.pp_tokens, drafts, of_groups)
        self.token_receiver = None if self.samples else TokenReceiver(groups, self.state)
        self.graphs: GraphRunner | None = None
        sizes = graph_sizes(plan, self.state, self.widths)
        if sizes.any:
            with torch.inference_mode():
                self.graphs = self._captured(sizes, keeps_hidden, drafts, not attention.decode_plans_on_host)
        if plan.device != "cpu":
            self._compile_prompts()
            self.compile_decodes()
            self._compile_adapters()
        if plan.device == "cuda" and self.media is not None:
            self.media.pace = measured_pace(self)
            logger.info("Images beside requests that decode: %s", self.media.pace.describe())

    def _region(self, tag: str) -> AbstractContextManager[None]:
        """Allocates inside the block in memory that can be given back, if any can."""
        return nullcontext() if self.memory_saver is None else self.memory_saver.region(tag)

    def _captured(
        self, sizes: GraphSizes, keeps_hidden: bool, drafts: DraftRunner | None, graphs_prompts: bool
    ) -> GraphRunner | None:
        """Captures the graphs. Returns None for a class of transformers whose code cannot be captured, which may wait
        for the device within a step: its steps are launched kernel by kernel."""
        try:
            pool = None if self.memory_saver is None else self.memory_saver.graph_pool
            graphs = GraphRunner(self.state, sizes, keeps_hidden, drafts, graphs_prompts, pool)
        except RuntimeError as error:
            if self.plan.description.transformers_class is None:
                raise
            said = str(error).partition("\n")[0]
            logger.warning("No CUDA graphs: %s cannot be captured (%s)", self.plan.description.title, said)
            return None
        logger.info("Captured CUDA graphs for batch sizes %s", list(self.plan.cuda_graph_bs))
        return graphs

    @property
    def tokens_per_step(self) -> int:
        """Returns the most tokens that a request may get from a step."""
        return self.state.tokens_per_step

    @property
    def lookahead_slots(self) -> int:
        """Returns the number of positions after a request's last token for which the drafter needs cache slots."""
        return 0 if self.drafter is None else self.drafter.lookahead_slots

    @property
    def next_tokens_read(self) -> int:
        """Returns the number of following tokens on which a cache entry depends."""
        return 0 if self.drafter is None else self.drafter.next_tokens_read

    def step_times(self) -> dict[tuple[int, int], float]:
        """Returns (requests, tokens per request) -> milliseconds on the slowest rank of a step with its draft tokens,
        for steps with graphs. Empty with pipeline stages."""
        if self.graphs is None or self.plan.ranks.pp_size > 1:
            return {}
        times = self.graphs.step_times()
        microseconds = parallel_state.all_reduce_max([int(1000 * ms) for ms in times.values()])
        return {size: us / 1000 for size, us in zip(times, microseconds, strict=True)}

    def media_prompt_times(self) -> dict[int, float]:
        """Returns tokens -> milliseconds of a step with images in a graph; empty if these have no graphs, or with
        pipeline stages."""
        media = self.plan.description.media
        if self.graphs is None or media is None or media.both_ways or self.plan.ranks.pp_size > 1:
            return {}
        return self.graphs.prompt_times()

    @property
    def adapters(self) -> AdapterLayers | None:
        """Returns the LoRA adapters of the model's layers; None: the server takes none."""
        return self.model.adapters

    @torch.inference_mode()
    def load_adapter(self, slot: int, adapter: HostAdapter) -> None:
        """Copies a LoRA adapter into a slot, counted from 1, for the steps that are launched from now on."""
        assert self.model.adapters is not None
        self.model.adapters.load(slot, adapter)

    def set_adapter(self, slot: int, adapter: int) -> None:
        """Gives a request slot the adapter in slot `adapter`, counted from 1; 0: none."""
        if self.state.adapters is not None:
            self.state.adapters.set(slot, adapter)

    def begin(self, slot: int, tokens: Sequence[int], position_delta: int = 0) -> None:
        """Prepares a request slot for a request with these tokens. position_delta: as in
        `DeviceState.position_deltas`."""
        self.state.set_position_delta(slot, position_delta)
        if self.drafter is not None and self.samples:
            self.drafter.begin(slot, tokens)

    def decodes_in_graph(self, num_reqs: int) -> bool:
        """Returns whether steps without prompts of `num_reqs` requests have graphs."""
        return self.graphs is not None and self.graphs.fits_decodes(num_reqs)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Launches every step kernel by kernel inside the block."""
        graphs, self.graphs = self.graphs, None
        try:
            yield
        finally:
            self.graphs = graphs

    @contextmanager
    def with_min_overlap_tokens(self, minimum: int | None) -> Iterator[None]:
        """Runs steps of at least `minimum` tokens with prompts as two microbatches inside the block, if the plan allows
        two-batch overlap; None: no step."""
        with nullcontext() if self.two_batch_overlap is None else self.two_batch_overlap.with_min_tokens(minimum):
            yield

    @property
    def longest_prompt(self) -> int:
        """Returns the most tokens that `run_padding` accepts."""
        chunk = self.plan.chunked_prefill_size
        return min(self.plan.context_len - 1, chunk if chunk > 0 else self.plan.max_prefill_tokens)

    def run_padding(self, num: int, prefix: int = 0) -> None:
        """Computes a prompt of `num` tokens behind `prefix` cached ones on the padding slots, kernel by kernel."""
        with self.without_graphs():
            self.run(padding_prompt(num, prefix, self.state.has_drafts)).wait()
        self.state.lens[0] = 0  # of the padding slot, over which nothing is to be attended

    def _compile_prompts(self) -> None:
        """Computes prompts that are too long for graphs, so that requests do not wait for compilation: a short one, the
        longest, and the longest that attends to all entries, behind every kind of cached prefix; those at which a
        kernel's tiles change; and those at which the selection of entries, or the attention to them, does."""
        attention, context_len = self.state.attention, self.plan.context_len
        if self.plan.description.pooling is not None:  # whole texts, of which none has a cached prefix
            for num in (min(SHORT_PROMPT, self.longest_prompt), self.longest_prompt):
                self.run_padding(num)
            self.launches = PromptLaunches()
            return
        lengths = {(num, 0) for num in self.plan.bucket_sizes(self.longest_prompt)}
        lengths |= {(num, 0) for num in self._grouped_at_once() if num <= self.longest_prompt}
        short = min(SHORT_PROMPT, self.longest_prompt)
        dense = min(attention.longest_dense, self.longest_prompt)
        for num in (short, dense or short, self.longest_prompt):
            lengths |= {(num, prefix) for prefix in attention.prefixes(num, context_len)}
        if SELECTING_OPS & self.plan.choices.keys():
            reach = min(context_len, self.plan.num_positions)
            lengths |= {(short, length - short) for length in selection_lengths(reach)}
            lengths |= {(num, reach - 1 - num) for num in SHARED_PROMPTS if num <= self.longest_prompt}
        for num, prefix in sorted(lengths):
            self.run_padding(num, prefix)
        self.launches = PromptLaunches()

    def _grouped_at_once(self) -> set[int]:
        """Returns the most tokens whose pairs of token and expert one program groups: larger steps of the same tile
        have other kernels for it."""
        experts = [block.experts for layer in self.plan.description.layers if (block := layer.ffn).experts is not None]
        if not experts or "fused_moe" not in self.plan.choices:
            return set()
        from sglang.srt.layers.moe.fused_moe_triton.align import ONE_PROGRAM_PAIRS

        return {
            ONE_PROGRAM_PAIRS // (each.router.top_k + 1) for each in experts
        }  # 1: of an expert that all tokens have

    def compile_decodes(self) -> None:
        """Computes steps with more requests than the largest graph, kernel by kernel, on the padding slot: with the
        most requests that may run, with a number that is no multiple of anything, and with the fewest that may bring
        as many draft tokens."""
        maximum = self.plan.max_running_requests
        if self.decodes_in_graph(maximum) or self.plan.description.pooling is not None:
            return
        widths = self.widths.of if self.state.has_drafts else lambda num: (0,)
        fewest = {widths(num): num for num in range(maximum, 0, -1) if not self.decodes_in_graph(num)}
        with self.without_graphs():
            for num in {maximum, maximum - 1 + maximum % 2, *fewest.values()}:
                for width in widths(num):
                    self.run(padding_decodes(num, width)).wait()
        self.state.lens[0] = 0

    def _compile_adapters(self) -> None:
        """Computes short and long prompts with the kernels of LoRA adapters, of which the padding slot has none."""
        if self.state.adapters is None:
            return
        self.state.adapters.host[0] = 1
        for num in (min(SHORT_PROMPT, self.longest_prompt), self.longest_prompt):
            self.run_padding(num)
        self.state.adapters.host[0] = 0
        self.launches = PromptLaunches()

    def run(self, step: StepInput) -> StepResult:
        """Launches one step: forward, sampling, and the copy of the sampled tokens to the host."""
        return self.sample(self.forward(step))

    @torch.inference_mode()
    def forward(self, step: StepInput) -> LaunchedForward:
        """Launches a step up to its logits."""
        return self._forward(step) if step.prompts is None else self.launches.timed(self._forward, step)

    def _forward(self, step: StepInput) -> LaunchedForward:
        graphs, loads = self.graphs, None
        if step.loads:
            graphs, loads = None, LayerWaits(step.loads)
            loads.before(FIRST)  # states that the tables' update copies
        if self.groups.dp.size > 1 and step.groups is None:
            step.groups = GroupSteps.of([step] * self.groups.dp.size)
        if self.token_receiver is not None:
            self.token_receiver.take_before(step)
        two_batch_overlap = None if self.two_batch_overlap is None else self.two_batch_overlap.split_step(step)
        shape = None if graphs is None or two_batch_overlap is not None else graphs.shape_of(step)
        if shape is not None and shape.has_prompts and step.prompts is None:  # other attention groups have some
            assert step.groups is not None
            idle = step.groups.idle[self.groups.dp.rank]
            step = replace(step, prompts=no_prompts(idle, step.num_decodes))
        if step.table_update is not None and (graphs is None or shape is None or not graphs.writes_tables(step)):
            self.state.update_tables(step.table_update, self.pools)
        if graphs is not None and shape is not None:
            return self.output.launched(step, graphs.replay(shape, step))
        arrays = send(self.device, **step_arrays(step))
        exact_shape = shape_of(step, self.state.has_adapters(step))
        attends = two_batch_overlap is None or self.drafter is not None
        batch = self.state.batch(arrays, exact_shape, step, attends=attends)
        sampled_rows = None
        if step.groups is not None:
            batch.exchange = RowExchange.of_step(self.groups, step.groups.num_tokens, self.device)
            padded = step.groups.padded_sampled(self.groups.attention.size)
            sampled_rows = RowExchange(self.groups, padded, exact=True)
        batch.loads = loads
        if self.two_batch_overlap is None or two_batch_overlap is None:
            hidden = self.model(batch)
        else:
            hidden = self.two_batch_overlap.compute(batch, two_batch_overlap, loads)
            self.launches.count_two_batch(step)
        if loads is not None:
            loads.finish()
        rows = None if step.prompts is None else arrays["last_rows"]
        sampled = hidden if rows is None else hidden[rows]
        if step.groups is not None:
            sampled = sampled[: step.groups.num_sampled[self.groups.dp.rank]]
        logits = self.model.step_logits(sampled, sampled_rows, self.model.slots_of_rows(batch, rows))
        return self.output.launched(step, ModelOutput(batch, arrays, hidden, logits))

    @torch.inference_mode()
    def sample_groups(self, forward: LaunchedForward, vocab_mask: np.ndarray | None = None) -> list[StepResult]:
        """Launches the rest of a step of several attention groups, and returns the results of all."""
        if self.token_receiver is not None:
            return [*self.token_receiver.expect(forward)]
        return self.output.sample_groups(forward, vocab_mask)

    @torch.inference_mode()
    def sample(self, forward: LaunchedForward, vocab_mask: np.ndarray | None = None) -> StepResult:
        """Launches the rest of a step. vocab_mask [R, ceil(V / 32)] int32: allowed tokens of the rows of logits."""
        if self.output.group_output is not None:
            return self.sample_groups(forward, vocab_mask)[self.groups.dp.rank]
        if self.token_receiver is not None:
            return self.token_receiver.expect(forward)[0]
        return self.output.sample(forward, vocab_mask)
