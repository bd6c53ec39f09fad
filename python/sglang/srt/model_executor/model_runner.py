"""Runs steps on one rank's device: owns the weights, the cache pools, the request tables and the graphs."""

from __future__ import annotations

import logging

import numpy as np
import torch

from sglang.srt.environ import envs
from sglang.srt.kernels.coverage import check_launches
from sglang.srt.layers.attention.attention_registry import create_attention_backend
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.model_executor import host_pack
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.extend_graph_runner import ExtendGraphRunner
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, TokenSlots
from sglang.srt.model_executor.step import (
    ExtendInput,
    LogprobSpec,
    PendingLogprobs,
    StepInput,
    StepResult,
    extend_layout,
)
from sglang.srt.model_loader.loader import load_model
from sglang.srt.plan.defaults import mixed_decode_sizes
from sglang.srt.plan.plan import Plan
from sglang.srt.sampling.logprobs import LogprobRequest, prompt_logprobs
from sglang.srt.sampling.sampling_table import SamplingTable

logger = logging.getLogger(__name__)


class ModelRunner:
    """Everything that touches the device. Called by one thread; every call returns before the device is done."""

    def __init__(self, plan: Plan, load_format: str = "auto", seed: int = 0) -> None:
        self.plan = plan
        self.device = plan.device
        pdl.enable("pdl" in plan.arch.features)
        if envs.SGLANG_CHECK_LAUNCHES and plan.device == "cuda":
            check_launches(plan.arch)
        self.model = load_model(plan, load_format, seed)
        self.pools = CachePools(plan.caches, plan.pool_sizes, plan.device)
        self.pools.bind(self.model.caches)
        rows = (len(self.pools.tables), plan.max_running_requests + 1, plan.context_len)
        self.req_to_token = torch.zeros(rows, dtype=torch.int32, device=plan.device)
        """[tables, max_reqs + 1, context_len]: the cache slot of each position of each request slot, one table for each
        lifetime of caches (`plan.caches.row_tables`). Row 0 is padding and stays zero, which is the padding slot."""
        self.sampling_table = SamplingTable(plan.max_running_requests + 1, plan.model.vocab_size, plan.device)
        self.sampler = Sampler(use_triton=plan.device == "cuda")
        self.next_token = torch.zeros(plan.max_running_requests + 1, dtype=torch.int64, device=plan.device)
        self.sampler.warm_up(self.sampling_table, self.next_token)
        self.attn_backend = create_attention_backend(plan)
        self.graphs: CudaGraphRunner | None = None
        self.extend_graphs: ExtendGraphRunner | None = None
        if plan.cuda_graph_bs:
            with torch.inference_mode():
                self.graphs = CudaGraphRunner(self, plan.cuda_graph_bs)
                if plan.cuda_graph_prefill_tokens:
                    decodes = mixed_decode_sizes(plan.cuda_graph_bs)
                    self.extend_graphs = ExtendGraphRunner(self, plan.cuda_graph_prefill_tokens, decodes)
            logger.info("Captured CUDA graphs for batch sizes %s", list(plan.cuda_graph_bs))
        if plan.device == "cuda":
            self._warm_up_extend()

    def _warm_up_extend(self) -> None:
        """Compile what prefill needs, with and without a cached prefix, on the padding slots."""
        num = 16
        for prefix in (0, 1):
            lens, zero = np.array([num], np.int32), np.zeros(1, np.int64)
            extend = ExtendInput(np.zeros(num, np.int64), np.array([prefix], np.int32), lens, zero)
            self.run(StepInput(zero, lens + prefix, np.zeros(num, np.int32), extend)).wait()

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepResult:
        """Launch one step: forward, sample, and the copy of the sampled tokens to the host."""
        if step.table_update is not None:
            index, value = host_pack.send((step.table_update.index, step.table_update.value), self.device)
            self.req_to_token.view(-1)[index] = value
        if step.extend is not None:
            return self._run_extend(step)
        if self.graphs is not None and self.graphs.fits(len(step.slots)):
            logits = self.graphs.replay(step)
            inputs = self.graphs.inputs
            return self._sample(step, logits, inputs["slots"][: len(step.slots)], inputs["seq_lens"])
        slots, seq_lens, loc = host_pack.send(
            (step.slots, step.seq_lens, step.out_cache_loc.astype(np.int64)), self.device
        )
        batch = self.decode_batch(slots, seq_lens, loc)
        batch.seq_lens_cpu = step.seq_lens.tolist()
        self.attn_backend.init_forward_metadata(batch)
        return self._sample(step, self.model.logits(self.model(batch)), slots, seq_lens)

    def decode_batch(
        self,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        num_valid_tokens: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """A DECODE batch from device tensors only, so that it can be captured; enters the new slots in the table."""
        positions = seq_lens.to(torch.int64) - 1
        self.req_to_token[0][slots, positions] = out_cache_loc.to(torch.int32)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(slots),
            input_ids=self.next_token[slots],
            positions=positions,
            req_pool_indices=slots,
            seq_lens=seq_lens,
            token_slots=self.token_slots(out_cache_loc),
            attn_backend=self.attn_backend,
            num_valid_tokens=num_valid_tokens,
        )

    def token_slots(self, out_cache_loc: torch.Tensor) -> tuple[TokenSlots, ...]:
        return (TokenSlots(self.req_to_token[0], out_cache_loc),)

    def _run_extend(self, step: StepInput) -> StepResult:
        extend = step.extend
        assert extend is not None
        layout = extend_layout(step)
        if self.extend_graphs is not None and self.extend_graphs.fits(step):
            hidden, logits = self.extend_graphs.replay(step, layout)
            inputs = self.extend_graphs.inputs
            sampled = inputs["sampled_slots"][: len(logits)]
            return self._sample(step, logits, sampled, inputs["sampled_lens"], self._prompt_logprobs(step, hidden))
        count = extend.num_decodes
        sent = host_pack.send(
            (
                step.slots[:count],
                step.seq_lens[:count],
                step.out_cache_loc[:count].astype(np.int64),
                extend.input_ids,
                layout.positions[count:],
                step.slots[count:],
                step.seq_lens[count:],
                step.out_cache_loc.astype(np.int64),
                extend.extend_lens,
                extend.prefix_lens,
                layout.start_loc,
                layout.last_rows,
                step.sampled_slots,
                step.seq_lens[extend.sample_rows],
            ),
            self.device,
        )
        decode_slots, decode_lens, decode_loc, ids, pos, slots, seq_lens, loc = sent[:8]
        extend_lens, prefix_lens, start_loc, rows, sampled, sampled_lens = sent[8:]
        decodes = None
        if count:
            decodes = self.decode_batch(decode_slots, decode_lens, decode_loc)
            decodes.seq_lens_cpu = step.seq_lens[:count].tolist()
            self.attn_backend.init_forward_metadata(decodes)
            ids, pos = torch.cat((decodes.input_ids, ids)), torch.cat((decodes.positions, pos))
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(slots),
            input_ids=ids,
            positions=pos,
            req_pool_indices=slots,
            seq_lens=seq_lens,
            token_slots=self.token_slots(loc),
            attn_backend=self.attn_backend,
            decodes=decodes,
            extend_seq_lens=extend_lens,
            extend_prefix_lens=prefix_lens,
            extend_start_loc=start_loc,
            extend_seq_lens_cpu=extend.extend_lens.tolist(),
            extend_prefix_lens_cpu=extend.prefix_lens.tolist(),
            seq_lens_cpu=step.seq_lens[count:].tolist(),
        )
        self.attn_backend.init_forward_metadata(batch)
        hidden = self.model(batch)
        pending = self._prompt_logprobs(step, hidden)
        return self._sample(step, self.model.logits(hidden[rows]), sampled, sampled_lens, pending)

    def _prompt_logprobs(self, step: StepInput, hidden: torch.Tensor) -> PendingLogprobs | None:
        assert step.extend is not None
        wanted = step.extend.prompt_logprobs
        if wanted is None:
            return None
        request = self._logprob_request(wanted.spec)
        assert request is not None
        rows, targets, of_request = host_pack.send((wanted.rows, wanted.targets, wanted.request), self.device)
        vocab_size = self.plan.model.vocab_size
        packed = prompt_logprobs(hidden[rows], self.model.logits, targets, of_request, request, vocab_size)
        return PendingLogprobs(self._to_host(packed), request)

    def _sample(
        self,
        step: StepInput,
        logits: torch.Tensor,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt: PendingLogprobs | None = None,
    ) -> StepResult:
        mask = None
        if step.vocab_mask is not None:
            (mask,) = host_pack.send((step.vocab_mask,), self.device)
        request = self._logprob_request(step.logprobs)
        sampling = self.sampling_table.view(step.sampled_slots, slots)
        out = self.sampler(logits, sampling, seq_lens[: len(slots)], mask, request, self.next_token)
        tokens = self._to_host(out.next_token_ids)
        pending = None
        if request is not None:
            assert out.logprobs is not None
            pending = PendingLogprobs(self._to_host(out.logprobs), request)
        ready = None
        if self.device == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return StepResult(tokens, ready, pending, prompt)

    def _logprob_request(self, spec: LogprobSpec | None) -> LogprobRequest | None:
        if spec is None:
            return None
        return LogprobRequest.build(spec.wanted, spec.top_nums, spec.token_ids, self.device)

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, complete once the step's event has passed."""
        if self.device == "cpu":
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return host.copy_(x, non_blocking=True)
