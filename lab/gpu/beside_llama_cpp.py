"""Experts in main memory in llama.cpp, for the figures that stand beside those of `expert_slots.py`.

    python lab/gpu/beside_llama_cpp.py --bin LLAMA_CPP/build/bin     # GPU; about two minutes on an H200 machine

Writes a GGUF file of Qwen3-30B-A3B's widths, 16 layers, with random weights in Q8_0 (the size of FP8), and lets
`llama-batched-bench` decode for 1 and 8 requests and read a prompt of 8,000 tokens: with all experts on the GPU, with
those of a quarter of the layers in main memory, and with those of three quarters (`--n-cpu-moe`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import gguf
import numpy as np

LAYERS, WIDTH, INTER, EXPERTS, TOP_K, HEADS, KV_HEADS, HEAD_DIM = 16, 2048, 768, 128, 8, 32, 4, 128
VOCABULARY = 151552
PROMPT, TOKENS = 8000, 96
BLOCK, BLOCK_BYTES = 32, 34


def q8_0(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns random weights of a standard deviation near 0.02 as bytes of Q8_0."""
    blocks = int(np.prod(shape)) // BLOCK
    data = rng.integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
    data[:, :2] = np.full((1, 1), 0.02 / 74, np.float16).view(np.uint8)
    return data.reshape(*shape[:-1], shape[-1] // BLOCK * BLOCK_BYTES)


def write_model(path: Path) -> None:
    """Writes the file. All layers have the same weights."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(40960)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(3 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(INTER)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")

    def quantized(name: str, data: np.ndarray) -> None:
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    vocabulary = q8_0(rng, VOCABULARY, WIDTH)
    quantized("token_embd.weight", vocabulary)
    quantized("output.weight", vocabulary)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    parts = {
        "attn_q": q8_0(rng, HEADS * HEAD_DIM, WIDTH),
        "attn_k": q8_0(rng, KV_HEADS * HEAD_DIM, WIDTH),
        "attn_v": q8_0(rng, KV_HEADS * HEAD_DIM, WIDTH),
        "attn_output": q8_0(rng, WIDTH, HEADS * HEAD_DIM),
        "ffn_gate_exps": q8_0(rng, EXPERTS, INTER, WIDTH),
        "ffn_up_exps": q8_0(rng, EXPERTS, INTER, WIDTH),
        "ffn_down_exps": q8_0(rng, EXPERTS, WIDTH, INTER),
    }
    others = {
        "attn_norm": np.ones(WIDTH, np.float32),
        "ffn_norm": np.ones(WIDTH, np.float32),
        "attn_q_norm": np.ones(HEAD_DIM, np.float32),
        "attn_k_norm": np.ones(HEAD_DIM, np.float32),
        "ffn_gate_inp": (rng.standard_normal((EXPERTS, WIDTH)) * 0.02).astype(np.float32),
    }
    for layer in range(LAYERS):
        for name, data in parts.items():
            quantized(f"blk.{layer}.{name}.weight", data)
        for name, data in others.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bench(folder: Path, model: Path, layers: int, threads: int, requests: int, prompt: int, tokens: int) -> dict:
    """Returns the row of one run of llama-batched-bench, the experts of `layers` layers in main memory."""
    command = [
        folder / "llama-batched-bench", "-m", model, "-ngl", "99", "-t", threads, "-fa", "on", "-b", "8192",
        "-ub", "8192", "-c", requests * (prompt + tokens) + 256, "-npp", prompt, "-ntg", tokens, "-npl", requests,
        "--output-format", "jsonl",
    ]  # fmt: skip
    if layers:
        command += ["--n-cpu-moe", layers]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise RuntimeError(done.stdout[-500:] + done.stderr[-1500:])
    return rows[-1]


def main() -> None:
    """Writes the model, and prints a line for each share of experts on the GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, type=Path, help="folder with llama-batched-bench")
    parser.add_argument("--threads", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        write_model(model)
        for share in (100, 75, 25):
            layers = LAYERS * (100 - share) // 100
            one = bench(options.bin, model, layers, options.threads, 1, PROMPT, TOKENS)
            eight = bench(options.bin, model, layers, options.threads, 8, 16, TOKENS)
            row = {
                "experts_on_gpu_percent": share,
                "decode_1_ms": 1e3 * one["t_tg"] / TOKENS,
                "decode_8_ms": 1e3 * eight["t_tg"] / TOKENS,
                "prompt_ms": 1e3 * one["t_pp"],
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
