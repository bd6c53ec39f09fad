"""Draft heads in plain fp32 torch, written from the published formats: whole sequences, no cache, no batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: Tensor, theta: float, rot_dim: int = 0) -> Tensor:
    """x [n, heads, D] at positions 0 .. n - 1; pairs lie half of the rotated dims apart."""
    dim = rot_dim or x.shape[-1]
    angles = torch.arange(len(x))[:, None] / theta ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : dim // 2], x[..., dim // 2 : dim]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., dim:]), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True, sinks: Tensor | None = None) -> Tensor:
    """q [m, heads, D], k and v [n, heads, D] -> [m, heads * D]; causal with m = n. sinks [heads]: logits without a
    value."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    scores = (q @ k.transpose(1, 2)) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.tensor(False)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(scores[0]), 1)), dim=-1)
        v = F.pad(v, (0, 0, 0, 1))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def grouped_queries(x: Tensor, w: Weights, at: str, config: Mapping[str, Any]) -> Tensor:
    """x [n, in] -> [n, H] of `at`q_proj and so on, biases where there are any."""
    dim = config["head_dim"]
    q, k, v = (F.linear(x, w[f"{at}{p}_proj.weight"], w.get(f"{at}{p}_proj.bias")) for p in "qkv")
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in (q, k, v))
    q, k = rotate(q, config["rope_theta"]), rotate(k, config["rope_theta"])
    return attend(q, k, v, dim**-0.5) @ w[f"{at}o_proj.weight"].T


def gated_mlp(x: Tensor, w: Weights, at: str) -> Tensor:
    gate, up = x @ w[f"{at}gate_proj.weight"].T, x @ w[f"{at}up_proj.weight"].T
    return (F.silu(gate) * up) @ w[f"{at}down_proj.weight"].T


@dataclass
class Target:
    """What drafts read of a transformers model: embeddings, streams behind its layers, final hidden states, logits."""

    model: Any

    @torch.inference_mode()
    def streams(self, tokens: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """The residual stream [n, H] behind every layer, and the final hidden states."""
        outputs: list[Tensor] = []
        decoder = self.model.get_decoder()
        hooks = [
            layer.register_forward_hook(
                lambda module, args, out: outputs.append((out[0] if isinstance(out, tuple) else out)[0])
            )
            for layer in decoder.layers
        ]
        hidden = decoder(torch.tensor([list(tokens)])).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        return outputs, hidden

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        rows = self.model.get_input_embeddings().weight[torch.tensor(list(tokens))]
        norm = getattr(self.model.get_decoder(), "embed_norm", None)
        return rows if norm is None else norm(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        rows = getattr(self.model.config, "unpadded_vocab_size", None)
        return hidden @ self.model.get_output_embeddings().weight[:rows].T


Rows = Callable[[Sequence[int], Tensor], Tensor]
"""(tokens [n], features [n, H]) -> the states [n, H] of a draft."""


@torch.inference_mode()
def chain(tokens: list[int], features: Tensor, rows: Rows, logits: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Row i of token i + 1 and features i; every draft token is a row more, whose features are the state before it."""
    ids, given = list(tokens[1:]), []
    for _ in range(count):
        state = rows(ids, features)
        given.append(logits(state[-1]))
        ids.append(int(given[-1].argmax()))
        features = torch.cat((features, state[-1:]))
    return torch.stack(given)


@dataclass
class Eagle3:
    """`aux_layers`: the target's layers whose outputs are read, first to last."""

    w: Weights
    config: Mapping[str, Any]
    target: Target
    aux_layers: Sequence[int]
    before_residual: bool = False
    norm_output: bool = False

    def features(self, tokens: list[int]) -> Tensor:
        streams, _ = self.target.streams(tokens[:-1])
        eps, aux_hidden_states = self.config["rms_norm_eps"], [streams[layer] for layer in self.aux_layers]
        names = [f"fc_norm.{i}.weight" for i in range(len(aux_hidden_states))]
        if names[0] in self.w:
            aux_hidden_states = [
                rms(rows, self.w[name], eps) for rows, name in zip(aux_hidden_states, names, strict=True)
            ]
        joined = torch.cat(aux_hidden_states, dim=-1)
        joined = rms(joined, self.w["input_norm.weight"], eps) if "input_norm.weight" in self.w else joined
        return joined @ self.w["fc.weight"].T

    def rows(self, ids: Sequence[int], features: Tensor) -> Tensor:
        w, eps = self.w, self.config["rms_norm_eps"]
        normed = rms(features, w["layers.0.hidden_norm.weight"], eps)
        x = torch.cat((rms(self.target.embedded(ids), w["layers.0.input_layernorm.weight"], eps), normed), dim=-1)
        h = (normed if self.before_residual else features) + self.attention(x, 0)
        h = h + gated_mlp(rms(h, w["layers.0.post_attention_layernorm.weight"], eps), w, "layers.0.mlp.")
        for i in range(1, self.config["num_hidden_layers"]):
            h = h + self.attention(rms(h, w[f"layers.{i}.input_layernorm.weight"], eps), i)
            h = h + gated_mlp(rms(h, w[f"layers.{i}.post_attention_layernorm.weight"], eps), w, f"layers.{i}.mlp.")
        return rms(h, w["norm.weight"], eps) if self.norm_output else h

    def attention(self, x: Tensor, layer: int) -> Tensor:
        return grouped_queries(x, self.w, f"layers.{layer}.self_attn.", self.config)

    def logits(self, state: Tensor) -> Tensor:
        w = self.w
        state = state if self.norm_output else rms(state, w["norm.weight"], self.config["rms_norm_eps"])
        if "lm_head.weight" not in w:
            return self.target.logits(state)
        own = state @ w["lm_head.weight"].T
        if "d2t" not in w:
            return own
        return own.new_full((self.config["vocab_size"],), -torch.inf).index_copy(
            0, w["d2t"] + torch.arange(len(own)), own
        )

    def __call__(self, tokens: list[int], count: int) -> Tensor:
        return chain(tokens, self.features(tokens), self.rows, self.logits, count)


@dataclass
class DFlash:
    """A block of the last token and mask tokens over keys and values of the target's streams. `mask_vector`: the
    embedding of mask tokens, where it is not the target's."""

    w: Weights
    config: Mapping[str, Any]
    target: Target
    aux_layers: Sequence[int]
    mask_vector: Tensor | None = None

    @torch.inference_mode()
    def __call__(self, tokens: list[int], count: int) -> Tensor:
        """Logits [count, V] of the tokens behind the last one."""
        keys = self.config["dflash_config"]
        first = 0 if keys.get("shift_label") else 1
        size = self.config.get("block_size") or keys["block_size"]
        rows = self.rows(tokens, size, keys["mask_token_id"])[first : first + count]
        base = self.logits(rows)
        if keys.get("projector_type") == "domino":
            return domino(self.w, keys, self.target, rows, base, tokens[-1])
        return selected(self.w, keys, rows, base, tokens[-1]) if "selector_rank" in keys else base

    def logits(self, rows: Tensor) -> Tensor:
        """Of all tokens, by the target's head, or one for the tokens of `d2t` alone."""
        if "d2t" not in self.w:
            return self.target.logits(rows)
        return self.spread(rows @ self.w["lm_head.weight"].T, -torch.inf)

    def spread(self, values: Tensor, others: float) -> Tensor:
        """Values [..., rows of d2t] for all tokens."""
        tokens = self.w["d2t"] + torch.arange(len(self.w["d2t"]))
        whole = values.new_full((*values.shape[:-1], self.config["vocab_size"]), others)
        return whole.index_copy(-1, tokens, values)

    def rows(self, tokens: list[int], size: int, mask: int) -> Tensor:
        """The output [size, H] of a block behind all tokens but the last one."""
        w, eps = self.w, self.config["rms_norm_eps"]
        streams, _ = self.target.streams(tokens[:-1])
        aux = [streams[layer] for layer in self.aux_layers]
        if "aux_hidden_norms.0.weight" in w:
            aux = [rms(rows, w[f"aux_hidden_norms.{i}.weight"], eps) for i, rows in enumerate(aux)]
        context = rms(torch.cat(aux, dim=-1) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
        h = self.target.embedded([tokens[-1], *[mask] * (size - 1)])
        if self.mask_vector is not None:
            h = torch.cat((h[:1], self.mask_vector.expand(size - 1, -1)))
        for i in range(self.config["num_hidden_layers"]):
            at = f"layers.{i}."
            laguna = f"{at}self_attn.g_proj.weight" in w  # which norms the context as it norms its input
            known = rms(context, w[f"{at}input_layernorm.weight"], eps) if laguna else context
            attention = lambda x, at=at, known=known: self.attention(x, known, f"{at}self_attn.")  # noqa: E731
            x = rms(h, w[f"{at}input_layernorm.weight"], eps)
            h = h + between_convolutions(x, w, f"{at}attention_conv.", attention)
            x = rms(h, w[f"{at}post_attention_layernorm.weight"], eps)
            h = h + between_convolutions(x, w, f"{at}mlp_conv.", lambda x, at=at: gated_mlp(x, w, f"{at}mlp."))
        return rms(h, w["norm.weight"], eps)

    def attention(self, block: Tensor, context: Tensor, at: str) -> Tensor:
        w, dim, eps, theta = self.w, self.config["head_dim"], self.config["rms_norm_eps"], self.config["rope_theta"]
        rotated, keys = int(dim * self.config.get("partial_rotary_factor", 1.0)), self.config.get("dflash_config", {})
        rows = torch.cat((context, block))
        heads = [self.config["num_attention_heads"] * dim, *[self.config["num_key_value_heads"] * dim] * 2]
        fused = w.get(f"{at}qkv_proj.weight")
        parts = [w[f"{at}{part}_proj.weight"] for part in "qkv"] if fused is None else fused.split(heads)
        q, k, v = ((rows @ part.T).unflatten(-1, (-1, dim)) for part in parts)  # queries of the context are not used
        q, k = (rotate(rms(x, w[f"{at}{name}_norm.weight"], eps), theta, rotated) for x, name in ((q, "q"), (k, "k")))
        first = max(0, len(rows) - keys.get("swa_window_size", len(rows)))
        v, sinks = v * keys.get("attention_value_scale", 1.0), w.get(f"{at}attention_sink_bias")
        kinds = self.config.get("layer_types", ["full_attention"] * self.config["num_hidden_layers"])
        windowed = kinds[int(at.split(".")[1])] == "sliding_attention"
        if keys.get("causal") or self.config.get("is_causal", windowed):
            window, scale = self.config["sliding_window"] if windowed else len(rows), dim**-0.5
            sights = [(i, slice(max(0, i + 1 - window), i + 1)) for i in range(len(context), len(rows))]
            seen = torch.cat([attend(q[i : i + 1], k[sight], v[sight], scale, causal=False) for i, sight in sights])
        else:
            seen = attend(q[len(context) :], k[first:], v[first:], dim**-0.5, causal=False, sinks=sinks)
        if f"{at}g_proj.weight" in w:
            gates = F.softplus(block @ w[f"{at}g_proj.weight"].T)
            seen = (seen.unflatten(-1, (-1, dim)) * gates[..., None]).flatten(1)
        return seen @ w[f"{at}o_proj.weight"].T


def between_convolutions(x: Tensor, w: Weights, at: str, inner: Callable[[Tensor], Tensor]) -> Tensor:
    """DFlash 2: a block's rows x [n, H] are convolved before and behind what a layer computes of them."""
    if f"{at}base_kernel" not in w:
        return inner(x)
    base = w[f"{at}base_kernel"]  # [2, taps, H]
    made = (x @ w[f"{at}kernel_projection.weight"].T).view(len(x), 2, base.shape[1], -1)
    made = made.repeat_interleave(x.shape[1] // made.shape[-1], dim=-1)

    def convolved(rows: Tensor, side: int) -> Tensor:
        out = torch.zeros_like(rows)
        for i in range(len(rows)):
            for tap in range(min(base.shape[1], i + 1)):
                out[i] += (base[side, tap] + made[i, side, tap]) * rows[i - tap]
        return out

    return convolved(inner(convolved(x, 0)), 1)


def domino(w: Weights, keys: Mapping[str, Any], target: Target, rows: Tensor, base: Tensor, last: int) -> Tensor:
    """The logits of draft tokens that torch's own GRU has read the tokens before."""
    gru = torch.nn.GRU(rows.shape[1], keys["gru_hidden_dim"], bias=False)
    gru.load_state_dict({name: w[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
    tokens, given = [last], []
    for i, (row, logits) in enumerate(zip(rows, base, strict=True)):
        state = gru(target.embedded(tokens))[0][-1]
        if i >= keys["pure_draft_prefix_len"]:
            logits = logits + w["embed_proj.2.weight"] @ F.silu(w["embed_proj.0.weight"] @ torch.cat((row, state)))
        given.append(logits)
        tokens.append(int(logits.argmax()))
    return torch.stack(given)


def selected(w: Weights, keys: Mapping[str, Any], rows: Tensor, base: Tensor, last: int) -> Tensor:
    """The logits of draft tokens among the likeliest tokens of each place, by the one before it."""
    at, given = "candidate_selector.", []
    for row, logits in zip(rows, base, strict=True):
        context = w[f"{at}predecessor_codebook"][last] * (w[f"{at}hidden_projection.weight"] @ row)
        scores = logits + w[f"{at}successor_codebook"] @ context
        candidates = logits.argsort(descending=True)[: keys["selector_top_k"]]
        given.append(torch.full_like(logits, -torch.inf).index_copy(0, candidates, scores[candidates]))
        last = int(given[-1].argmax())
    return torch.stack(given)


@dataclass
class DSpark(DFlash):
    """As DFlash, with a bias of the token before each draft token; row i drafts the token behind position i, or
    row i + 1 with `sample_from_anchor` false."""

    @torch.inference_mode()
    def __call__(self, tokens: list[int], count: int) -> Tensor:
        rows = self.drafting_rows(tokens, count)
        given, previous, state = [], tokens[-1], torch.zeros(self.config["markov_rank"])
        for row, base in zip(rows, self.logits(rows), strict=True):
            bias, state = markov_bias(self.w, self.config["markov_head_type"], row, previous, state)
            given.append(base + (self.spread(bias, 0.0) if "d2t" in self.w else bias))
            previous = int(given[-1].argmax())
        return torch.stack(given)

    def drafting_rows(self, tokens: list[int], count: int) -> Tensor:
        """The rows [count, H] that make the draft tokens."""
        first = 0 if self.config.get("sample_from_anchor", True) else 1
        return self.rows(tokens, self.config["block_size"], self.config["mask_token_id"])[first : first + count]

    @torch.inference_mode()
    def confidences(self, tokens: list[int], draft_tokens: list[int]) -> Tensor:
        return confidences(self.w, self.drafting_rows(tokens, len(draft_tokens)), [tokens[-1], *draft_tokens[:-1]])


@dataclass
class Gemma4DSpark(DSpark):
    """As DSpark, with layers of Gemma 4 that attend to all tokens, transformers' rotation, scaled embeddings, and
    logits that are bent."""

    def logits(self, rows: Tensor) -> Tensor:
        cap = self.config["final_logit_softcapping"]
        return (self.target.logits(rows) / cap).tanh() * cap

    def rows(self, tokens: list[int], size: int, mask: int) -> Tensor:
        w, eps = self.w, self.config["rms_norm_eps"]
        streams, _ = self.target.streams(tokens[:-1])
        joined = torch.cat([streams[layer] for layer in self.aux_layers], dim=-1)
        context = rms(joined @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
        h = self.target.embedded([tokens[-1], *[mask] * (size - 1)]) * self.config["hidden_size"] ** 0.5
        for i in range(self.config["num_hidden_layers"]):
            at = f"layers.{i}."
            norm = lambda x, name, at=at: rms(x, w[f"{at}{name}_layernorm.weight"], eps)  # noqa: E731
            h = h + norm(self.attention(norm(h, "input"), context, f"{at}self_attn."), "post_attention")
            x = norm(h, "pre_feedforward")
            gate, up = (x @ w[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = (F.gelu(gate, approximate="tanh") * up) @ w[f"{at}mlp.down_proj.weight"].T
            h = (h + norm(x, "post_feedforward")) * w[f"{at}layer_scalar"]
        return rms(h, w["norm.weight"], eps)

    def attention(self, block: Tensor, context: Tensor, at: str) -> Tensor:
        from transformers import Gemma4TextConfig
        from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

        w, dim, eps = self.w, self.config["global_head_dim"], self.config["rms_norm_eps"]
        rows, ones = torch.cat((context, block)), torch.ones(dim)
        q, k = ((rows @ w[f"{at}{part}_proj.weight"].T).unflatten(-1, (-1, dim)) for part in "qk")
        v = rms(k, ones, eps)
        q, k = (rms(x, w[f"{at}{name}_norm.weight"], eps) for x, name in ((q, "q"), (k, "k")))
        rotary = Gemma4TextRotaryEmbedding(Gemma4TextConfig(**self.config))
        cos, sin = (x[0][:, None] for x in rotary(rows, torch.arange(len(rows))[None], "full_attention"))
        q, k = (x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1) * sin for x in (q, k))
        return attend(q[len(context) :], k, v, 1.0, causal=False) @ w[f"{at}o_proj.weight"].T


@torch.inference_mode()
def confidences(w: Weights, rows: Tensor, tokens: Sequence[int], at: str = "") -> Tensor:
    """How likely each draft token [n] stands, of the rows [n, H] that made them and the token before each."""
    latent = w[f"{at}markov_head.markov_w1.weight"][torch.tensor(list(tokens))]
    bias = w.get(f"{at}confidence_head.proj.bias", torch.zeros(1))
    return F.linear(torch.cat((rows, latent), dim=-1), w[f"{at}confidence_head.proj.weight"], bias)[:, 0].sigmoid()


def markov_bias(w: Weights, kind: str, row: Tensor, previous: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """The bias [V] of the draft token behind a token, and the state behind it."""
    latent = w["markov_head.markov_w1.weight"][previous]
    if kind == "gated":
        gate = F.linear(torch.cat((row, latent)), w["markov_head.gate_proj.weight"], w["markov_head.gate_proj.bias"])
        latent = gate.sigmoid() * latent
    elif kind == "rnn":
        joint = F.linear(
            torch.cat((state, latent, row)), w["markov_head.joint_proj.weight"], w["markov_head.joint_proj.bias"]
        )
        gate, candidate, out = joint.chunk(3)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        latent = out.tanh()
    return w["markov_head.markov_w2.weight"] @ latent, state
