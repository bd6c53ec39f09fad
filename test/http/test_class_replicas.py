"""A server of two replicas whose model a class of transformers computes: answers are those of its own `generate`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from live_server import live_server
from srt.models.harness import random_tokens
from srt.transformers_backend.found_facts import find_facts
from srt.transformers_backend.tiny import save_tiny

NEW_TOKENS = 8


@torch.inference_mode()
def generated(model: Any, ids: list[int]) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def test_replicas_of_a_class_answer_as_it_does(tmp_path: Path) -> None:
    model = save_tiny("olmo3", tmp_path)
    find_facts(tmp_path, skip_tokenizer_init=True)
    trunk = random_tokens(20, seed=1)
    prompts = [trunk + random_tokens(3 + i, seed=2 + i) for i in range(6)]
    params = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    flags = ("--skip-tokenizer-init", "--dp-size", "2", "--max-total-tokens", "1024", "--chunked-prefill-size", "16")
    with live_server("--model-path", str(tmp_path), *flags) as server:

        def ask(ids: list[int]) -> list[int]:
            reply = httpx.post(
                f"{server.url}/generate", json={"input_ids": ids, "sampling_params": params}, timeout=300
            )
            tokens: list[int] = reply.json()["output_ids"]
            return tokens

        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(ask, prompts))
        info = httpx.get(f"{server.url}/server_info", timeout=300).json()
    assert answers == [generated(model, ids) for ids in prompts]
    assert [state["num_generated_tokens"] > 0 for state in info["internal_states"]] == [True, True]
