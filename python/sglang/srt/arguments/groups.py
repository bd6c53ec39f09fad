"""Groups of the server's options, in the order in which `--help` and the documents list them."""

from __future__ import annotations

MODEL = "model"
MEMORY = "memory and scheduling"
SERVING = "HTTP server"
PARALLEL = "parallelism"
KERNELS = "kernels"
SPECULATION = "speculative decoding"
MEDIA = "images and video"
ADAPTERS = "LoRA adapters"
OBSERVE = "logging and metrics"

GROUPS = (MODEL, MEMORY, SERVING, PARALLEL, KERNELS, SPECULATION, MEDIA, ADAPTERS, OBSERVE)

EFFECTIVE_IF_NONE = "Chosen at start-up if not given."
