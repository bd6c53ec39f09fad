"""Names of memory that trainers import, by the module's name in SGLang."""

from sglang.srt.utils import engine_state

GPU_MEMORY_TYPE_WEIGHTS = engine_state.WEIGHTS
GPU_MEMORY_TYPE_KV_CACHE = engine_state.KV_CACHE
GPU_MEMORY_TYPE_CUDA_GRAPH = engine_state.CUDA_GRAPH
