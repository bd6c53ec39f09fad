"""DeepSeek-V4.1 in plain fp32 torch, written from descriptions of its checkpoint: whole sequences, no cache. And small
random checkpoints with the published names and keys."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

Tensors = dict[str, Tensor]
VOCAB, NUM_TEXTS = 256, 192
"""The last 64 tokens are those before them in capitals."""
TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_lora_rank": 12,
    "o_groups": 2,
    "q_head_norm": False,
    "sliding_window": 12,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 6],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-20,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 3,
    "hc_pre_from_prev_sublayer": True,
    "engram_layer_ids": [1, 5],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 2,
    "engram_head_dim": 8,
    "engram_vocab_size": 23,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": NUM_TEXTS,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 3,
}  # fmt: skip


def primes(start: int) -> Sequence[int]:
    return [number for number in range(start, 20 * start) if all(number % k for k in range(2, math.isqrt(number) + 1))]


def table_sizes(c: dict[str, Any]) -> list[list[int]]:
    """Rows of every head's part of each table: no prime occurs twice."""
    each, numbers = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"], primes(c["engram_vocab_size"])
    return [list(numbers[i * each : (i + 1) * each]) for i in range(len(c["engram_layer_ids"]))]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x: Tensor, angles: Tensor, back: bool = False) -> Tensor:
    """x [n, ..., D], angles [n, rot / 2]: neighbours of the last dims rotate."""
    size = 2 * angles.shape[1]
    still, tail = x.split((x.shape[-1] - size, size), -1)
    pairs = torch.view_as_complex(tail.unflatten(-1, (-1, 2)).contiguous())
    turn = torch.polar(torch.ones_like(angles), -angles if back else angles)
    turn = turn.view(len(turn), *(1,) * (pairs.ndim - 2), -1)
    return torch.cat((still, torch.view_as_real(pairs * turn).flatten(-2)), -1)


@dataclass
class V41:
    c: dict[str, Any]
    w: Tensors
    texts: np.ndarray
    image_token: int = -1
    """Tokens of images in prompts."""

    def pictured(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([token == self.image_token for token in tokens])

    def angles(self, positions: Tensor, compresses: bool) -> Tensor:
        c, dim = self.c, self.c["qk_rope_head_dim"]
        base = c["compress_rope_theta"] if compresses else c["rope_theta"]
        freqs = 1.0 / base ** (torch.arange(0, dim, 2) / dim)
        if compresses:
            scaling = c["rope_scaling"]
            length = scaling["original_max_position_embeddings"]
            edges = [
                dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
                for turns in (scaling["beta_fast"], scaling["beta_slow"])
            ]
            low, high = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), dim - 1)
            ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
            freqs = freqs / scaling["factor"] * ramp + freqs * (1 - ramp)
        return positions[:, None] * freqs

    @cached_property
    def multipliers(self) -> list[list[int]]:
        bound = (2**63 - 1) // self.c["engram_compressed_vocab_size"] // 2
        size = self.c["engram_max_ngram_size"]
        return [
            [2 * int(i) + 1 for i in np.random.default_rng(10007 * layer).integers(0, bound, size, dtype=np.int64)]
            for layer in self.c["engram_layer_ids"]
        ]

    def engram(self, layer: int, h: Tensor, tokens: Sequence[int]) -> Tensor:
        """h [n, N, H] -> what is added to it: nothing to tokens of images, beyond which nothing is looked up."""
        c, at, number = self.c, f"layers.{layer}.engram.", self.c["engram_layer_ids"].index(layer)
        sizes, factors = table_sizes(c)[number], self.multipliers[number]
        texts, pad = [int(self.texts[token]) for token in tokens], int(self.texts[c["engram_pad_token_id"]])
        rows = []
        for i in range(len(tokens)):
            mixed, places, begin, reached = texts[i] * factors[0], [], 0, True
            for back in range(1, c["engram_max_ngram_size"]):
                reached = reached and i >= back and tokens[i - back] != self.image_token
                mixed ^= (texts[i - back] if reached else pad) * factors[back]
                for _ in range(c["engram_n_heads"]):
                    size = sizes[len(places)]
                    places.append(begin + mixed % size)
                    begin += size
            rows.append(places)
        embedded = self.w[f"{at}embed.weight"][torch.tensor(rows)].flatten(1)
        num, size = h.shape[1:]
        key, value = (embedded @ self.w[f"{at}wkv.weight"].T).split((num * size, size), 1)
        ones = torch.ones(())
        key = rms(key.unflatten(1, (num, size)), ones, c["rms_norm_eps"]) * self.w[f"{at}k_weight"]
        query = rms(h, ones, c["rms_norm_eps"]) * self.w[f"{at}q_weight"]
        dot = (key * query).sum(-1) / size**0.5
        gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt()) * ~self.pictured(tokens)[:, None]
        return gate[..., None] * value[:, None]

    def mixes(self, at: str, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, num = self.c, h.shape[1]
        product = rms(h.flatten(1), torch.ones(()), c["rms_norm_eps"]) @ self.w[f"{at}_fn"].T
        pre, post, mix = product.split((num, num, num * num), 1)
        scale, (b_pre, b_post, b_mix) = self.w[f"{at}_scale"], self.w[f"{at}_base"].split((num, num, num * num))
        mix = (mix * scale[2] + b_mix).unflatten(1, (num, num)).softmax(-1) + c["hc_eps"]
        mix = mix / (mix.sum(-2, keepdim=True) + c["hc_eps"])
        for _ in range(c["hc_sinkhorn_iters"] - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + c["hc_eps"])
            mix = mix / (mix.sum(-2, keepdim=True) + c["hc_eps"])
        return (pre * scale[0] + b_pre).sigmoid() + c["hc_eps"], 2 * (post * scale[1] + b_post).sigmoid(), mix

    def entries(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed entries [m, D] of a source layer, and the indexer's keys [m, d] of them."""
        at, rate, eps = f"layers.{layer}.attn.", self.c["compress_ratios"][layer], self.c["rms_norm_eps"]
        whole = len(x) // rate * rate
        values = (x[:whole] @ self.w[f"{at}compressor.wkv.weight"].T).unflatten(0, (-1, rate))
        if rate > 1:
            gates = (x[:whole] @ self.w[f"{at}compressor.wgate.weight"].T).unflatten(0, (-1, rate)).softmax(1)
            values = values * gates
        latent = rms(values.sum(1), self.w[f"{at}compressor.norm.weight"], eps)
        angles = self.angles(positions[:whole:rate], True)
        keys = rms(latent @ self.w[f"{at}indexer.wk.weight"].T, self.w[f"{at}indexer.k_norm.weight"], eps)
        return rotated(latent, angles), rotated(keys, angles)

    def scores(self, layer: int, x: Tensor, latent: Tensor, keys: Tensor, angles: Tensor) -> Tensor:
        """[n, m]; -inf for what a token does not see."""
        c, at, rate = self.c, f"layers.{layer}.attn.indexer.", self.c["compress_ratios"][layer]
        q = (latent @ self.w[f"{at}wq_b.weight"].T).unflatten(-1, (c["index_n_heads"], -1))
        weights = x @ self.w[f"{at}weights_proj.weight"].T * (c["index_n_heads"] * c["index_head_dim"]) ** -0.5
        scores = ((rotated(q, angles) @ keys.T).relu() * weights[..., None]).sum(1)
        seen = (torch.arange(len(x)) + 1) // rate
        return scores.masked_fill(torch.arange(len(keys)) >= seen[:, None], -torch.inf)

    def candidates(self, scores: Tensor, rate: int) -> Tensor:
        """Which entries [n, m] later indexers may choose."""
        block, top = self.c["candidate_block_size"], self.c["candidate_topk_blocks"]
        padded = F.pad(scores, (0, -scores.shape[1] % block), value=-torch.inf)
        best = padded.unflatten(1, (-1, block)).amax(-1)
        last = ((torch.arange(len(scores)) + 1) // rate - 1) // block
        best = best.masked_fill(torch.arange(best.shape[1]) == last[:, None], torch.inf)
        chosen = best.topk(min(top, best.shape[1]), -1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen.indices, chosen.values > -torch.inf)
        return kept.repeat_interleave(block, 1)[:, : scores.shape[1]]

    def attention(self, at: str, x: Tensor, shared: dict[str, Tensor], layer: int = -1) -> Tensor:
        c, eps, n = self.c, self.c["rms_norm_eps"], len(x)
        rate = c["compress_ratios"][layer]
        positions = torch.arange(n)
        angles = self.angles(positions, rate > 0)
        latent = rms(x @ self.w[f"{at}wq_a.weight"].T, self.w[f"{at}q_norm.weight"], eps)
        q = rotated((latent @ self.w[f"{at}wq_b.weight"].T).unflatten(-1, (c["num_attention_heads"], -1)), angles)
        kv = rotated(rms(x @ self.w[f"{at}wkv.weight"].T, self.w[f"{at}kv_norm.weight"], eps), angles)
        seen = (positions <= positions[:, None]) & (positions > positions[:, None] - c["sliding_window"])
        if rate:
            if layer in c["kv_source_layer_ids"]:
                shared["entries"], shared["keys"] = self.entries(layer, x, positions)
            if layer in c["index_source_layer_ids"]:
                scores = self.scores(layer, x, latent, shared["keys"], angles)
                first = c["candidate_source_layer_id"]
                if layer == first:
                    shared["candidates"] = self.candidates(scores, rate)
                elif 0 <= first < layer:
                    scores = scores.masked_fill(~shared["candidates"], -torch.inf)
                best = scores.topk(min(c["index_topk"], scores.shape[1]), -1)
                chosen = torch.zeros_like(scores, dtype=torch.bool)
                shared["chosen"] = chosen.scatter(1, best.indices, best.values > -torch.inf)
            kv, seen = torch.cat((kv, shared["entries"])), torch.cat((seen, shared["chosen"]), 1)
        return self.attended(at, q, kv, seen, angles)

    def attended(self, at: str, q: Tensor, kv: Tensor, seen: Tensor, angles: Tensor) -> Tensor:
        c = self.c
        scores = (torch.einsum("nhd,md->nhm", q, kv) * c["head_dim"] ** -0.5).masked_fill(~seen[:, None], -torch.inf)
        sinks = self.w[f"{at}attn_sink"][None, :, None].expand(len(q), -1, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        out = rotated(torch.einsum("nhm,md->nhd", weights, kv), angles, back=True)
        groups = out.reshape(len(q), c["o_groups"], -1)
        low = torch.einsum("ngd,grd->ngr", groups, self.w[f"{at}wo_a.weight"].unflatten(0, (c["o_groups"], -1)))
        return low.flatten(1) @ self.w[f"{at}wo_b.weight"].T

    def expert(self, at: str, x: Tensor) -> Tensor:
        limit = self.c["swiglu_limit"]
        gate, up = (x @ self.w[f"{at}{name}.weight"].T for name in ("w1", "w3"))
        return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)) @ self.w[f"{at}w2.weight"].T

    def moe(self, at: str, x: Tensor, top_k: int, pictured: Tensor) -> Tensor:
        scores = F.softplus(x @ self.w[f"{at}gate.weight"].T).sqrt()
        bias = torch.where(pictured[:, None], self.w[f"{at}gate.bias_vl"], self.w[f"{at}gate.bias"])
        chosen = (scores + bias).topk(top_k, -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.c["routed_scaling_factor"]
        shares = torch.zeros_like(scores).scatter(1, chosen, weights)
        routed = [share[:, None] * self.expert(f"{at}experts.{i}.", x) for i, share in enumerate(shares.unbind(1))]
        return torch.stack(routed).sum(0) + self.expert(f"{at}shared_experts.", x)

    def layer(
        self, at: str, h: Tensor, pre: Tensor, attend: Any, top_k: int, pictured: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        eps, pictured = self.c["rms_norm_eps"], torch.zeros(len(h), dtype=torch.bool) if pictured is None else pictured
        for name, norm, block in (
            ("hc_attn", "attn_norm", attend),
            ("hc_ffn", "ffn_norm", lambda x: self.moe(f"{at}ffn.", x, top_k, pictured)),
        ):
            following, post, mix = self.mixes(f"{at}{name}", h)
            out = block(rms((pre[..., None] * h).sum(1), self.w[f"{at}{norm}.weight"], eps))
            h = post[..., None] * out[:, None] + torch.einsum("tjk,tjh->tkh", mix, h)
            pre = following
        return h, pre

    @torch.inference_mode()
    def streams(self, tokens: Sequence[int], features: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """The streams [n, N, H] before every layer and behind the last one, and the hidden states behind the norm.
        features [tokens of images, H]: in place of their embeddings."""
        c, pictured = self.c, self.pictured(tokens)
        embedded = self.w["embed.weight"][torch.tensor(list(tokens))]
        if features is not None:
            embedded[pictured] = features
        h = embedded[:, None].repeat(1, c["hc_mult"], 1)
        pre = F.one_hot(torch.zeros(len(h), dtype=torch.int64), c["hc_mult"]).float()
        shared: dict[str, Tensor] = {}
        before = []
        for i in range(c["num_hidden_layers"]):
            if i in c["engram_layer_ids"]:
                h = h + self.engram(i, h, tokens)
            before.append(h)
            at = f"layers.{i}."
            h, pre = self.layer(
                at, h, pre, lambda x, i=i, at=at: self.attention(f"{at}attn.", x, shared, i), c["num_experts_per_tok"],
                pictured,
            )  # fmt: skip
        return [*before, h], rms((pre[..., None] * h).sum(1), self.w["norm.weight"], c["rms_norm_eps"])

    def logits(self, tokens: Sequence[int], features: Tensor | None = None) -> Tensor:
        return self.streams(tokens, features)[1] @ self.w["head.weight"].T


def layer_shapes(c: dict[str, Any], at: str, layer: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors; `layer` -1: of a draft's."""
    hidden, heads, dim, num = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["hc_mult"]
    rank, low, size = c["q_lora_rank"], c["o_groups"] * c["o_lora_rank"], c["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,),
        "attn.wq_a.weight": (rank, hidden), "attn.q_norm.weight": (rank,), "attn.wq_b.weight": (heads * dim, rank),
        "attn.wkv.weight": (dim, hidden), "attn.kv_norm.weight": (dim,), "attn.attn_sink": (heads,),
        "attn.wo_a.weight": (low, heads * dim // c["o_groups"]), "attn.wo_b.weight": (hidden, low),
        "ffn.gate.weight": (experts, hidden), "ffn.gate.bias": (experts,), "ffn.gate.bias_vl": (experts,),
    }  # fmt: skip
    for name in ("attn", "ffn"):
        outputs = num * (2 + num)
        shapes |= {f"hc_{name}_fn": (outputs, num * hidden), f"hc_{name}_base": (outputs,), f"hc_{name}_scale": (3,)}
    for expert in [*(f"experts.{i}" for i in range(experts)), "shared_experts"]:
        shapes |= {f"ffn.{expert}.{name}.weight": (size, hidden) for name in ("w1", "w3")}
        shapes |= {f"ffn.{expert}.w2.weight": (hidden, size)}
    index = c["index_head_dim"]
    if layer in c["index_source_layer_ids"]:
        shapes["attn.indexer.wq_b.weight"] = (c["index_n_heads"] * index, rank)
        shapes["attn.indexer.weights_proj.weight"] = (c["index_n_heads"], hidden)
    if layer in c["kv_source_layer_ids"]:
        shapes |= {"attn.indexer.wk.weight": (index, dim), "attn.indexer.k_norm.weight": (index,)}
        shapes |= {"attn.compressor.wkv.weight": (dim, hidden), "attn.compressor.norm.weight": (dim,)}
        if c["compress_ratios"][layer] > 1:
            shapes["attn.compressor.wgate.weight"] = (dim, hidden)
    if layer in c["engram_layer_ids"]:
        width = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * c["engram_head_dim"]
        rows = sum(table_sizes(c)[c["engram_layer_ids"].index(layer)])
        shapes |= {
            "engram.embed.weight": (rows, c["engram_head_dim"]),
            "engram.wkv.weight": ((num + 1) * hidden, width),
        }
        shapes |= {"engram.q_weight": (num, hidden), "engram.k_weight": (num, hidden)}
    return {f"{at}{name}": shape for name, shape in shapes.items()}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    """Everything random; attention far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if "norm" in name or name.endswith(("_scale", "q_weight", "k_weight")):
            tensors[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            tensors[name] = torch.randn(shape, generator=generator) * (1.0 if "embed" in name else 0.15)
    return tensors


def tokenizer() -> Tokenizer:
    """One token a word; the last ones are words before them in capitals."""
    words = [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(NUM_TEXTS)]
    vocab = {word: i for i, word in enumerate([*words, *(word.upper() for word in words[: VOCAB - NUM_TEXTS])])}
    return Tokenizer(models.WordLevel(vocab, unk_token=words[0]))


def save_v41(folder: Path, more: Tensors | None = None, **changes: Any) -> V41:
    """A checkpoint as published; `more`: tensors beside those of the layers."""
    c = {**TEXT, **changes}
    c["engram_num_embeddings"] = [sum(sizes) for sizes in table_sizes(c)]
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (c["vocab_size"], c["hidden_size"]),
        "head.weight": (c["vocab_size"], c["hidden_size"]),
        "norm.weight": (c["hidden_size"],),
    }
    for i in range(c["num_hidden_layers"]):
        shapes |= layer_shapes(c, f"layers.{i}.", i, c["n_routed_experts"])
    w = random_tensors(shapes, seed=1)
    folder.mkdir(parents=True, exist_ok=True)
    images = {"vision.norm.weight": torch.ones(4), "aligner.w1.weight": torch.ones(2, 2), "image_start": torch.ones(4)}
    save_file({**w, **images, **(more or {})}, folder / "model.safetensors")
    config = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**config, "text_config": c}))
    tokenizer().save(str(folder / "tokenizer.json"))
    return V41(c, {**w, **(more or {})}, np.array([*range(NUM_TEXTS), *range(VOCAB - NUM_TEXTS)]))
