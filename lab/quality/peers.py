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
    """Returns the final hidden states [n, H] of each prompt, as llama.cpp computes them from a GGUF file, rounded to
    bfloat16 as `head` takes them. Needs the package llama-cpp-python, built for the device."""
    import llama_cpp
    import numpy as np

    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    model_params, params = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    model_params.n_gpu_layers = 999 if device == "cuda" else 0
    model_params.use_extra_bufts = False  # weights stay in the file's blocks
    params.n_threads = params.n_threads_batch = torch.get_num_threads()
    params.n_ctx = params.n_batch = params.n_ubatch = max(map(len, prompts))
    params.embeddings, params.pooling_type = True, llama_cpp.LLAMA_POOLING_TYPE_NONE
    model = llama_cpp.llama_model_load_from_file(file.encode(), model_params)
    context = llama_cpp.llama_init_from_model(model, params)
    size, states = llama_cpp.llama_model_n_embd(model), []
    for ids in prompts:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens = (llama_cpp.llama_token * len(ids))(*ids)  # which the batch points to
        batch = llama_cpp.llama_batch_get_one(tokens, len(ids))
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        values = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings(context), (len(ids), size))
        states.append(torch.from_numpy(values.copy()).bfloat16().float())
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return states
