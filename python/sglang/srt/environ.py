"""The environment variables that we read, typed. A value that does not parse is an error, never a silent default.

    from sglang.srt.environ import envs
    if envs.SGLANG_FORCE_ARCH is not None: ...

Values are read at access, so that a test can set one with `monkeypatch.setenv`.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar, overload

from sglang.srt.errors import UserError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parse_bool(text: str) -> bool:
    try:
        return _BOOLEANS[text.strip().lower()]
    except KeyError:
        raise ValueError("expected a boolean such as 1, 0, true or false") from None


def _parse_positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("expected a positive number")
    return value


def _parse_timeout(text: str) -> float:
    value = float(text)
    if value != value:
        raise ValueError("expected a number of seconds, or -1 for no limit")
    return value


def _parse_directory(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir():
        raise ValueError("no such directory")
    return path


class EnvVar(Generic[T]):
    """Descriptor: the attribute's name is the variable's name, reading the attribute reads the environment."""

    def __init__(self, parse: Callable[[str], T], default: T, description: str) -> None:
        self.parse = parse
        self.default = default
        self.description = description
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> EnvVar[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> EnvVar[T] | T:
        if instance is None:
            return self
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise UserError(f"Environment variable {self.name}={text!r}: {error}. {self.description}") from None


def _parse_accept_length(text: str) -> float:
    length = float(text)
    if length and not 1 <= length <= 64:
        raise ValueError("a step gives 1 to 64 tokens; 0: as many as are right")
    return length


_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`200G`, `64Gi`, `1.5T` or a plain number of bytes. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    units = _SIZE_UNITS | _BINARY_UNITS
    if match is None or match[2].lower() not in units:
        raise ValueError("expected a size in bytes such as 200G or 64Gi")
    return int(float(match[1]) * units[match[2].lower()])


def _parse_one_directory(text: str) -> Path:
    if "," in text:
        raise ValueError("entries are kept in one directory")
    return Path(text).expanduser()


def _parse_share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError("expected a number above 0 and at most 1")
    return value


class Environment:
    """Every variable of ours. One that is set but empty counts as unset."""

    SGLANG_FORCE_ARCH: EnvVar[str | None] = EnvVar(
        str, None, "Make every kernel choice as for this GPU, for example sm_120."
    )
    SGLANG_MOE_CONFIG_DIR: EnvVar[Path | None] = EnvVar(
        _parse_directory, None, "Directory whose `configs/` holds MoE tuning files, searched before our own."
    )
    SGLANG_CACHE_DIR: EnvVar[Path] = EnvVar(
        lambda text: Path(text).expanduser(),
        Path("~/.cache/sm120-sglang").expanduser(),
        "Where compiled kernel records, facts about classes of transformers, and configs and tokenizers of GGUF files"
        " are cached.",
    )
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN: EnvVar[bool] = EnvVar(
        _parse_bool, False, "Let --context-length exceed what the model's configuration supports."
    )
    SGLANG_TORCH_PROFILER_DIR: EnvVar[Path] = EnvVar(
        lambda text: Path(text).expanduser(), Path("/tmp"), "Where /start_profile writes its traces."
    )
    SGLANG_REQ_WAITING_TIMEOUT: EnvVar[float] = EnvVar(
        _parse_timeout, -1.0, "Seconds after which a request that still waits is ended with status 503; -1: no limit."
    )
    SGLANG_REQ_RUNNING_TIMEOUT: EnvVar[float] = EnvVar(
        _parse_timeout, -1.0, "Seconds after its first step after which a request is ended with an error; -1: no limit."
    )
    SGLANG_DIST_SECRET: EnvVar[str] = EnvVar(
        str, "", "Secret of all machines of a server (--nnodes): what the first one tells the others is signed with it."
    )
    SGLANG_DRAIN_TIMEOUT: EnvVar[float] = EnvVar(
        _parse_positive_float, 60.0, "Seconds that running requests get to finish after SIGTERM."
    )
    SGLANG_END_TIMEOUT: EnvVar[float] = EnvVar(
        _parse_positive_float,
        4.5,
        "Seconds from the end of the drain until a server that has not ended by then is ended by force.",
    )
    SGLANG_GRAMMAR_WARM_UP: EnvVar[bool] = EnvVar(
        _parse_bool, True, "Load what compiles grammars while the server starts, not with the first grammar."
    )
    SGLANG_SM120_TRITON_FLASHMLA: EnvVar[bool] = EnvVar(
        _parse_bool,
        True,
        "0: the torch reference attends to what an indexer selects, and makes DeepSeek-V4's entries, to compare; slow.",
    )
    SGLANG_SM120_MQA_FALLBACK: EnvVar[bool] = EnvVar(
        _parse_bool, False, "1: the torch reference scores and selects for an indexer, to compare; slow."
    )
    SGLANG_OPT_USE_TILELANG_MHC_PRE: EnvVar[bool] = EnvVar(
        _parse_bool, True, "0: the torch reference computes hyper-connections, to compare; slow."
    )
    SGLANG_OPT_USE_TILELANG_MHC_POST: EnvVar[bool] = EnvVar(
        _parse_bool, True, "As SGLANG_OPT_USE_TILELANG_MHC_PRE, because one kernel mixes before and after a block."
    )
    SGLANG_SSE_KEEP_ALIVE: EnvVar[float] = EnvVar(
        _parse_positive_float, 15.0, "Seconds of silence after which a stream gets a comment that keeps it open."
    )
    SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR: EnvVar[Path] = EnvVar(
        lambda text: Path(text).expanduser(),
        Path(tempfile.gettempdir()) / "hicache",
        "Directory of --hicache-storage-backend file.",
    )
    SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE: EnvVar[int | None] = EnvVar(
        parse_bytes, None, "Most bytes of all files there, as 200G or 64Gi; 0: no limit, which is the default."
    )
    SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE: EnvVar[int | None] = EnvVar(
        parse_bytes, None, "Bytes that stay free on its file system; by default 10Gi, or a tenth if that is less."
    )
    SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO: EnvVar[float] = EnvVar(
        _parse_share, 0.9, "Share of the most bytes that an eviction leaves."
    )
    SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR: EnvVar[Path] = EnvVar(
        _parse_one_directory,
        Path(tempfile.gettempdir()) / "hicache_storage",
        "Directory of --hicache-storage-backend nixl.",
    )
    SGLANG_HICACHE_NIXL_BACKEND_PLUGIN: EnvVar[str] = EnvVar(
        str, "auto", "Plugin of --hicache-storage-backend nixl: POSIX, which auto is, too."
    )
    MOONCAKE_MASTER: EnvVar[str] = EnvVar(str, "", "Master of --hicache-storage-backend mooncake, as HOST:50051.")
    MOONCAKE_TE_META_DATA_SERVER: EnvVar[str] = EnvVar(
        str, "P2PHANDSHAKE", "Its metadata server, as http://HOST:8080/metadata; by default clients ask each other."
    )
    MOONCAKE_LOCAL_HOSTNAME: EnvVar[str] = EnvVar(
        str, "localhost", "Name or address under which its other clients reach this machine."
    )
    MOONCAKE_PROTOCOL: EnvVar[str] = EnvVar(str, "tcp", "How its entries travel: tcp or rdma.")
    MOONCAKE_DEVICE: EnvVar[str] = EnvVar(str, "", "Its RDMA devices, separated by commas.")
    MOONCAKE_GLOBAL_SEGMENT_SIZE: EnvVar[int | None] = EnvVar(
        parse_bytes, 4 * 10**9, "Main memory that each rank gives to it, as 4gb; 0: others give it."
    )
    MOONCAKE_LOCAL_BUFFER_SIZE: EnvVar[int | None] = EnvVar(
        parse_bytes, 512 << 20, "Main memory of each rank through which its entries go; it must hold the largest ones."
    )
    SGLANG_SIMULATE_ACC_LEN: EnvVar[float] = EnvVar(
        _parse_accept_length,
        0.0,
        "Tokens of a request that every verified step accepts, right or wrong: for measurements only.",
    )


envs = Environment()

KNOWN: frozenset[str] = frozenset(name for name, value in vars(Environment).items() if isinstance(value, EnvVar))

IGNORED: Mapping[str, str] = {
    "SGLANG_HICACHE_NIXL_USE_DIRECT_IO": "entries go through the system's cache of files",
    "SGLANG_DISABLE_CUDNN_CHECK": "there is no cuDNN version check to disable",
    "SGLANG_ENABLE_SPEC_V2": "there are no versions of speculative decoding to choose from",
    "SGLANG_ENABLE_PP_SPEC": "drafts work with the stages of a pipeline without it",
    "SGLANG_SPEC_TP_SYNC": "ranks draw the same tokens of the same noise",
    "SGLANG_NGRAM_FORCE_GREEDY_VERIFY": "draft tokens are verified against what the request samples",
    "SGLANG_RAGGED_VERIFY_MODE": "--speculative-adaptive chooses how many draft tokens are verified",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "DeepGEMM is not used",
    "SGLANG_ENABLE_DEEP_GEMM": "DeepGEMM is not used",
    "SGLANG_DISABLE_DEEP_GEMM": "DeepGEMM is not used",
    "SGLANG_SET_CPU_AFFINITY": "the operating system places the processes",
}
"""Variables that existing guides set and that have nothing to switch here, with the reason."""

_already_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Logs a warning the first time that this process produces it."""
    if message not in _already_warned:
        _already_warned.add(message)
        logger.warning(message)


def adopt_environment() -> None:
    """Takes over the older `SGL_*` spelling of variables that we know, and says once which ones have no effect.

    Called by entry points before anything reads `envs`; the environment is inherited by the processes started later.
    A variable that is set in both spellings keeps its new one.
    """
    for name in sorted(os.environ):
        if not name.startswith(("SGL_", "SGLANG_")) or name in KNOWN:
            continue
        new_name = "SGLANG_" + name.removeprefix("SGL_") if name.startswith("SGL_") else name
        if new_name in KNOWN:
            os.environ.setdefault(new_name, os.environ[name])
            warn_once(f"Environment variable {name} is the older spelling of {new_name}; please use the latter.")
        else:
            reason = IGNORED.get(new_name, "no variable of that name is read")
            warn_once(f"Environment variable {name} has no effect in sm120-sglang: {reason}.")
