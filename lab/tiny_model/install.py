"""Puts a finished model where the package finds it."""

from __future__ import annotations

import shutil
from pathlib import Path

EMBEDDED = Path(__file__).resolve().parents[2] / "python" / "sglang" / "embedded" / "tiny"
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)
MTP_FILES = ("mtp.safetensors", "model.safetensors.index.json")
MTP, APART = "mtp", ("eagle3", "dflash")
DRAFT_FILES = ("config.json", "model.safetensors")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
LARGEST_ADAPTERS = 300_000
"""Bytes of all adapters."""
LARGEST = 16 * 10**6
"""Bytes of the weights."""


def install(source: Path, target: Path = EMBEDDED) -> None:
    """Copies what is served; other files in `target` go, drafts of another model too. Raises ValueError before touching
    anything."""
    missing = [name for name in FILES if not (source / name).is_file()]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}; is it the output of `train`, and did training end?")
    size = (source / "model.safetensors").stat().st_size
    if size >= LARGEST:
        raise ValueError(f"the weights are {size:,} bytes, which is too much for the repository (limit {LARGEST:,})")
    target.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        if path.is_file() and path.name not in FILES:
            path.unlink()
    for name in FILES:
        shutil.copyfile(source / name, target / name)
        (target / name).chmod(0o644)


def install_drafts(source: Path, target: Path = EMBEDDED) -> None:
    """Copies the output of `drafts`: the layer beside the model's weights, the others beside the model's folder. Those
    that `source` lacks stay as they are. Raises ValueError before touching anything."""
    kinds = [kind for kind in (MTP, *APART) if (source / kind).is_dir()]
    if not kinds:
        raise ValueError(f"{source} has none of {MTP}, {', '.join(APART)}; is it the output of `drafts`?")
    copies: dict[Path, Path] = {}
    for kind in kinds:
        folder, names = (target, MTP_FILES) if kind == MTP else (target.parent / kind, DRAFT_FILES)
        copies |= {source / kind / name: folder / name for name in names}
    missing = [str(path) for path in copies if not path.is_file()]
    if missing:
        raise ValueError(f"{', '.join(missing)} are missing; is {source} the output of `drafts`?")
    for path, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        copy.chmod(0o644)


def install_eyes(source: Path, target: Path | None = None) -> None:
    """Writes the model that sees beside the text model's folder (or to `target`): its weights and the tower of
    `source`, the output of `eyes`. Raises ValueError before touching anything."""
    from tiny_model.seeing import VISION_FILE, write_seeing

    if not (source / VISION_FILE).is_file():
        raise ValueError(f"{source} lacks {VISION_FILE}; is it the output of `eyes`?")
    write_seeing(EMBEDDED, source / VISION_FILE, target or EMBEDDED.parent / "seeing")


def install_adapters(source: Path, target: Path | None = None) -> None:
    """Copies the output of `adapters` beside the text model's folder (or to `target`). Raises ValueError before
    touching anything."""
    folders = sorted(path for path in source.iterdir() if path.is_dir())
    missing = [str(folder / name) for folder in folders for name in ADAPTER_FILES if not (folder / name).is_file()]
    if not folders or missing:
        raise ValueError(f"{source} lacks {', '.join(missing) or 'adapters'}; is it the output of `adapters`?")
    size = sum((folder / name).stat().st_size for folder in folders for name in ADAPTER_FILES)
    if size > LARGEST_ADAPTERS:
        raise ValueError(f"the adapters are {size:,} bytes (limit {LARGEST_ADAPTERS:,})")
    for folder in folders:
        copy = (target or EMBEDDED.parent / "adapters") / folder.name
        copy.mkdir(parents=True, exist_ok=True)
        for name in ADAPTER_FILES:
            shutil.copyfile(folder / name, copy / name)
            (copy / name).chmod(0o644)
