"""Options of the model: its files, formats and types."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from sglang.srt.arguments.groups import MEMORY, MODEL
from sglang.srt.cli_args import option
from sglang.srt.configs.quantization import EXPERT_PRECISIONS, SPELLINGS


@dataclass(kw_only=True)
class ModelArgs:
    """Options of the model: its files, formats and dtypes."""

    model_path: str = option(
        MISSING,
        MODEL,
        "Local directory or GGUF file of the model, or its Hugging Face id, where ID:FILE is a GGUF file there.",
        "--model",
    )
    tokenizer_path: str | None = option(None, MODEL, "Where the tokenizer is, if not with the model.")
    served_model_name: str | None = option(None, MODEL, "Name shown by /v1/models, if not the model path.")
    revision: str | None = option(None, MODEL, "Branch, tag or commit of a Hugging Face model.")
    download_dir: str | None = option(None, MODEL, "Where Hugging Face models are stored.")
    context_length: int | None = option(
        None, MODEL, "Longest sequence, prompt and output together, if shorter than the model's.", minimum=1, size=True
    )
    trust_remote_code: bool = option(False, MODEL, "Allow a tokenizer or a model that brings its own Python code.")
    model_impl: str = option(
        "auto",
        MODEL,
        "What computes the model. sglang: a family of this server; transformers: the model's class in transformers, "
        "over this server's attention, cache and products; auto: a family if there is one, else the class.",
        choices=("auto", "sglang", "transformers"),
    )
    dtype: str = option(
        "auto", MODEL, "Type of weights and activations.", choices=("auto", "bfloat16", "float16", "float32")
    )
    load_format: str = option(
        "auto",
        MODEL,
        "auto, safetensors and gguf read the checkpoint in the form that it has, dummy fills random weights.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    json_model_override_args: str = option(
        "{}", MODEL, "JSON object merged into config.json.", json=True, metavar="JSON"
    )
    is_embedding: bool = option(False, MODEL, "Serve embeddings of texts or scores of labels, and refuse to generate.")
    skip_tokenizer_init: bool = option(False, MODEL, "Serve token ids only; no tokenizer is loaded.")
    quantization: str | None = option(
        None,
        MODEL,
        "Quantization of the weights; detected. fp8 quantizes 16-bit weights, too.",
        choices=tuple(SPELLINGS),
        metavar="FORMAT",
    )
    flashinfer_mxfp4_moe_precision: str = option(
        "default",
        MODEL,
        "Activations of MXFP4 experts: fp8 is MXFP8, bf16 keeps 16 bits, default is as the checkpoint says.",
        choices=("default", *EXPERT_PRECISIONS),
    )
    mamba_ssm_dtype: str | None = option(
        None,
        MODEL,
        "Type of the states of recurrent layers. None: what the model's config says.",
        choices=("float32", "bfloat16", "float16"),
    )
    max_mamba_cache_size: int | None = option(
        None,
        MEMORY,
        "States of recurrent layers altogether: one a running request, the others are kept at the ends of prefixes.",
        minimum=1,
    )
    mamba_full_memory_ratio: float | None = option(
        None,
        MEMORY,
        "Memory of these states over that of the KV cache; above 0. None: states for conversations of 4,096 tokens.",
    )
    cpu_offload_gb: float = option(
        0.0,
        MODEL,
        "Weights that fit stay in GPU memory, with a warning; of those that do not, experts go to main memory anyway.",
        minimum=0,
    )
    enable_paged_experts: bool = option(
        False,
        MEMORY,
        "Keep routed experts in page-locked main memory, and those in use in slots of GPU memory. By default only if"
        " GPUs have no room for the weights and main memory has.",
    )
    paged_experts_num_resident: int | None = option(
        None, MEMORY, "Slots of each layer for experts in use. None: as many as caches leave room for.", minimum=1
    )
    kt_cpuinfer: int | None = option(
        None,
        MEMORY,
        "Threads of a machine's CPUs that compute some of the experts in main memory which decode steps lack. None:"
        " as many as pay, where main memory delivers several times what the bus takes. 0: the GPU computes all of them,"
        " so that answers do not depend on where experts lie.",
        minimum=0,
    )
    ple_offload_embedding: bool = option(
        False,
        MEMORY,
        "Keep tables of n-grams (Qwen3.8-Flash-Next) in pinned host memory. By default only if GPUs have no room.",
    )
    embed_in_main_memory: bool = option(
        False,
        MEMORY,
        "Keep embeddings of tokens in pinned host memory, where the GPU reads a row for each token. Embeddings that the"
        " output head multiplies by stay in GPU memory.",
    )
    encoder_in_main_memory: bool = option(
        False,
        MEMORY,
        "Keep the layers of the encoder of images and videos in pinned host memory. The GPU has room for two of them,"
        " which come while the one before is computed.",
    )
    no_ple_offload_embedding: bool = option(False, MEMORY, "Keep tables of n-grams in GPU memory in any case.")
    kv_cache_dtype: str = option(
        "auto", MODEL, "Type of the KV cache.", choices=("auto", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
    )
    quantization_param_path: str | None = option(
        None,
        MODEL,
        "JSON file with the scales of a KV cache in 8 or 4 bits by layer, as python -m sglang.quantize"
        " --kv-cache-scales writes it. They take the place of the checkpoint's.",
        metavar="FILE",
    )
    device: str = option("auto", MODEL, "Where the model runs.", choices=("auto", "cuda", "cpu"))
    random_seed: int | None = option(
        None,
        MODEL,
        "Seed of unseeded requests and of dummy weights; random if not given.",
        minimum=0,
        maximum=2**63 - 1,
    )
