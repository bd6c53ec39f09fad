"""Runs steps on one rank's device: owns the weights, the cache pools, the request tables and the graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.kernels.coverage import check_launches
from sglang.srt.layers.attention.attention_registry import create_attention_backend
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.ops import DecodeInputsOp
from sglang.srt.layers.sampler import Sampler, SamplerOutput
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.mem_cache.kv_table import TableUpdate
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.drafts import Drafter
from sglang.srt.model_executor.extend_graph_runner import ExtendGraphRunner
from sglang.srt.model_executor.late_tokens import LateTokens
from sglang.srt.model_executor.step import ExtendInput, LaunchedForward, StepInput, StepResult, extend_arrays
from sglang.srt.model_executor.verify_graph_runner import VerifyGraphRunner
from sglang.srt.model_loader.loader import load_model
from sglang.srt.plan.defaults import mixed_decode_sizes
from sglang.srt.plan.plan import Plan
from sglang.srt.sampling.logprobs import LogprobResult, prompt_logprobs
from sglang.srt.sampling.sampling_table import SamplingTable
from sglang.srt.utils.device_arrays import DeviceArrays, event_on, send, to_device, to_host

logger = logging.getLogger(__name__)


class ModelRunner:
    """Everything that touches the device. Called by one thread; every call returns before the device is done."""

    def __init__(self, plan: Plan, load_format: str = "auto", seed: int = 0, drafter: Drafter | None = None) -> None:
        if drafter is not None and plan.has_states:
            raise UserError("guesses cannot be verified with this model: its recurrent states cannot be taken back")
        if drafter is not None and plan.ranks.pp_size > 1:
            raise UserError("guesses cannot be verified with --pp-size: only the last stage knows what was accepted")
        self.plan = plan
        self.device = plan.device
        pdl.enable("pdl" in plan.arch.features)
        if envs.SGLANG_CHECK_LAUNCHES and plan.device == "cuda":
            check_launches(plan.arch)
        self.model = load_model(plan, load_format, seed)
        self.pp_tokens = parallel_state.groups().pp_tokens
        self.samples = plan.description.last_stage
        """Stages before the last one of a pipeline take its tokens, and leave what else it finds to it."""
        self.pools = CachePools(plan.caches, plan.pool_sizes, plan.device)
        self.pools.bind(self.model.caches)
        self.sampling_table = SamplingTable(plan.max_running_requests + 1, plan.model.vocab_size, plan.device)
        self.sampler = Sampler(use_triton=plan.device == "cuda")
        attn_backend = create_attention_backend(plan)
        self._plans_on_host = not plan.choices["extend_attention"].spec.graph_prefill
        """With lengths that only the device knows where there is a drafter: then its steps wait for each other."""
        inputs: DecodeInputsOp = plan.entry("decode_inputs")
        self.state = DeviceState(
            self.model, attn_backend, len(self.pools.tables), plan.pool_sizes, plan.device, drafter, inputs
        )
        self.late_tokens = None if self.samples else LateTokens(self.pp_tokens, self.state.next_tokens)
        self.sampler.warm_up(self.sampling_table, self.state.next_tokens[:, 0])
        self.graphs: CudaGraphRunner | None = None
        self.extend_graphs: ExtendGraphRunner | None = None
        self.verify_graphs: VerifyGraphRunner | None = None
        if plan.cuda_graph_bs:
            with torch.inference_mode():
                if drafter is None:
                    self.graphs = CudaGraphRunner(self.state, plan.cuda_graph_bs)
                if plan.cuda_graph_prefill_tokens:
                    decodes = mixed_decode_sizes(plan.cuda_graph_bs)
                    self.extend_graphs = ExtendGraphRunner(self.state, plan.cuda_graph_prefill_tokens, decodes)
                    if drafter is not None:
                        self.verify_graphs = VerifyGraphRunner(self.state, plan.cuda_graph_bs)
            logger.info("Captured CUDA graphs for batch sizes %s", list(plan.cuda_graph_bs))
        if plan.device == "cuda":
            self._warm_up_extend()

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a request may get from a step."""
        return self.state.tokens_per_step

    def decodes_in_graph(self, num_reqs: int) -> bool:
        graphs = self.graphs or self.verify_graphs
        return graphs is not None and graphs.fits(num_reqs)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Inside the block every kernel of a step is launched by itself."""
        graphs = self.graphs, self.extend_graphs, self.verify_graphs
        self.graphs = self.extend_graphs = self.verify_graphs = None
        try:
            yield
        finally:
            self.graphs, self.extend_graphs, self.verify_graphs = graphs

    def _warm_up_extend(self) -> None:
        """Compile what prompts too long for a graph need, with and without a cached prefix, on the padding slots."""
        num = 16
        with self.without_graphs():
            for prefix in (0, 1):
                lens, zero = np.array([num], np.int32), np.zeros(1, np.int64)
                extend = ExtendInput(np.zeros(num, np.int64), np.array([prefix], np.int32), lens, zero)
                self.run(StepInput(zero, lens + prefix, np.zeros(num, np.int32), extend)).wait()
        self.state.lens[0] = 0  # of the padding slot, over which nothing is to be attended

    def run(self, step: StepInput) -> StepResult:
        """Launch one step: forward, sample, and the copy of the sampled tokens to the host."""
        return self.sample(self.forward(step))

    @torch.inference_mode()
    def forward(self, step: StepInput) -> LaunchedForward:
        """Launch a step up to its logits."""
        if self.late_tokens is not None:
            self.late_tokens.take_before(step.slots)
        graphs = self.graphs if step.is_decode and self.decodes_in_graph(len(step.slots)) else None
        if step.table_update is not None and not (graphs is not None and graphs.updates_tables(step)):
            self._update_tables(step.table_update)
        if step.extend is not None:
            return self._forward_extend(step)
        if step.widths is not None:
            return self._forward_verify(step, step.widths)
        if graphs is not None:
            logits = graphs.replay(step)
            slots = graphs.inputs["slots"][: len(logits)]
            return LaunchedForward(step, logits, slots, step.slots, graphs.inputs["seq_lens"][: len(logits)])
        sent = send(
            self.device, slots=step.slots, seq_lens=step.seq_lens, out_cache_loc=step.out_cache_loc.astype(np.int64)
        )
        batch = self.state.decode_batch(sent["slots"], sent["seq_lens"], sent["out_cache_loc"])
        batch.seq_lens_cpu = step.seq_lens.tolist()
        self.state.attn_backend.init_forward_metadata(batch)
        logits = self.model.step_logits(self.model(batch))
        return LaunchedForward(step, logits, sent["slots"], step.slots, sent["seq_lens"])

    def _update_tables(self, update: TableUpdate) -> None:
        sent = send(
            self.device,
            index=update.index,
            value=update.value,
            state_sources=update.state_sources,
            state_targets=update.state_targets,
        )
        self.state.req_to_token.view(-1)[sent["index"]] = sent["value"]
        if len(update.state_targets):
            self.pools.copy_states(sent["state_sources"], sent["state_targets"])

    def _forward_extend(self, step: StepInput) -> LaunchedForward:
        if self.extend_graphs is not None and self.extend_graphs.fits(step):
            hidden, logits = self.extend_graphs.replay(step)
            arrays = self.extend_graphs.inputs
        else:
            arrays = send(self.device, **extend_arrays(step))
            hidden = self.model(self._extend_batch(step, arrays))
            logits = self.model.step_logits(hidden[arrays["last_rows"]])
        slots, positions = arrays["sampled_slots"][: len(logits)], arrays["sampled_lens"][: len(logits)]
        if self.state.drafter is not None:
            assert step.extend is not None
            count = step.extend.num_decodes
            prompts = len(step.slots) - count
            self.state.settle_prompts(
                arrays["slots"][:prompts], arrays["seq_lens"][:prompts], arrays["decode_slots"][:count]
            )
            positions = self.state.lens[slots]
        prompt = self._prompt_logprobs(step, hidden)
        embeddings = self._embeddings(step, hidden, arrays["last_rows"])
        return LaunchedForward(step, logits, slots, step.sampled_slots, positions, None, prompt, embeddings)

    def _forward_verify(self, step: StepInput, host_widths: np.ndarray) -> LaunchedForward:
        if self.verify_graphs is not None and self.verify_graphs.fits(len(step.slots)):
            logits, positions = self.verify_graphs.replay(step)
            slots, widths = (self.verify_graphs.inputs[name][: len(step.slots)] for name in ("slots", "widths"))
        else:
            sent = send(self.device, slots=step.slots, widths=host_widths)
            slots, widths = sent["slots"], sent["widths"]
            batch = self.state.verify_batch(slots, widths)
            if self._plans_on_host:
                assert batch.extend_prefix_lens is not None
                batch.extend_prefix_lens_cpu = batch.extend_prefix_lens.tolist()
                batch.seq_lens_cpu = batch.seq_lens.tolist()
            self.state.attn_backend.init_forward_metadata(batch)
            logits, positions = self.model.step_logits(self.model(batch)), batch.positions
        # Rows of padding are sampled as the padding slot is: greedily, without penalties.
        row = np.arange(self.state.tokens_per_step)
        host_slots = np.where(row < host_widths[:, None], step.slots[:, None], 0).flatten()
        inside = torch.arange(self.state.tokens_per_step, device=slots.device) < widths[:, None]
        row_slots = torch.where(inside, slots[:, None], 0).flatten()
        return LaunchedForward(step, logits, row_slots, host_slots, positions + 1, widths)

    def _extend_batch(self, step: StepInput, sent: DeviceArrays) -> ForwardBatch:
        extend = step.extend
        assert extend is not None
        count, decodes = extend.num_decodes, None
        if count:
            decodes = self.state.decode_batch(sent["decode_slots"], sent["decode_lens"], sent["decode_loc"])
            known = self.state.drafter is None or not self._plans_on_host
            decodes.seq_lens_cpu = step.seq_lens[:count].tolist() if known else decodes.seq_lens.tolist()
            self.state.attn_backend.init_forward_metadata(decodes)
        lens, prefix_lens = extend.extend_lens.tolist(), extend.prefix_lens.tolist()
        batch = self.state.extend_batch(sent, len(sent["input_ids"]), decodes, lens, prefix_lens)
        batch.seq_lens_cpu = step.seq_lens[count:].tolist()
        self.state.attn_backend.init_forward_metadata(batch)
        return batch

    def _prompt_logprobs(self, step: StepInput, hidden: torch.Tensor) -> LogprobResult | None:
        assert step.extend is not None
        request = step.extend.prompt_logprobs
        if request is None or not self.samples:
            return None
        packed = prompt_logprobs(hidden, self.model.logits, request, self.plan.model.vocab_size)
        return LogprobResult(to_host(packed), request)

    def _embeddings(self, step: StepInput, hidden: torch.Tensor, last_rows: torch.Tensor) -> torch.Tensor | None:
        """Final hidden states [E, H] fp32 of the sampled rows that want them."""
        assert step.extend is not None
        rows = step.extend.embed_rows
        if rows is None or not self.samples:
            return None
        return to_host(hidden[last_rows[to_device(rows, self.device)]].float())

    def _sampled(self, forward: LaunchedForward, vocab_mask: np.ndarray | None) -> SamplerOutput:
        """The logits of several ranks come together for what cannot be said of each rank's columns."""
        head = self.model.head
        assert head is not None, "the last stage has it"
        sampling = self.sampling_table.view(forward.host_slots, forward.slots)
        next_token = self.state.next_tokens[:, 0] if self.state.drafter is None else None
        plain = sampling.only_largest and vocab_mask is None and forward.step.logprobs is None
        if plain and head.is_shard(forward.logits):
            tokens = head.first_largest(forward.logits)
            if next_token is not None:
                next_token[forward.slots] = tokens.clamp(min=0)
            return SamplerOutput(tokens, None)
        mask = None if vocab_mask is None else to_device(vocab_mask, self.device)
        logits = head.whole(forward.logits)
        on_host = next_token is not None and self.pp_tokens.size == 1
        return self.sampler(logits, sampling, forward.positions, mask, forward.step.logprobs, next_token, on_host)

    @torch.inference_mode()
    def sample(self, forward: LaunchedForward, vocab_mask: np.ndarray | None = None) -> StepResult:
        """Launch the rest of a step. vocab_mask [R, ceil(V / 32)] int32: allowed tokens of the rows of logits."""
        if self.late_tokens is not None:
            return self.late_tokens.expect(forward.host_slots)
        step, state = forward.step, self.state
        out = self._sampled(forward, vocab_mask)
        if len(out.next_token_ids):
            self.pp_tokens.from_last(out.next_token_ids)
        counts, tokens = None, out.next_token_ids[:, None]
        if forward.widths is not None:
            slots = forward.slots.view(len(step.slots), -1)[:, 0]
            counts = to_host(state.settle_verified(slots, forward.widths, out.next_token_ids))
            tokens = out.next_token_ids.view(len(slots), -1)
        elif state.drafter is not None:
            state.settle_tokens(forward.slots, out.next_token_ids)
        tokens = to_host(tokens)
        logprobs = None
        if step.logprobs is not None:
            assert out.logprobs is not None
            logprobs = LogprobResult(to_host(out.logprobs), step.logprobs)
        return StepResult(tokens, event_on(self.device), counts, logprobs, forward.prompt_logprobs, forward.embeddings)
