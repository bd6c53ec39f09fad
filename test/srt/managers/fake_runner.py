"""A model runner without a model: its "KV cache" stores token ids, and the next token is a function of what it reads
back through the request table. A wrong slot, a lost token, a stale table entry or a page handed out too early therefore
changes the output, and the expected output needs no scheduler to compute.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from sglang.srt.model_executor.step import PromptLaunches, StepInput
from sglang.srt.plan.decode_interval import NEVER, IntervalRule
from sglang.srt.plan.pool_sizes import PoolSizes, WindowSize
from sglang.srt.sampling.sampling_params import NO_TOKEN, SamplingParams
from srt.sampling.packed_logprobs import unpacked

VOCAB = 97
EOS = 0


def next_token(tokens: np.ndarray) -> int:
    """Deterministic, depends on every token, and is EOS now and then."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % VOCAB


def expected_output(prompt: list[int], max_new_tokens: int, ignore_eos: bool = False) -> list[int]:
    tokens, out = list(prompt), []
    while len(out) < max_new_tokens:
        out.append(next_token(np.array(tokens)))
        tokens.append(out[-1])
        if out[-1] == EOS and not ignore_eos:
            break
    return out


@dataclass
class LateResult:
    """Tokens that may be read only after the step is over."""

    next_token_ids: torch.Tensor
    counts: torch.Tensor | None = None
    prompt_logprobs: None = None
    hidden: None = None
    draft_tokens: None = None

    def wait(self) -> None:
        pass


@dataclass
class FakeSamplingTable:
    live: set[int] = field(default_factory=set)

    def set(self, slot: int, *_: object) -> None:
        assert slot not in self.live, "a request slot was handed out twice"
        self.live.add(slot)

    def clear(self, slot: int) -> None:
        self.live.discard(slot)


class FakeRunner:
    tokens_per_step = 1
    lookahead_slots = 0
    next_tokens_read = 0
    media = None

    def __init__(
        self,
        pool: int,
        page: int,
        context: int,
        max_reqs: int,
        chunk: int,
        max_prefill: int = 4096,
        windows: tuple[WindowSize, ...] = (),
        checkpoints: int | None = None,
    ) -> None:
        """`checkpoints` None: the model has no states."""
        has_states = checkpoints is not None
        sizes = PoolSizes(pool // page * page, page, max_reqs, context, windows, has_states, checkpoints or 0)
        self.plan = SimpleNamespace(
            pool_sizes=sizes, page_size=page, context_len=context, caches_prefixes=checkpoints != 0, host_cache=None,
            adapters=None, chunked_prefill_size=chunk, max_prefill_tokens=max_prefill,
            model=SimpleNamespace(vocab_size=VOCAB, eos_token_ids=frozenset({EOS})),
        )  # fmt: skip
        self.launches = PromptLaunches()
        self.sampling_table = FakeSamplingTable()
        self.tables = np.zeros((1 + len(windows), max_reqs + 1, context), np.int64)
        self.table = self.tables[0]
        self.kv = np.full(pool + 2 * page, -1, np.int64)
        self.window_kv = [(size.window, np.full(size.tokens + page, -1, np.int64)) for size in windows]
        self.states = np.full(sizes.state_rows, 12345, np.int64) if has_states else None
        self.next_token = np.zeros(max_reqs + 1, np.int64)
        self.steps: list[str] = []
        self.not_numbers: Callable[[np.ndarray], bool] = lambda sequence: False
        """Whether a sequence's logits are NaN."""

    def begin(self, slot: int, tokens: object, position_delta: int) -> None:
        pass

    def decodes_in_graph(self, num_reqs: int) -> bool:
        return False

    def sample(self, forward: LateResult, vocab_mask: np.ndarray | None = None) -> LateResult:
        return forward

    def forward(self, step: StepInput) -> LateResult:
        if step.table_update is not None:
            self.tables.reshape(-1)[step.table_update.index] = step.table_update.value
            written = self.tables.reshape(-1)[step.table_update.index]
            assert (written == step.table_update.value).all(), "an entry is written twice, with other values"
            if self.states is not None:
                assert len(np.unique(step.table_update.state_targets)) == len(step.table_update.state_targets)
                self.states[step.table_update.state_targets] = self.states[step.table_update.state_sources]
        assert len(np.unique(step.out_cache_loc)) == len(step.out_cache_loc), "one cache slot for two tokens"
        assert len(np.unique(step.slots)) == len(step.slots)
        assert (step.out_cache_loc >= self.plan.page_size).all(), "the padding page was handed out"
        if step.prompts is None:
            self.steps.append("decode")
            ids, rows = self.next_token[step.slots], range(len(step.slots))
            self.table[step.slots, step.seq_lens - 1] = step.out_cache_loc
        else:
            decodes = step.num_decodes
            self.steps.append("mixed" if decodes else "extend")
            ids = np.concatenate((self.next_token[step.slots[:decodes]], step.prompts.input_ids))
            rows = step.prompts.sample_rows
            self.table[step.slots[:decodes], step.seq_lens[:decodes] - 1] = step.out_cache_loc[:decodes]
            assert (step.prompts.prefix_lens + step.prompts.extend_lens == step.seq_lens[decodes:]).all()
        self.kv[step.out_cache_loc] = ids
        self.read_and_write_windows(step, ids)
        if self.states is not None:
            self.advance_states(step, ids)
        tokens = []
        for row in rows:
            sequence = self.kv[self.table[step.slots[row], : step.seq_lens[row]]]
            assert (sequence >= 0).all(), "a cache slot was read before it was written"
            tokens.append(NO_TOKEN if self.not_numbers(sequence) else next_token(sequence))
            self.next_token[step.slots[row]] = max(tokens[-1], 0)
        return LateResult(torch.tensor(tokens, dtype=torch.int64)[:, None])

    def advance_states(self, step: StepInput, ids: np.ndarray) -> None:
        """A state is a checksum of all tokens so far; that of an empty prefix is 0, whatever lies in the row."""
        counts = np.ones(len(step.slots), np.int64)
        if step.prompts is not None:
            counts[step.num_decodes :] = step.prompts.extend_lens
        first = 0
        for slot, length, count in zip(step.slots, step.seq_lens, counts, strict=True):
            before = int(self.states[slot]) if length > count else 0
            self.states[slot] = zlib.crc32(ids[first : first + count].astype(np.int32).tobytes(), before)
            sequence = self.kv[self.table[slot, :length]].astype(np.int32)
            assert self.states[slot] == zlib.crc32(sequence.tobytes()), "a state of other tokens than the cache has"
            first += count

    def read_and_write_windows(self, step: StepInput, ids: np.ndarray) -> None:
        """What the first new token of each request sees is still there, and so is what the last one sees."""
        counts = np.ones(len(step.slots), np.int64)
        if step.prompts is not None:
            counts[step.num_decodes :] = step.prompts.extend_lens
        for (window, kv), table in zip(self.window_kv, self.tables[1:], strict=True):
            for final in (False, True):
                first = 0
                written = []
                for slot, length, count in zip(step.slots, step.seq_lens, counts, strict=True):
                    sequence = self.kv[self.table[slot, :length]]
                    start = length - count
                    seen = slice(max(0, length - window), length) if final else slice(max(0, start + 1 - window), start)
                    assert (kv[table[slot, seen]] == sequence[seen]).all(), "a window has lost what it still needs"
                    new = table[slot, start:length]
                    assert (new >= self.plan.page_size).all(), "a token without a slot in the window's table"
                    written.append(new)
                    if not final:
                        kv[new] = ids[first : first + count]
                    first += count
                slots = np.concatenate(written)
                assert len(np.unique(slots)) == len(slots), "one slot of a window for two tokens"


def make_scheduler(runner: FakeRunner, interval: IntervalRule = NEVER, **options: object) -> Scheduler:
    runner.plan.decode_interval = interval
    args = SimpleNamespace(
        weight_version="default",
        attn_dp_size=1,
        disable_radix_cache=False,
        disable_overlap_schedule=False,
        pp_size=1,
        schedule_policy="fcfs",
        schedule_conservativeness=1.0,
        stream_interval=1,
        decode_log_interval=40,
        speculative_algorithm=None,
        max_queued_requests=None,
        enable_priority_scheduling=False,
        schedule_low_priority_values_first=False,
        priority_scheduling_preemption_threshold=10,
        disable_priority_preemption=False,
        retraction_policy=None,
    )
    vars(args).update(options)
    args.steps_in_flight = 0 if args.disable_overlap_schedule else args.pp_size
    return Scheduler(args, runner, StopChecker(None))


def request(
    rid: str, prompt: list[int], max_new_tokens: int, stream: bool = False, **params: object
) -> TokenizedGenerateReq:
    sampling_params = SamplingParams(max_new_tokens=max_new_tokens, **params)
    return TokenizedGenerateReq(
        rid=rid, input_ids=np.array(prompt, np.int32), sampling_params=sampling_params, stream=stream
    )


@dataclass
class Collector:
    """What clients would have received."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, FinishReason] = field(default_factory=dict)
    hidden: dict[str, bytes] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    """Of each token: its own, then those of the likeliest and of the named ones."""
    input_logprobs: dict[str, list[float]] = field(default_factory=dict)
    """Of each token of the prompt but the first."""

    def take(self, scheduler: Scheduler) -> None:
        messages, scheduler.outbox = scheduler.outbox, []
        for message in messages:
            assert isinstance(message, BatchTokenIDOut)
            self.hidden.update(message.hidden)
            for rid, ids, finish in zip(message.rids, message.new_ids, message.finish, strict=True):
                assert rid not in self.finish, "a message after the last one"
                self.tokens.setdefault(rid, []).extend(ids)
                if finish is not None:
                    self.finish[rid] = finish
            for rid, out in zip(message.rids, message.logprobs, strict=True):
                if out is not None:
                    got = unpacked(out)
                    entries = zip_longest(got.output, got.top, got.named, fillvalue=())
                    values = [own for one, top, named in entries for own, _ in (one, *top, *named)]
                    self.logprobs.setdefault(rid, []).extend(values)
                    own = [value for value, _ in got.input if value is not None]
                    self.input_logprobs.setdefault(rid, []).extend(own)


def add(scheduler: Scheduler, msg: TokenizedGenerateReq) -> None:
    eos = frozenset() if msg.sampling_params.ignore_eos else frozenset({EOS})
    scheduler.add(msg, seed=1, stop_ids=eos | frozenset(msg.sampling_params.stop_token_ids))


def run_to_end(scheduler: Scheduler, collector: Collector, limit: int = 20_000) -> None:
    for _ in range(limit):
        scheduler.step()
        collector.take(scheduler)
        if scheduler.idle:
            return
    raise AssertionError("the scheduler does not come to rest")


def assert_clean(scheduler: Scheduler) -> None:
    """No request holds anything, and free + cached is the whole pool."""
    memory = scheduler.check_memory()
    assert memory["held"] == 0 and memory["free"] + memory["cached"] == memory["total"], memory
    assert scheduler.kv.num_free_rows() == scheduler.kv.sizes.max_requests
    assert scheduler.kv.tree.protected_size() == 0
    assert not scheduler.reqs and not scheduler.waiting
    scheduler.kv.check()
    if scheduler.kv.checkpoints is not None:
        checkpoints = memory["checkpoints"]
        assert checkpoints["free"] + checkpoints["cached"] == checkpoints["total"]
    for window in scheduler.kv.windows:
        assert window.usage()["held"] == 0 and window.available_size() == window.size
