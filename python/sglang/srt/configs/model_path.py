"""Finds a model's files: in a local directory or GGUF file, or by a Hugging Face id, whose files are downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang.srt.configs.csf_container import container_of, unpack_container
from sglang.srt.configs.gguf.files import PART, SUFFIX, in_folder, model_of
from sglang.srt.configs.gguf.packages import packaged_model
from sglang.srt.configs.gguf.tensors import INDEX_NAME
from sglang.srt.configs.gguf.unpack import unpack
from sglang.srt.errors import UserError

MASK_VECTOR_FILE = "mask_embedding.pt"
"""File beside a block draft's weights with the embedding of its mask tokens."""
_WEIGHT_FILES = ["*.safetensors", MASK_VECTOR_FILE]
_TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_MODEL_FILES = [*_TOKENIZER_FILES, *_WEIGHT_FILES]


def resolve_model_path(
    model_path: str,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    flag: str = "--model-path",
) -> Path:
    """Returns the directory that holds `model_path`, after a download if it is a Hugging Face id; without `weights` the
    download leaves them out. A model in GGUF (a file, a part of a split one, a folder with one, or ID:FILE of the hub)
    gets a directory. Raises UserError that names the `flag`."""
    local = Path(packaged_model(model_path) or model_path).expanduser()
    if local.is_dir():
        return _unpacked(local)
    if local.is_file():
        if local.suffix.lower() != SUFFIX:
            raise UserError(
                f"{flag} {model_path} is a file; give the directory that holds config.json, or a .gguf file."
            )
        return unpack(local)
    repo, _, wanted = model_path.partition(":")
    if not _is_hub_id(repo) or repo.lower().endswith(SUFFIX):
        raise UserError(f"{flag} {model_path} does not exist. Give a local directory or a Hugging Face id.")
    if wanted:
        return unpack(_download_gguf(repo, wanted, revision, download_dir, flag))
    patterns = _MODEL_FILES if weights else _TOKENIZER_FILES
    return _unpacked(_download(repo, revision, download_dir, patterns, flag))


def _unpacked(folder: Path) -> Path:
    """Returns the folder, or the model directory of the model in GGUF, or of the container, that it holds."""
    if (folder / INDEX_NAME).is_file():
        return folder
    container = container_of(folder)
    if container is not None:
        return unpack_container(container)
    file = in_folder(folder)
    return folder if file is None else unpack(file)


def _download_gguf(repo: str, wanted: str, revision: str | None, download_dir: str | None, flag: str) -> Path:
    """Downloads a model in GGUF: the file `wanted`, or the one whose name has `wanted` as a part, such as "Q8_0".
    Returns a file of the model. Raises UserError if there is none, or there are several."""
    name = wanted if wanted.lower().endswith(SUFFIX) else f"*{wanted}*{SUFFIX}"
    part = PART.fullmatch(name)
    folder = _download(repo, revision, download_dir, [f"{part['stem']}-*{SUFFIX}" if part else name], flag)
    if (folder / name).is_file():
        return folder / name
    paths = sorted(path for path in folder.rglob(f"*{SUFFIX}") if wanted in path.name and "mmproj" not in path.name)
    if not paths or len({model_of(path) for path in paths}) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in paths[:8]) or "none"
        raise UserError(f"{flag} {repo}:{wanted} must name one model in GGUF of {repo}; there are: {names}.")
    return paths[0]


def _is_hub_id(text: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return not text.startswith((".", "/", "~"))


def _download(repo_id: str, revision: str | None, download_dir: str | None, patterns: Sequence[str], flag: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    subject = f"{flag} {repo_id} is not a local directory, and as a Hugging Face model"
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(patterns),
            )
        )
    except GatedRepoError:
        raise UserError(f"{subject} it needs permission: accept its terms there and set HF_TOKEN.") from None
    except RevisionNotFoundError:
        raise UserError(f"{subject} it has no revision {revision}.") from None
    except RepositoryNotFoundError:
        raise UserError(f"{subject} it does not exist or is private. Check the name, or set HF_TOKEN.") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise UserError(
            f"{subject} it is neither in the local cache nor can the hub be reached (is HF_HUB_OFFLINE set?)."
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"{subject} it could not be downloaded: {error}") from None
