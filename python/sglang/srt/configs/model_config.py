"""The facts about a model that serving needs: where it is, its context length, tokens, dtype and quantization. No
torch.

`plan.model_description` reads its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.fused_projections import with_tp_blocks
from sglang.srt.configs.hf_config import (
    ConfigReader,
    bounded,
    merge_overrides,
    read_config,
    read_generation_config,
    select_text_config,
)
from sglang.srt.configs.labels import Labels, classifies, read_labels
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.ngram_tables import with_table_dtype
from sglang.srt.configs.quant_rules import QuantConfig
from sglang.srt.configs.quantization import quantization_of
from sglang.srt.configs.rope import by_layer_type, rope_parameters, scaled_context_length
from sglang.srt.configs.sentence_modules import NO_MODULES, SentenceModules, read_sentence_modules
from sglang.srt.configs.text_positions import first_position
from sglang.srt.environ import envs, warn_once
from sglang.srt.errors import UserError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

DTYPES = ("bfloat16", "float16", "float32")
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What serving needs to know of a model, apart from its layers."""

    model_path: str
    """Local directory of the model (a Hugging Face id is resolved)."""
    architecture: str
    hf_config: Mapping[str, Any]
    """Values of config.json after overrides; of a multimodal model those of the text part."""
    vocab_size: int
    context_len: int
    dtype: str
    quantization: QuantConfig | None
    """Quantization of the checkpoint; None: 16 bits throughout."""
    eos_token_ids: frozenset[int]
    default_sampling: Mapping[str, Any]
    text_keys: frozenset[str] | None = None
    """Keys of `text_config`, which are about the language model; None: all keys are."""
    written_config: Mapping[str, Any] = field(default_factory=dict)
    """Values of the whole config.json after overrides, in the form of the file."""
    media_config: Mapping[str, Any] = field(default_factory=dict)
    """Values of the whole config.json where images may be served; empty with --language-model-only."""
    sentence_modules: SentenceModules = NO_MODULES
    """What the repository makes of hidden states, where the server makes embeddings."""
    labels: Labels | None = None
    """The labels of a classifier; None: the model is none."""

    @property
    def model_types(self) -> frozenset[str]:
        """Returns the values of `model_type`: that of the language model, and that of the whole model."""
        stated = (config.get("model_type") for config in (self.hf_config, self.written_config))
        return frozenset(name for name in stated if isinstance(name, str))

    @property
    def hidden_size(self) -> int:
        """Returns the elements of a hidden state, by any of the names that model types have for it."""
        reader = ConfigReader(self.hf_config, "config.json")
        return reader.count("hidden_size", "n_embd", "d_model", "dim") or reader.positive("hidden_size")

    @classmethod
    def from_server_args(cls, args: ServerArgs) -> ModelConfig:
        """Reads the model's facts. Raises UserError if the model is missing or malformed."""
        directory = resolve_model_path(args.model_path, args.revision, args.download_dir, args.load_format != "dummy")
        config = read_config(directory)
        if args.load_format != "dummy":
            config = with_table_dtype(config, directory)
        config = merge_overrides(config, args.model_overrides())
        if args.load_format != "dummy":
            config = with_tp_blocks(config, directory)
        return cls.from_hf(config, read_generation_config(directory), args=args, directory=directory)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], *, args: ServerArgs, directory: Path
    ) -> ModelConfig:
        """Makes the config from the parsed files. `args` contributes --dtype, --context-length, --quantization and
        --flashinfer-mxfp4-moe-precision. Raises UserError."""
        hf_config, inner = select_text_config(config), config.get("text_config")
        reader = ConfigReader(hf_config, f"{directory / 'config.json'}")
        architecture = _architecture(reader)
        modules = read_sentence_modules(directory) if args.is_embedding else NO_MODULES
        context_len = context_length(hf_config, args.context_length, reader.source)
        if modules.max_tokens and args.context_length is None:
            context_len = min(context_len, modules.max_tokens)
        return cls(
            model_path=str(directory),
            architecture=architecture,
            hf_config=hf_config,
            vocab_size=reader.positive("vocab_size"),
            context_len=context_len,
            dtype=_dtype(reader, args.dtype, args.is_embedding),
            quantization=quantization_of(
                config,
                directory,
                args.quantization,
                args.flashinfer_mxfp4_moe_precision,
                args.load_format == "dummy",
            ),
            eos_token_ids=_eos_token_ids(reader.positive("vocab_size"), config, hf_config, generation),
            text_keys=frozenset(inner) if isinstance(inner, Mapping) else None,
            written_config=config,
            media_config={} if args.language_model_only else config,
            sentence_modules=modules,
            labels=read_labels(config) if args.is_embedding and classifies(architecture) else None,
            default_sampling={key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None},
        )


def _architecture(reader: ConfigReader) -> str:
    names = reader.require("architectures", list)
    if not names or not isinstance(names[0], str):
        raise UserError(f"{reader.source}: 'architectures' must name a model class; got {names!r}.")
    return names[0]


def context_length(hf_config: Mapping[str, Any], requested: int | None, source: str = "config.json") -> int:
    """Returns the length of the longest request in tokens: `requested` (--context-length), or what the model supports.
    Raises UserError if the flag asks for more."""
    reader = ConfigReader(hf_config, source)
    # Kimi Linear, whose attention has no positions, calls it model_max_length, and GPT-2 and its like n_positions.
    names = ("max_position_embeddings", "model_max_length", "n_positions", "n_ctx")
    longest = reader.count(*names) or reader.positive("max_position_embeddings")
    longest -= first_position(hf_config)
    # Where only a part of the layers is scaled (in the newer or the older form), the stated length is the scaled one.
    if not by_layer_type(hf_config) and hf_config.get("rope_local_base_freq") is None:
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


def _dtype(reader: ConfigReader, requested: str, embeds: bool) -> str:
    """Returns the dtype of the model. embeds: it makes embeddings; such models are often published in 32 bits, of which
    16 are computed with."""
    if requested != "auto":
        return requested
    written = reader.values.get("dtype") or reader.values.get("torch_dtype") or "bfloat16"
    name = str(written).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(
            f"{reader.source}: dtype {written!r} is not supported; choose {', '.join(DTYPES)} with --dtype."
        )
    return "bfloat16" if embeds and name == "float32" else name


def _eos_token_ids(vocab_size: int, *sources: Mapping[str, Any]) -> frozenset[int]:
    """Returns the end tokens of all sources: config.json, its text part (which may name fewer) and
    generation_config.json. Raises UserError for what is no token id."""
    token_ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UserError(
                    f"config.json or generation_config.json: 'eos_token_id' must be token ids; got {value!r}."
                )
            if token >= vocab_size:
                raise UserError(
                    "config.json or generation_config.json: 'eos_token_id' must be token ids below the vocabulary's "
                    f"size of {vocab_size}; got {value!r}. Correct the file, or --json-model-override-args."
                )
            token_ids.add(token)
    return frozenset(token_ids)
