"""Finds a model's files: in a local directory, or by a Hugging Face id, whose files are downloaded."""

from __future__ import annotations

from pathlib import Path

from sglang.srt.errors import UserError

_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_TOKENIZER_FILES = [pattern for pattern in _MODEL_FILES if pattern != "*.safetensors"]


def resolve_model_path(
    model_path: str,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    flag: str = "--model-path",
) -> Path:
    """Returns the directory that holds `model_path`, after a download if it is a Hugging Face id; without `weights` the
    download leaves them out. Raises UserError that names the `flag`."""
    local = Path(model_path).expanduser()
    if local.is_dir():
        return local
    if local.is_file():
        raise UserError(f"{flag} {model_path} is a file; give the directory that holds config.json.")
    if not _is_hub_id(model_path):
        raise UserError(f"{flag} {model_path} does not exist. Give a local directory or a Hugging Face id.")
    return _download(model_path, revision, download_dir, weights, flag)


def _is_hub_id(text: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return not text.startswith((".", "/", "~"))


def _download(repo_id: str, revision: str | None, download_dir: str | None, weights: bool, flag: str) -> Path:
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
                allow_patterns=_MODEL_FILES if weights else _TOKENIZER_FILES,
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
