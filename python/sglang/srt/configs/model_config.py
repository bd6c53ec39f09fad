"""What the model is: the facts of config.json and generation_config.json that planning and serving need. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.architectures import SUPPORTED, SUPPORTED_ARCHITECTURES, Architecture
from sglang.srt.configs.hf_config import (
    ConfigReader,
    bounded,
    merge_overrides,
    read_config,
    read_generation_config,
    select_text_config,
)
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.quant_rules import QuantConfig
from sglang.srt.configs.quantization import quantization_of
from sglang.srt.configs.rope import by_layer_type, rope_parameters, scaled_context_length
from sglang.srt.environ import envs, warn_once
from sglang.srt.errors import UserError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

DTYPES = ("bfloat16", "float16", "float32")
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes are those of the whole model, before it is split over GPUs."""

    model_path: str
    """Local directory (a Hugging Face id is resolved)."""
    architecture: str
    hf_config: Mapping[str, Any]
    """config.json after overrides; of a multimodal model the text part."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of the dense MLP; may be 0 where every layer has experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    vocab_size: int
    context_len: int
    dtype: str
    quantization: QuantConfig | None
    """None: 16 bits throughout."""
    eos_token_ids: frozenset[int]
    default_sampling: Mapping[str, Any]
    tie_word_embeddings: bool
    num_experts: int
    """0 in a dense model; then the two below are 0 as well."""
    num_experts_per_tok: int
    moe_intermediate_size: int

    @classmethod
    def from_server_args(cls, args: ServerArgs) -> ModelConfig:
        """Raises UserError if the model is missing, malformed, or not one that we serve."""
        directory = resolve_model_path(args.model_path, args.revision, args.download_dir, args.load_format != "dummy")
        config = merge_overrides(read_config(directory), args.model_overrides())
        return cls.from_hf(config, read_generation_config(directory), args=args, directory=directory)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], *, args: ServerArgs, directory: Path
    ) -> ModelConfig:
        """From the parsed files; `args` contributes --dtype, --context-length, --quantization
        and --flashinfer-mxfp4-moe-precision. Raises UserError."""
        hf_config = select_text_config(config)
        reader = ConfigReader(hf_config, f"{directory / 'config.json'}")
        architecture = _architecture(reader)
        known = SUPPORTED[architecture]
        num_heads, num_kv_heads = _heads(reader, known)
        hidden_size = reader.positive("hidden_size")
        head_dim = reader.positive("head_dim", known.head_dim or max(hidden_size // num_heads, 1))
        num_experts = _num_experts(reader, known)
        # A mixture of experts without dense layers may leave the dense size out, or use it for its experts.
        dense_size = reader.count("intermediate_size") if num_experts else reader.positive("intermediate_size")
        return cls(
            model_path=str(directory),
            architecture=architecture,
            hf_config=hf_config,
            num_layers=reader.positive("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=dense_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=reader.positive("v_head_dim", head_dim),
            vocab_size=reader.positive("vocab_size"),
            context_len=context_length(hf_config, args.context_length, reader.source),
            dtype=_dtype(reader, args.dtype),
            quantization=quantization_of(config, directory, args.quantization, args.flashinfer_mxfp4_moe_precision),
            eos_token_ids=_eos_token_ids(hf_config, generation),
            default_sampling={key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None},
            tie_word_embeddings=reader.default("tie_word_embeddings", bool, known.tie_word_embeddings),
            num_experts=num_experts,
            num_experts_per_tok=reader.positive("num_experts_per_tok") if num_experts else 0,
            moe_intermediate_size=reader.positive("moe_intermediate_size", dense_size or None) if num_experts else 0,
        )


def _architecture(reader: ConfigReader) -> str:
    names = reader.require("architectures", list)
    if not names or not isinstance(names[0], str):
        raise UserError(f"{reader.source}: 'architectures' must name a model class; got {names!r}.")
    name: str = names[0]
    if name not in SUPPORTED:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UserError(f"{reader.source}: the architecture {name} is not supported. Supported: {supported}.")
    return name


def _heads(reader: ConfigReader, known: Architecture) -> tuple[int, int]:
    num_heads = reader.positive("num_attention_heads")
    num_kv_heads = reader.positive("num_key_value_heads", known.num_key_value_heads or num_heads)
    if num_heads % num_kv_heads:
        raise UserError(
            f"{reader.source}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}."
        )
    return num_heads, num_kv_heads


_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def _num_experts(reader: ConfigReader, known: Architecture) -> int:
    for key in _EXPERT_KEYS:
        if reader.values.get(key) is not None:
            return reader.count(key)
    return reader.positive("num_experts") if known.is_moe else 0


def context_length(hf_config: Mapping[str, Any], requested: int | None, source: str = "config.json") -> int:
    """The longest request: --context-length, or what the model was made for. Raises UserError if it is more."""
    reader = ConfigReader(hf_config, source)
    longest = reader.positive("max_position_embeddings")
    if not by_layer_type(hf_config):
        longest = scaled_context_length(longest, rope_parameters(hf_config))
    longest = bounded("max_position_embeddings", longest, f"{source}, with its rotary scaling")
    if requested is None or requested <= longest:
        return longest if requested is None else requested
    if not envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN:
        raise UserError(
            f"--context-length {requested} exceeds the {longest} tokens that {source} supports. "
            "Lower it, configure rope scaling with --json-model-override-args, "
            "or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 to try regardless."
        )
    warn_once(f"--context-length {requested} exceeds the model's {longest}; outputs beyond it may be poor.")
    return requested


def _dtype(reader: ConfigReader, requested: str) -> str:
    if requested != "auto":
        return requested
    written = reader.values.get("dtype") or reader.values.get("torch_dtype") or "bfloat16"
    name = str(written).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(
            f"{reader.source}: dtype {written!r} is not supported; choose {', '.join(DTYPES)} with --dtype."
        )
    return name


def _eos_token_ids(hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for source in (hf_config, generation):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UserError(
                    f"config.json or generation_config.json: 'eos_token_id' must be token ids; got {value!r}."
                )
            found.add(token)
    return frozenset(found)
