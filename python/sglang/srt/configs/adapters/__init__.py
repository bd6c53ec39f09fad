"""LoRA adapters as PEFT stores them: a folder with adapter_config.json and adapter_model.safetensors. No torch."""
