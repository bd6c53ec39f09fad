"""The user's arguments: one dataclass, from which the command line, the config file and `Engine(...)` are derived.

A field that depends on the model or the GPU stays None here; the plan decides it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang.srt.arguments.adapters import AdapterArgs
from sglang.srt.arguments.groups import EFFECTIVE_IF_NONE, GROUPS, MEDIA, MEMORY, PARALLEL, SPECULATION
from sglang.srt.arguments.kernels import KernelArgs
from sglang.srt.arguments.model import ModelArgs
from sglang.srt.arguments.serving import LoggingArgs, ServingArgs
from sglang.srt.arguments.sleep import SleepArgs
from sglang.srt.cli_args import OptionTable, coerce_values, option, our_value, parse_argv, resolve_keywords
from sglang.srt.cli_parser import add_options, build_parser, destination
from sglang.srt.configs.adapters.arguments import written
from sglang.srt.configs.load_balance import BALANCE_METHODS, LOAD_METHODS, TOTAL_TOKENS
from sglang.srt.configs.merge_methods import MERGE_METHODS
from sglang.srt.configs.quantization import SPELLINGS
from sglang.srt.configs.speculative import ALGORITHMS, LONGEST_SUFFIX, MAX_DRAFT_TOKENS, NEXTN, UNQUANTIZED
from sglang.srt.configs.storage_backend import BACKENDS, OTHER_BACKENDS, PREFETCH_POLICIES
from sglang.srt.errors import Problems
from sglang.srt.flag_checks import contradictions

_DRAFT_QUANTIZATION = (*SPELLINGS, UNQUANTIZED)

SECRETS = ("api_key", "admin_api_key", "hicache_storage_backend_extra_config")
"""Fields whose value is never shown; the last one is a storage backend's configuration, which may hold passwords."""
_LOGIN = re.compile(r"//[^/\s]*@")
"""User and password in a URL."""


class _OrFlags(type):
    """Creates arguments also by other names of values, and from flags of SGLang that are no fields here, as trainers
    do: then all are checked."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        values = {name: our_value(name, each) if isinstance(each, str) else each for name, each in values.items()}
        if values.keys() <= {field.name for field in dataclasses.fields(cls)}:  # type: ignore[arg-type]
            return super().__call__(*args, **values)
        return cls.from_kwargs(**values)  # type: ignore[attr-defined]


@dataclass(kw_only=True)
class ServerArgs(LoggingArgs, SleepArgs, AdapterArgs, KernelArgs, ServingArgs, ModelArgs, metaclass=_OrFlags):
    """The server's options. Made by `from_cli` or `from_kwargs`, which check every value; call `check()` after changing
    one."""

    # --- parallelism
    tp_size: int = option(1, PARALLEL, "GPUs that share every layer.", "--tp", "--tensor-parallel-size", minimum=1)
    pp_size: int = option(
        1,
        PARALLEL,
        "Stages of --tp-size GPUs each, which have layers that follow one another.",
        "--pp",
        "--pipeline-parallel-size",
        minimum=1,
    )
    dp_size: int = option(
        1,
        PARALLEL,
        "Replicas behind one address, each with its own --tp-size times --pp-size GPUs.",
        "--dp",
        "--data-parallel-size",
        minimum=1,
    )
    load_balance_method: str = option(
        "auto",
        PARALLEL,
        "Which replica a request goes to. auto: the one that has the longest prefix of it, unless it has too much to "
        "do; prefix_affinity: that of the client's session (header x-session-id), unless it has too much to do; "
        "total_tokens: the one with the fewest tokens in flight; total_requests: with the fewest requests.",
        choices=BALANCE_METHODS,
    )
    prefix_affinity_fallback: str = option(
        TOTAL_TOKENS,
        PARALLEL,
        "With --load-balance-method prefix_affinity: how new sessions, and those whose replica has too much to do or "
        "has ended, get one.",
        choices=LOAD_METHODS,
    )
    base_gpu_id: int = option(0, PARALLEL, "Index of the first GPU; the others follow it.", minimum=0)
    ep_size: int = option(
        1,
        PARALLEL,
        "Groups of the --tp-size GPUs that have whole experts each; 1: every GPU has a share of every expert.",
        "--ep",
        "--expert-parallel-size",
        minimum=1,
    )
    dcp_size: int = option(
        1,
        PARALLEL,
        "Ranks of --tp-size that share out the tokens of latents, or of a KV head that all of them would hold.",
        "--decode-context-parallel-size",
        minimum=1,
    )
    enable_dp_attention: bool = option(
        False,
        PARALLEL,
        "Groups of the --tp-size GPUs have requests, attention and caches of their own; --attn-dp-size says how many. "
        "Without it --dp-size does, and otherwise every GPU is one.",
    )
    attn_dp_size: int = option(
        1,
        PARALLEL,
        "Groups of the --tp-size GPUs that have requests, attention and caches of their own.",
        "--attention-data-parallel-size",
        minimum=1,
    )
    enable_dp_lm_head: bool = option(
        False, PARALLEL, "Each of these groups holds the whole vocabulary, so that no logits leave it."
    )
    dcp_comm_backend: str = option(
        "a2a",
        PARALLEL,
        "How these ranks merge what each attends to. a2a: one exchange of parts and sums; ag_rs: a gather of the sums "
        "and a reduce-scatter of the weighted parts.",
        choices=MERGE_METHODS,
    )
    disable_custom_all_reduce: bool = option(False, PARALLEL, "Let the GPUs exchange data through NCCL alone.")
    enable_flashinfer_allreduce_fusion: bool = option(
        False, PARALLEL, "Add up, where a norm follows, with FlashInfer's kernel, if it is installed and can."
    )
    enable_quantized_all_reduce: str = option(
        "off",
        PARALLEL,
        "Send large sums of hidden states between the GPUs as FP8 (e4m3, a scale for each 32 values), which changes "
        "results: prefill: those of steps with more tokens than a step that only decodes can have; all: of any step.",
        choices=("off", "prefill", "all"),
    )
    quantized_all_reduce_min_bytes: int | None = option(
        None, PARALLEL, f"Least bytes of a sum that is sent so. {EFFECTIVE_IF_NONE}", minimum=0, size=True
    )
    enable_two_batch_overlap: bool = option(
        False,
        PARALLEL,
        "Compute steps with many prompt tokens as two microbatches, whose sums over the GPUs travel while the "
        "other computes; without the flag where that is predicted to be faster.",
    )
    disable_two_batch_overlap: bool = option(False, PARALLEL, "Compute every step as one, wherever it runs.")
    two_batch_overlap_min_tokens: int | None = option(
        None,
        PARALLEL,
        f"Least tokens of a step that runs as two microbatches. {EFFECTIVE_IF_NONE}",
        minimum=2,
        size=True,
    )
    use_ray: bool = option(
        False,
        PARALLEL,
        "Start the ranks on the nodes of a Ray cluster that is there (RAY_ADDRESS, or the one that this machine is "
        "in): each replica, or each of its --nnodes machines, on one node.",
    )
    nnodes: int = option(1, PARALLEL, "Machines that the ranks of this server run on.", minimum=1)
    node_rank: int = option(0, PARALLEL, "Index of this machine. Machine 0 answers clients.", minimum=0)
    dist_init_addr: str | None = option(
        None, PARALLEL, "HOST:PORT of machine 0, at which the ranks of several machines meet.", "--nccl-init-addr"
    )
    dist_timeout: float = option(
        45.0, PARALLEL, "Seconds that the machines wait for one another when they start, with --nnodes.", minimum=1
    )

    # --- memory and scheduling
    mem_fraction_static: float | None = option(
        None, MEMORY, f"Share of GPU memory for weights and KV cache, above 0 and below 1. {EFFECTIVE_IF_NONE}"
    )
    max_running_requests: int | None = option(None, MEMORY, f"Requests in one batch. {EFFECTIVE_IF_NONE}", minimum=1)
    max_queued_requests: int | None = option(
        None, MEMORY, "Waiting requests beyond which new ones get a 503.", minimum=1
    )
    max_total_tokens: int | None = option(
        None, MEMORY, f"Tokens in the KV cache. {EFFECTIVE_IF_NONE}", minimum=1, size=True
    )
    chunked_prefill_size: int | None = option(
        None,
        MEMORY,
        f"Prompt tokens computed in one step; -1: whole prompts. {EFFECTIVE_IF_NONE}",
        minimum=-1,
        size=True,
    )
    page_size: int | None = option(None, MEMORY, f"Tokens in a KV cache page. {EFFECTIVE_IF_NONE}", minimum=1)
    max_prefill_tokens: int = option(16384, MEMORY, "Prompt tokens of all requests in one step.", minimum=1, size=True)
    prefill_decode_interval: int | None = option(
        None,
        MEMORY,
        "Steps without prompts that follow each step with prompts, while requests decode; 0: prompts never wait. "
        "If not given, 3 while 128 requests and more run, of models without experts.",
        minimum=0,
    )
    prefill_decode_interval_min_bs: int = option(
        1, MEMORY, "Running requests from which on a given --prefill-decode-interval applies.", minimum=1
    )
    schedule_policy: str = option(
        "fcfs", MEMORY, "Order of waiting requests.", choices=("fcfs", "lpm", "random", "dfs-weight", "lof")
    )
    schedule_conservativeness: float = option(
        1.0, MEMORY, "Above 1 admits fewer requests and retracts less often.", minimum=0
    )
    enable_priority_scheduling: bool = option(
        False, MEMORY, "Requests with a higher priority go first, and in the place of running ones with a lower one."
    )
    schedule_low_priority_values_first: bool = option(False, MEMORY, "Lower numbers are the higher priorities.")
    priority_scheduling_preemption_threshold: int = option(
        10, MEMORY, "A waiting request takes the place of a running one if their priorities differ by more.", minimum=0
    )
    disable_priority_preemption: bool = option(False, MEMORY, "Priorities order the queue only.")
    default_priority_value: int = option(0, MEMORY, "Priority of requests that give none.")
    retraction_policy: str | None = option(
        None,
        MEMORY,
        "Who goes back to the queue when memory runs out: who has the shortest output, or of the lowest priority the "
        "one with it (the default with --enable-priority-scheduling).",
        choices=("length", "priority"),
    )
    abort_on_priority_when_disabled: bool = option(
        False, MEMORY, "Refuse requests with a priority unless --enable-priority-scheduling."
    )
    stream_interval: int = option(1, MEMORY, "Tokens between two messages of a stream.", minimum=1)
    disable_radix_cache: bool = option(False, MEMORY, "Do not reuse the KV cache of common prefixes.")
    enable_hierarchical_cache: bool = option(
        False,
        MEMORY,
        "Keep cached prefixes in main memory, too, and load them from there. The default on GPUs with a memory of their"
        " own, where 32 GiB are free and it pays by predicted times; the flag takes more memory and says what is"
        " missing.",
        "--enable-hicache",
    )
    disable_hierarchical_cache: bool = option(
        False, MEMORY, "Keep cached prefixes in GPU memory only.", "--disable-hicache"
    )
    hicache_ratio: float | None = option(
        None, MEMORY, "Size of the cache in main memory over the GPU's. None: 2, or what fits.", minimum=0
    )
    hicache_size: float = option(
        0.0, MEMORY, "Size of the cache in main memory of each GPU, in GB, in place of --hicache-ratio.", minimum=0
    )
    hicache_host_memory_fraction: float = option(
        0.8,
        MEMORY,
        "Share of free main memory for this cache, of all GPUs together, where no size is given.",
        minimum=0,
        maximum=1,
    )
    hicache_write_policy: str = option(
        "write_through_selective",
        MEMORY,
        "When prefixes are copied to main memory: as soon as they are computed, when a second request uses them, or"
        " when the GPU evicts them, for which a step waits.",
        choices=("write_through", "write_through_selective", "write_back"),
    )
    hicache_storage_backend: str | None = option(
        None,
        MEMORY,
        "Keep prefixes of main memory in files, too (nixl: moved by NIXL), in Mooncake's or LMCache's store, or in one "
        "that a Python class reaches.",
        choices=BACKENDS,
        explained=OTHER_BACKENDS,
    )
    hicache_storage_prefetch_policy: str = option(
        "timeout",
        MEMORY,
        "How long a request waits for prefixes from there: until it could be computed, to the end, or for a time.",
        choices=PREFETCH_POLICIES,
    )
    hicache_storage_backend_extra_config: str | None = option(
        None, MEMORY, "Settings of the store and of look-ups: JSON, or @ and the path of a JSON, YAML or TOML file."
    )
    disable_overlap_schedule: bool = option(False, MEMORY, "Wait for a step's results before preparing the next.")

    # --- speculative decoding
    speculative_algorithm: str | None = option(
        None,
        SPECULATION,
        "Who drafts the tokens that a step verifies: earlier tokens (NGRAM), a small model (STANDALONE), a head "
        "(EAGLE, EAGLE3), the model's own layers for it (NEXTN), a draft of blocks (DFLASH, DSPARK). Answers are the "
        "same, token for token.",
        choices=(*ALGORITHMS, NEXTN),
    )
    speculative_draft_model_path: str | None = option(
        None, SPECULATION, "Directory, GGUF file or Hugging Face id of the draft.", "--speculative-draft-model"
    )
    speculative_draft_model_revision: str | None = option(None, SPECULATION, "Branch, tag or commit of the draft.")
    speculative_draft_load_format: str | None = option(
        None,
        SPECULATION,
        "As --load-format, for the draft; as the model's if not given.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    speculative_draft_model_quantization: str | None = option(
        None,
        SPECULATION,
        "Quantization of the draft; as its checkpoint says, tensor by tensor, if not given. unquant: 16 bits.",
        choices=_DRAFT_QUANTIZATION,
        metavar="FORMAT",
    )
    speculative_num_steps: int | None = option(
        None,
        SPECULATION,
        "Draft tokens of each request in a step; chosen by load and acceptance if not given.",
        minimum=1,
        maximum=MAX_DRAFT_TOKENS - 1,
    )
    speculative_eagle_topk: int | None = option(
        None, SPECULATION, "Branches of a tree of draft tokens; a chain of its depth is verified.", minimum=1
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        SPECULATION,
        "Tokens of each request in a step: its draft tokens and the token sampled last.",
        minimum=2,
        maximum=MAX_DRAFT_TOKENS,
    )
    speculative_dflash_block_size: int | None = option(
        None,
        SPECULATION,
        "For DFLASH, another name of that; as the draft was trained if not given.",
        minimum=2,
        maximum=MAX_DRAFT_TOKENS,
    )
    speculative_dspark_block_size: int | None = option(
        None,
        SPECULATION,
        "For DSPARK, draft tokens of each request in a step; as the draft was trained if not given.",
        minimum=1,
        maximum=MAX_DRAFT_TOKENS - 1,
    )
    speculative_adaptive: bool = option(
        False, SPECULATION, "Choose by load and acceptance among no draft tokens and those that the flags allow."
    )
    speculative_adaptive_config: str | None = option(
        None, SPECULATION, "JSON file of how that is chosen; see speculative_decoding.md.", metavar="FILE"
    )
    speculative_ngram_max_trie_depth: int = option(
        LONGEST_SUFFIX, SPECULATION, "Of the last tokens NGRAM compares at most so many.", minimum=1, maximum=64
    )
    speculative_ngram_external_corpus_path: str | None = option(
        None, SPECULATION, "Texts in which NGRAM looks, too: a text file, or JSON lines.", metavar="FILE"
    )
    speculative_ngram_external_corpus_max_tokens: int = option(
        10_000_000, SPECULATION, "Tokens of all such texts together.", minimum=1, size=True
    )

    # --- images and video
    language_model_only: bool = option(
        False,
        MEDIA,
        "Leave out the tower of a model that sees: its memory goes to the KV cache, and images are refused.",
        "--disable-multimodal",
    )
    mm_enable_dp_encoder: bool = option(
        False,
        MEDIA,
        "The ranks of --tp-size share out the images and frames of an encoder step, not the encoder's heads.",
    )
    limit_mm_data_per_request: str = option(
        '{"image": 16, "video": 2}',
        MEDIA,
        "JSON object of how many images and videos a prompt may have; a kind that it leaves out keeps its default.",
        json=True,
        metavar="JSON",
    )
    mm_process_config: str = option(
        "{}",
        MEDIA,
        'JSON object of settings of the model\'s processors, by kind: {"image": {"max_pixels": 1048576}}.',
        json=True,
        metavar="JSON",
    )
    mm_processor_worker_num: int = option(2, MEDIA, "Processes that decode images and videos.", minimum=1, maximum=256)
    mm_io_worker_num: int = option(8, MEDIA, "Images and videos that are fetched at once.", minimum=1, maximum=256)
    mm_max_concurrent_calls: int = option(
        64, MEDIA, "Images and videos under way at once; more are refused with a 503.", minimum=1
    )
    mm_per_request_timeout: float = option(
        30.0, MEDIA, "Seconds that an image or a video may take to be fetched, and again to be decoded.", minimum=0.1
    )
    media_url_max_file_size_mb: int = option(
        32, MEDIA, "Largest file of an image or a video in megabytes, wherever it comes from.", minimum=1, maximum=1024
    )
    allowed_media_domains: list[str] | None = option(
        None, MEDIA, "Hosts of which URLs are fetched, with those below them; all if not given."
    )
    allow_private_media_urls: bool = option(
        False, MEDIA, "Fetch URLs at private, loopback and link-local addresses, too."
    )
    allowed_local_media_path: str | None = option(
        None, MEDIA, "Directory of which `file://` URLs are read; none are if not given.", metavar="DIRECTORY"
    )

    @property
    def steps_in_flight(self) -> int:
        """Most steps that are launched before the results of the first of them are read back."""
        return 0 if self.disable_overlap_schedule else self.pp_size

    def __post_init__(self) -> None:
        if self.tokenizer_path is None:
            self.tokenizer_path = self.model_path
        if self.served_model_name is None:
            self.served_model_name = self.model_path
        if self.enable_dp_attention and self.attn_dp_size == 1:
            if self.dp_size > 1:  # --dp-size named the groups before --attn-dp-size did
                self.attn_dp_size, self.dp_size = self.dp_size, 1
            else:
                self.attn_dp_size = self.tp_size
        self.enable_dp_attention = self.attn_dp_size > 1
        if self.enable_dp_attention and self.speculative_algorithm is not None:
            self.enable_dp_lm_head = True  # a group drafts without the others
        if self.lora_paths:
            self.enable_lora = True
        if self.random_seed is None:
            self.random_seed = random.SystemRandom().randrange(1 << 30)

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, prog: str = "python -m sglang.launch_server") -> ServerArgs:
        """Parses command-line words (`sys.argv[1:]` if None). Raises UserError with all problems; `--help` prints and
        exits."""
        words, problems = sys.argv[1:] if argv is None else argv, Problems()
        if {"-h", "--help"}.intersection(words):
            build_parser(TABLE, prog).parse_args(["--help"])
        return cls._checked(parse_argv(TABLE, words, problems), problems)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the options to the parser of a program that has others beside them; `from_cli_args` reads the result."""
        add_options(TABLE, parser)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """Reads what a parser with the options of `add_cli_args` has parsed. Raises UserError with all problems."""
        given = {name: destination(TABLE, name) for name in TABLE.fields}
        return cls.from_kwargs(**{name: getattr(args, dest) for name, dest in given.items() if hasattr(args, dest)})

    @classmethod
    def from_kwargs(cls, **values: Any) -> ServerArgs:
        """Reads keyword arguments named as the flags, for `Engine`. Raises UserError with all problems."""
        problems = Problems()
        if "lora_paths" in values:
            values["lora_paths"] = written(values["lora_paths"])
        return cls._checked(resolve_keywords(TABLE, values, problems), problems)

    @classmethod
    def _checked(cls, values: dict[str, Any], problems: Problems) -> ServerArgs:
        if not values.get("model_path") and "model_path" not in problems.fields:
            problems.add("--model-path is required: a local directory or a Hugging Face id.")
        args = cls(**{"model_path": "", **values})
        _find_problems(args, problems)
        problems.raise_if_any()
        return args

    def check(self) -> None:
        """Raises UserError if a value is out of range or values contradict each other."""
        problems = Problems()
        coerce_values(TABLE, asdict(self), problems)
        _find_problems(self, problems)
        problems.raise_if_any()

    def model_overrides(self) -> dict[str, Any]:
        """Returns `json_model_override_args`, parsed."""
        result: dict[str, Any] = json.loads(self.json_model_override_args)
        return result

    def default_template_variables(self) -> dict[str, Any]:
        """Returns `default_chat_template_kwargs`, parsed."""
        result: dict[str, Any] = json.loads(self.default_chat_template_kwargs)
        return result

    def url(self) -> str:
        """Returns the URL at which this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
            self.host, f"[{self.host}]" if ":" in self.host else self.host
        )
        return f"http://{host}:{self.port}"

    def public_dict(self) -> dict[str, Any]:
        """Returns all fields for /server_info, with keys and passwords hidden."""
        fields = asdict(self)
        hidden = {name: "set" for name in SECRETS if fields[name] is not None}
        shown = {name: _LOGIN.sub("//...@", text) for name, text in fields.items() if isinstance(text, str)}
        return fields | shown | hidden


TABLE = OptionTable(ServerArgs, GROUPS)


def _find_problems(args: ServerArgs, problems: Problems) -> None:
    """Adds values that contradict each other to `problems`, except for fields that already have one."""
    for fields, text in contradictions(args):
        if not problems.fields & fields:
            problems.add(text, *fields)
