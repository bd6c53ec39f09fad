"""python lab/quality/cache_scales.py --model-path smollm2 --out DIR: what scales of an FP8 KV cache change.

Prints the perplexity, the divergence from 16 bits and the share of equal likeliest tokens, as `lab/quality` measures
them: with a scale of 1, with calibrated scales by layer and, on a CPU, whose kernels can be given them, with a scale
for each head. Then the same for the model with values 2^14 times smaller and an output projection as many times larger:
in 16 bits it is the same model, and in e4m3 its values have no digits without a scale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the package, not the folder that `python FILE` puts there

from quality import head, texts  # noqa: E402
from quality.model import Model, write_16_bits  # noqa: E402
from sglang.quantize.cache_scales import calibrate_caches  # noqa: E402
from sglang.srt.model_loader.checkpoint import SINGLE_NAME  # noqa: E402

SMALLER = 2.0**-14
FACTORS = {"v_proj.weight": SMALLER, "v_proj.bias": SMALLER, "o_proj.weight": 1 / SMALLER}
WINDOW, CHUNK = 1024, 128


def with_small_values(source: Path, target: Path) -> None:
    """Writes the checkpoint with smaller values and larger output projections."""
    target.mkdir()
    for path in source.glob("*.json"):
        (target / path.name).write_text(path.read_text())
    tensors = load_file(source / SINGLE_NAME)
    for name, tensor in tensors.items():
        factors = [factor for ending, factor in FACTORS.items() if name.endswith(ending)]
        tensors[name] = tensor * factors[0] if factors else tensor
    save_file(tensors, target / SINGLE_NAME, metadata={"format": "pt"})


def give_heads_their_scales(model: Model, cache: Mapping[str, Any]) -> None:
    """Replaces the scales of layers by those of heads [H, 1] of a file's `kv_cache`."""
    for store in model.runner.model.caches:
        layer = str(store.layer_id)
        store.k_scale, store.v_scale = (
            torch.tensor(cache[name][layer]).view(-1, 1)  # type: ignore[assignment]
            for name in ("k_scale", "v_scale")
        )


def forms(
    folder: Path, prompts: str, tokens: int, device: str
) -> Iterator[tuple[str, dict[str, Any], Mapping[str, Any] | None]]:
    """Yields what is measured of a checkpoint: its name, the server's flags, and the scales of heads."""
    yield "16 bits", {}, None
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    yield "FP8, scale 1", fp8, None
    content = calibrate_caches(str(folder), prompts, tokens, device).to_json(by_head=True)
    file = folder.with_suffix(".scales.json")
    file.write_text(json.dumps(content))
    yield "FP8, by layer", fp8 | {"quantization_param_path": str(file)}, None
    if device == "cpu":
        yield "FP8, by head", fp8 | {"quantization_param_path": str(file)}, content["kv_cache"]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each form. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="a model in 16 bits or GGUF whose head is its embedding")
    parser.add_argument("--out", required=True, help="directory for checkpoints and texts")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    args = parser.parse_args(argv)
    out = Path(args.out) / Path(args.model_path).name.removesuffix(".gguf")
    plain, small = out / "plain", out / "small"
    if not plain.exists():
        write_16_bits(args.model_path, plain)
        with_small_values(plain, small)
    prompts, known = str(texts.calibration_file(Path(args.out))), None
    with torch.inference_mode():
        for folder in (plain, small):
            for name, flags, heads in forms(folder, prompts, args.calibration_tokens, args.device):
                model = Model(str(folder), flags, -(-args.tokens // WINDOW), WINDOW, device=args.device)
                if heads is not None:
                    give_heads_their_scales(model, heads)
                text = texts.measured_text(Path(args.out))
                windows = texts.windows(model.tokenizer, text, args.tokens, WINDOW)
                hidden = torch.cat([states[:-1] for states in model.hidden_states(windows, CHUNK)])
                hidden = hidden.to(model.head.device)
                known = known or head.make_reference(hidden, model.head)
                following = torch.tensor([ids[1:] for ids in windows], device=hidden.device).flatten()
                scores = head.score(hidden, following, model.head, known)
                perplexity = scores.logprobs.double().mean().neg().exp().item()
                divergence, same = scores.divergence.double().mean().item(), scores.same.double().mean().item()
                print(f"{folder.name}, {name}: {perplexity:.3f}, {divergence:.5f}, {same:.2%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
