"""The same text in other engines: transformers with the weights in 16 bits, llama.cpp with those of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def hidden_states(checkpoint: str, prompts: Sequence[Sequence[int]], device: str) -> list[torch.Tensor]:
    """Returns the final hidden states [n, H] fp32 of each prompt, as transformers computes them in bfloat16."""
    from transformers import AutoModelForCausalLM  # takes seconds, which other cells need not spend

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device)
    rows = (torch.tensor([list(ids)], device=device) for ids in prompts)
    return [model.model(ids).last_hidden_state[0].float() for ids in rows]


def hidden_states_of_llama_cpp(file: str, prompts: Sequence[Sequence[int]], device: str) -> list[torch.Tensor]:
    """Returns the final hidden states [n, H] fp32 of each prompt, as llama.cpp computes them from a GGUF file. Needs
    the package llama-cpp-python, built for the device."""
    import llama_cpp
    import numpy as np

    most = max(map(len, prompts))
    model = llama_cpp.Llama(
        file, n_ctx=most, n_batch=most, n_ubatch=most, embedding=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_NONE,
        n_gpu_layers=-1 if device == "cuda" else 0, verbose=False,
    )  # fmt: skip
    states = []
    for ids in prompts:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(model.ctx), True)
        batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * len(ids))(*ids), len(ids))
        if status := llama_cpp.llama_decode(model.ctx, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        values = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings(model.ctx), (len(ids), model.n_embd()))
        states.append(torch.from_numpy(values.copy()))
    return states
