"""Greedy tokens of transformers and of a running server, prompt by prompt."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tiny_model.heldout import all_items
from tiny_model.render import prompt_text

STOP = "Question"
"""The stop string of text that is continued, as in benchmark/evals."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two continuations part. `margin` is how much transformers prefers its own token, in units of the logits: a
    small one is a tie that rounding decides."""

    id: str
    position: int
    reference: str
    server: str
    margin: float


class Reference:
    """transformers, one prompt at a time, as a user would call it."""

    def __init__(self, directory: Path, device: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        self.model = model.to(device).eval()
        self.ends = set(self.model.generation_config.eos_token_id)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], most: int) -> tuple[list[int], list[float]]:
        """New tokens with the end token, and the margin of each over the second best."""
        ids = torch.tensor([prompt], device=self.model.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = [logits[0].float().topk(2).values for logits in out.logits]
        return out.sequences[0, len(prompt) :].tolist(), [float(b[0] - b[1]) for b in best]


def server_greedy(url: str, prompt: list[int], most: int) -> list[int]:
    """The same from the server's native route, which takes and gives token ids."""
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": most}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return list(json.loads(response.read())["output_ids"])
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}/generate answered {error.code}: {error.read()[:300]!r}") from error
    except urllib.error.URLError as error:
        raise ValueError(f"no server at {url}: {error.reason}") from error


def first_difference(reference: list[int], server: list[int]) -> int | None:
    """None if they are the same."""
    if reference == server:
        return None
    pairs = zip(reference, server, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(server)))


def until(tokenizer: Tokenizer, ids: list[int], stop: str) -> list[int]:
    """Up to the token that completes `stop`, with it."""
    ends = (end for end in range(1, len(ids)) if stop in tokenizer.decode(ids[:end], skip_special_tokens=False))
    return ids[: next(ends, len(ids))]


def compare(args: argparse.Namespace) -> int:
    """The exit status: 0 if enough prompts agree."""
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    reference = Reference(args.model, args.device, args.dtype)
    differences: list[Difference] = []
    total = tokens = 0
    for item in all_items(args.count):
        text = prompt_text(item.problem, item.thinking)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        wanted, margins = reference.greedy(prompt, args.max_new_tokens)
        got = server_greedy(args.base_url, prompt, args.max_new_tokens)
        if item.problem.prompt:  # nobody reads on after the stop string: what follows is not an answer
            wanted, got = until(tokenizer, wanted, STOP), until(tokenizer, got, STOP)
        place = first_difference(_without_end(wanted, reference.ends), _without_end(got, reference.ends))
        total, tokens = total + 1, tokens + len(wanted)
        if place is not None:
            ours, theirs = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (got, wanted))
            differences.append(Difference(item.id, place, theirs, ours, margins[min(place, len(margins) - 1)]))
    same = (total - len(differences)) / total
    print(f"{total - len(differences)} of {total} prompts ({100 * same:.2f}%): the same tokens; {tokens} tokens")
    for found in differences[:20]:
        print(
            f"  {found.id}, token {found.position}, margin {found.margin:.3g}: {found.reference!r} / {found.server!r}"
        )
    if args.output:
        write_report(args.output, total, tokens, differences)
    return 0 if same >= args.least else 1


def _without_end(ids: list[int], ends: set[int]) -> list[int]:
    """Whether the token that ends an answer is part of it is a matter of the interface."""
    return ids[:-1] if ids and ids[-1] in ends else ids


def write_report(path: Path, total: int, tokens: int, differences: list[Difference]) -> None:
    report: dict[str, Any] = {
        "prompts": total,
        "tokens": tokens,
        "same": (total - len(differences)) / total,
        "differences": [{name: getattr(d, name) for name in d.__slots__} for d in differences],
    }
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
