"""The model that ships with the package, so that a server can be tried without a download: as a text model, and with
eyes, which is the default. Its drafts are a layer for multi-token prediction in the text model's own folder, an EAGLE-3
head and a DFlash draft; its LoRA adapters change the manner of its answers."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL_PATH = str(Path(__file__).parent / "tiny")
EAGLE3_PATH = str(Path(__file__).parent / "eagle3")
SEEING_PATH = str(Path(__file__).parent / "seeing")
DFLASH_PATH = str(Path(__file__).parent / "dflash")
ADAPTERS_PATH = str(Path(__file__).parent / "adapters")
