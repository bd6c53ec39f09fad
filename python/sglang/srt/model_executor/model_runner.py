"""Runs steps on one rank's device: owns the weights, the cache pools, the request tables and the graphs."""

from __future__ import annotations

import logging

import numpy as np
import torch

from sglang.srt.environ import envs
from sglang.srt.kernels.coverage import check_launches
from sglang.srt.layers.attention.attention_registry import create_attention_backend
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.extend_graph_runner import ExtendGraphRunner
from sglang.srt.model_executor.step import ExtendInput, StepInput, StepResult, extend_arrays
from sglang.srt.model_loader.loader import load_model
from sglang.srt.plan.defaults import mixed_decode_sizes
from sglang.srt.plan.plan import Plan
from sglang.srt.sampling.logprobs import LogprobResult, prompt_logprobs
from sglang.srt.sampling.sampling_table import SamplingTable
from sglang.srt.utils.device_arrays import DeviceArrays, send, to_device

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
        self.sampling_table = SamplingTable(plan.max_running_requests + 1, plan.model.vocab_size, plan.device)
        self.sampler = Sampler(use_triton=plan.device == "cuda")
        attn_backend = create_attention_backend(plan)
        self.state = DeviceState(self.model, attn_backend, len(self.pools.tables), plan.pool_sizes, plan.device)
        self.sampler.warm_up(self.sampling_table, self.state.next_token)
        self.graphs: CudaGraphRunner | None = None
        self.extend_graphs: ExtendGraphRunner | None = None
        if plan.cuda_graph_bs:
            with torch.inference_mode():
                self.graphs = CudaGraphRunner(self.state, plan.cuda_graph_bs)
                if plan.cuda_graph_prefill_tokens:
                    decodes = mixed_decode_sizes(plan.cuda_graph_bs)
                    self.extend_graphs = ExtendGraphRunner(self.state, plan.cuda_graph_prefill_tokens, decodes)
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
            update = send(self.device, index=step.table_update.index, value=step.table_update.value)
            self.state.req_to_token.view(-1)[update["index"]] = update["value"]
        if step.extend is not None:
            return self._run_extend(step)
        if self.graphs is not None and self.graphs.fits(len(step.slots)):
            logits = self.graphs.replay(step)
            inputs = self.graphs.inputs
            return self._sample(step, logits, inputs["slots"][: len(step.slots)], inputs["seq_lens"])
        sent = send(
            self.device, slots=step.slots, seq_lens=step.seq_lens, out_cache_loc=step.out_cache_loc.astype(np.int64)
        )
        batch = self.state.decode_batch(sent["slots"], sent["seq_lens"], sent["out_cache_loc"])
        batch.seq_lens_cpu = step.seq_lens.tolist()
        self.state.attn_backend.init_forward_metadata(batch)
        return self._sample(step, self.model.logits(self.model(batch)), sent["slots"], sent["seq_lens"])

    def _run_extend(self, step: StepInput) -> StepResult:
        if self.extend_graphs is not None and self.extend_graphs.fits(step):
            hidden, logits = self.extend_graphs.replay(step)
            inputs = self.extend_graphs.inputs
            slots, lens = inputs["sampled_slots"][: len(logits)], inputs["sampled_lens"]
            return self._sample(step, logits, slots, lens, self._prompt_logprobs(step, hidden))
        sent = send(self.device, **extend_arrays(step))
        batch = self._extend_batch(step, sent)
        hidden = self.model(batch)
        pending = self._prompt_logprobs(step, hidden)
        logits = self.model.logits(hidden[sent["last_rows"]])
        return self._sample(step, logits, sent["sampled_slots"], sent["sampled_lens"], pending)

    def _extend_batch(self, step: StepInput, sent: DeviceArrays) -> ForwardBatch:
        extend = step.extend
        assert extend is not None
        count, ids, decodes = extend.num_decodes, sent["input_ids"], None
        if count:
            decodes = self.state.decode_batch(sent["decode_slots"], sent["decode_lens"], sent["decode_loc"])
            decodes.seq_lens_cpu = step.seq_lens[:count].tolist()
            self.state.attn_backend.init_forward_metadata(decodes)
            ids = torch.cat((decodes.input_ids, ids))
        lens, prefix_lens = extend.extend_lens.tolist(), extend.prefix_lens.tolist()
        batch = self.state.extend_batch(sent, ids, decodes, lens, prefix_lens)
        batch.seq_lens_cpu = step.seq_lens[count:].tolist()
        self.state.attn_backend.init_forward_metadata(batch)
        return batch

    def _prompt_logprobs(self, step: StepInput, hidden: torch.Tensor) -> LogprobResult | None:
        assert step.extend is not None
        request = step.extend.prompt_logprobs
        if request is None:
            return None
        packed = prompt_logprobs(hidden, self.model.logits, request, self.plan.model.vocab_size)
        return LogprobResult(self._to_host(packed), request)

    def _sample(
        self,
        step: StepInput,
        logits: torch.Tensor,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt: LogprobResult | None = None,
    ) -> StepResult:
        mask = None if step.vocab_mask is None else to_device(step.vocab_mask, self.device)
        sampling = self.sampling_table.view(step.sampled_slots, slots)
        out = self.sampler(logits, sampling, seq_lens[: len(slots)], mask, step.logprobs, self.state.next_token)
        tokens = self._to_host(out.next_token_ids)
        logprobs = None
        if step.logprobs is not None:
            assert out.logprobs is not None
            logprobs = LogprobResult(self._to_host(out.logprobs), step.logprobs)
        ready = None
        if self.device == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return StepResult(tokens, ready, logprobs, prompt)

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, complete once the step's event has passed."""
        if self.device == "cpu":
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return host.copy_(x, non_blocking=True)
