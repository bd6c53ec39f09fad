from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.errors import UserError


def test_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["/no/such/model", "./no-such-model", "~/no-such-model", "a/b/c", "has space"])
def test_missing_directory(path: str) -> None:
    with pytest.raises(UserError, match="does not exist. Give a local directory or a Hugging Face id"):
        resolve_model_path(path)


def test_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UserError, match="is a file; give the directory"):
        resolve_model_path(str(file))


def test_hub_id_that_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="--model-path some-owner/some-model is not a local directory, and as .* cache"):
        resolve_model_path("some-owner/some-model", download_dir=str(tmp_path))


def test_hub_errors_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    response = httpx.Response(404, request=httpx.Request("GET", "https://example.invalid"))
    for error, message in (
        (RepositoryNotFoundError, "does not exist or is private"),
        (RevisionNotFoundError, "no revision v9"),
    ):

        def fail(*_: object, error: type[Exception] = error, **__: object) -> None:
            raise error("no", response=response)  # type: ignore[call-arg]

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(UserError, match=message):
            resolve_model_path("some-owner/some-model", revision="v9", download_dir=str(tmp_path))
