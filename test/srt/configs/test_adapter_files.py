"""Adapters as PEFT writes them: ranks and factors by pattern, names of other writers; and what is refused, by name."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang.srt.configs.adapters import files as adapter_files
from sglang.srt.configs.adapters.arguments import NamedAdapter, named_adapters
from sglang.srt.configs.adapters.config import AdapterConfig, adapter_config
from sglang.srt.configs.adapters.files import content_id, read_adapter_files
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

MODULE = "model.layers.0.self_attn.q_proj"
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "embed_tokens"]}


def config(**values: Any) -> AdapterConfig:
    return adapter_config({**PLAIN, **values}, "adapter_config.json")


def pair(module: str = MODULE, rank: int = 4, **sides: torch.Tensor) -> dict[str, torch.Tensor]:
    name = f"base_model.model.{module}"
    return {f"{name}.lora_A.weight": torch.ones(rank, 6), f"{name}.lora_B.weight": torch.ones(8, rank), **sides}


def embedding(base: torch.Tensor) -> dict[str, torch.Tensor]:
    name = "base_model.model.model.embed_tokens"
    return {
        f"{name}.lora_embedding_A": torch.ones(4, 6), f"{name}.lora_embedding_B": torch.ones(8, 4),
        f"{name}.base_layer.weight": base,
    }  # fmt: skip


def written(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **values: Any) -> Path:
    safetensors.torch.save_file(pair() if tensors is None else tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **values}))
    return folder


def test_factors() -> None:
    assert config().scaling_of(MODULE) == 2.0
    assert config(use_rslora=True).scaling_of(MODULE) == 8 / math.sqrt(4)
    assert config(lora_alpha=3.5).scaling_of(MODULE) == 3.5 / 4


@pytest.mark.parametrize(
    ("pattern", "rank"),
    [
        ({"q_proj": 7}, 7),
        ({"self_attn.q_proj": 7}, 7),
        ({"layers.0.self_attn.q_proj": 7, "q_proj": 9}, 7),
        ({"q_proj": 9, "layers.0.self_attn.q_proj": 7}, 9),  # the first one counts
        ({"k_proj": 7, "xq_proj": 7, "proj": 7, "layers.1.self_attn.q_proj": 7}, 4),
        ({f"^{MODULE}": 7}, 7),
        ({"^self_attn.q_proj": 7}, 4),
        ({"self_attn\\.q_proj": 7}, 7),
        ({"(k|q)_proj": 7}, 7),
        ({"(k|v)_proj": 7, r".*layers\.[1-9].*": 7}, 4),
        ({r".*\.layers\.(0|3)\..*": 7}, 7),
        ({r"q_pro.": 7, "q_proj": 9}, 7),
    ],
)
def test_patterns(pattern: dict[str, int], rank: int) -> None:
    assert config(rank_pattern=pattern).rank_of(MODULE) == rank
    alphas = config(alpha_pattern=pattern, r=1)
    assert alphas.scaling_of(MODULE) == (8 if rank == 4 else rank)


def test_a_pattern_has_little_time() -> None:
    with pytest.raises(UserError, match="too long to match"):
        config(rank_pattern={r"(\w|\w\w|\w?)+\d[xy]": 7}).rank_of("model.layers.0." + "a" * 200)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),
        ({"target_modules": ["o_proj"]}, False),
        ({"target_modules": ["self_attn.q_proj"]}, True),
        ({"target_modules": "all-linear"}, True),
        ({"target_modules": "(a+)+$"}, True),  # never run: PEFT wrote tensors of what it chose
        ({"layers_to_transform": [0, 2]}, True),
        ({"layers_to_transform": 1}, False),
        ({"layers_to_transform": []}, True),
    ],
)
def test_modules(values: dict[str, Any], expected: bool) -> None:
    assert config(**values).expects(MODULE) is expected


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_parameters": [7]}, "target_parameters"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": ["pissa"]}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"of_next_year": 1}, "of_next_year"),
        ({"r": 10**9}, "1 to 512"),
        ({"r": 0}, "1 to 512"),
        ({"r": True}, "type int"),
        ({"r": "8"}, "type int"),
        ({"rank_pattern": {"q_proj": 10**9}}, "1 to 512"),
        ({"rank_pattern": {"(q|k_proj": 8}}, "no pattern"),
        ({"rank_pattern": {"q" * 2000: 8}}, "no pattern"),
        ({"rank_pattern": [8]}, "object"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "finite"),
        ({"lora_alpha": float("inf")}, "finite"),
        ({"target_modules": [1]}, "target_modules"),
        ({"layers_to_transform": [-1]}, "layers_to_transform"),
        ({"layers_to_transform": "0"}, "layers_to_transform"),
    ],
)
def test_refused_configs(values: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part.replace("(", r"\(")):
        config(**values)


def test_what_changes_nothing_is_ignored() -> None:
    same = config(
        init_lora_weights="gaussian", fan_in_fan_out=True, lora_dropout=0.1, inference_mode=True, use_dora=False,
        modules_to_save=None, exclude_modules=[], layers_pattern="layers", of_next_year=None,
    )  # fmt: skip
    assert same == config()


def test_which_modules_a_list_names() -> None:
    some = config(target_modules=["q_proj", "o_proj"], exclude_modules=["o_proj"], layers_to_transform=[1])
    assert [some.names(f"model.layers.{i}.self_attn.{name}") for i in (0, 1) for name in ("q_proj", "o_proj")] == [
        False, False, True, False,
    ]  # fmt: skip
    for patterns in ({"target_modules": ".*_proj"}, {"target_modules": ["q_proj"], "exclude_modules": ".*o_proj"}):
        assert not config(**patterns).names("model.layers.1.self_attn.q_proj")


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.{}.lora_{}.weight",
        "{}.lora_{}.weight",
        "base_model.model.{}.lora_{}.default.weight",
    ],
)
def test_names_of_tensors(tmp_path: Path, name: str) -> None:
    tensors = {name.format(MODULE, "A"): torch.ones(4, 6), name.format(MODULE, "B"): torch.ones(8, 4)}
    (one,) = read_adapter_files(written(tmp_path, tensors)).pairs.items()
    assert one[0] == MODULE and (one[1].inputs, one[1].outputs, one[1].rank) == (6, 8, 4)


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ({}, "no tensors"),
        (pair(rank=5), "rank 4"),
        (pair("model.layers.0.self_attn.k_proj"), "none of the modules"),
        ({"base_model.model.x.lora_embedding_A": torch.ones(4, 6)}, "only one"),
        (pair() | {"model.embed_tokens.base_layer.weight": torch.ones(8, 6)}, "not replaced"),
        (pair() | {"lm_head.base_layer.weight": torch.ones(8, 6)}, "not replaced"),
        (embedding(base=torch.ones(7, 8)), r"\[7, 8\], its A and B are of \[8, 6\]"),
        (embedding(base=torch.ones(6, 8).to(torch.int8)), "base_layer.weight is I8"),
        (pair() | {"x.lora_magnitude_vector.weight": torch.ones(8)}, "does not say use_dora"),
        (pair() | {f"base_model.model.{MODULE}.lora_embedding_A": torch.ones(4, 6)}, "only one of them can be meant"),
        (
            pair() | {f"base_model.model.{MODULE}.lora_A.default.weight": torch.ones(4, 6)},
            "only one of them can be meant",
        ),
        ({f"{MODULE}.lora_A": torch.ones(0, 4, 6), f"{MODULE}.lora_B": torch.ones(0, 8, 4)}, r"lora_A \[0, 4, 6\]"),
        (pair() | {"lm_head.weight": torch.ones(8, 6)}, "lm_head.weight"),
        ({f"{MODULE}.lora_A.weight": torch.ones(4, 6)}, "only one"),
        (pair() | {f"base_model.model.{MODULE}.lora_A.weight": torch.ones(4)}, "matrix of floats"),
        (pair() | {f"base_model.model.{MODULE}.lora_A.weight": torch.ones(4, 6).to(torch.int32)}, "matrix of floats"),
    ],
)
def test_refused_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor], part: str) -> None:
    with pytest.raises(UserError, match=part):
        read_adapter_files(written(tmp_path, tensors))


MAGNITUDE = f"base_model.model.{MODULE}.lora_magnitude_vector"


@pytest.mark.parametrize("name", ["{}", "{}.weight", "{}.default.weight"])
def test_lengths_of_rows(tmp_path: Path, name: str) -> None:
    """As PEFT's versions call them."""
    files = read_adapter_files(written(tmp_path, pair() | {name.format(MAGNITUDE): torch.ones(8)}, use_dora=True))
    assert files.scales_rows and files.pairs[MODULE].magnitude == name.format(MAGNITUDE)


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        (pair(), "has no lora_magnitude_vector"),
        (pair() | {MAGNITUDE: torch.ones(7)}, r"F32 \[7\], its B is of \[8\]"),
        (pair() | {MAGNITUDE: torch.ones(8, 1)}, r"F32 \[8, 1\]"),
        (pair() | {MAGNITUDE: torch.ones(8).to(torch.int8)}, "I8"),
        (pair() | {MAGNITUDE: torch.ones(8), "x.lora_magnitude_vector": torch.ones(8)}, "no A and B beside it"),
        (pair() | {MAGNITUDE: torch.ones(8), f"{MAGNITUDE}.weight": torch.ones(8)}, "only one of them can be meant"),
        ({f"{MODULE}.lora_A": torch.ones(2, 4, 6), f"{MODULE}.lora_B": torch.ones(2, 8, 4)}, "rows of experts are not"),
    ],
)
def test_refused_lengths(tmp_path: Path, tensors: dict[str, torch.Tensor], part: str) -> None:
    with pytest.raises(UserError, match=part):
        read_adapter_files(written(tmp_path, tensors, use_dora=True))


def test_the_embedding_and_a_head_tied_to_it(tmp_path: Path) -> None:
    """With `ensure_weight_tying` PEFT writes A and B of both, and names the embedding alone."""
    tensors = embedding(base=torch.ones(6, 8)) | pair("lm_head")
    for tied in (False, True):
        written(tmp_path, tensors, target_modules=["model.embed_tokens"], ensure_weight_tying=tied)
        if not tied:
            with pytest.raises(UserError, match="lm_head is none of the modules"):
                read_adapter_files(tmp_path)
    files = read_adapter_files(tmp_path)
    assert {name: (each.inputs, each.outputs) for name, each in files.pairs.items()} == {
        "model.embed_tokens": (6, 8), "lm_head": (6, 8),
    }  # fmt: skip
    assert files.bases == {"model.embed_tokens": "base_model.model.model.embed_tokens.base_layer.weight"}


class Trap:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/pickle-was-loaded"),)


def test_hostile_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path)
    weights, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    (folder / "new_embeddings.safetensors").touch()
    with pytest.raises(UserError, match="new_embeddings"):
        read_adapter_files(folder)
    (folder / "new_embeddings.safetensors").unlink()
    for damage in (b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little") + b"{}", b"\x08" + b"\0" * 7 + b"[[[[[[[["):
        weights.write_bytes(damage)
        with pytest.raises(UserError, match="safetensors"):
            read_adapter_files(folder)
    weights.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    with pytest.raises(UserError, match="safetensors"):
        read_adapter_files(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match="pickle.*save_pretrained"):
        read_adapter_files(folder)
    assert not Path("/tmp/pickle-was-loaded").exists()
    settings.write_text("[" * 100_000)
    with pytest.raises(UserError, match="JSON"):
        read_adapter_files(folder)
    settings.write_text("x" * (5 << 20))
    with pytest.raises(UserError, match="MiB"):
        read_adapter_files(folder)
    settings.unlink()
    with pytest.raises(UserError, match="does not look like"):
        read_adapter_files(folder)
    written(tmp_path)
    monkeypatch.setattr(adapter_files, "MAX_TENSORS", 1)
    with pytest.raises(UserError, match="limit"):
        read_adapter_files(folder)


def test_content_ids(tmp_path: Path) -> None:
    """Of what is computed, wherever it lies."""
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    changed = pair() | {f"base_model.model.{MODULE}.lora_A.weight": torch.zeros(4, 6)}
    written(folders[0])
    written(folders[1])
    written(folders[2], changed)
    written(folders[3], lora_alpha=9)
    first, *others = map(content_id, folders)
    assert first == others[0]
    assert len({*others}) == 3


@pytest.mark.parametrize(
    ("entry", "adapter"),
    [
        ("/x/y", NamedAdapter("/x/y", "/x/y")),
        ("a=/x=y", NamedAdapter("a", "/x=y")),
        ('{"lora_name": "a", "lora_path": "b", "pinned": true}', NamedAdapter("a", "b", True)),
    ],
)
def test_named_adapters(entry: str, adapter: NamedAdapter) -> None:
    assert named_adapters([entry]) == [adapter]


def test_adapters_as_objects() -> None:
    """As `Engine` takes them."""
    for given in (
        {"a": Path("/x"), "b=": "/y"},
        [{"lora_name": "a", "lora_path": "/x"}, {"lora_name": "b=", "lora_path": "/y"}],
    ):
        args = ServerArgs.from_kwargs(model_path="m", device="cpu", lora_paths=given, max_loras_per_batch=2)
        assert named_adapters(args.lora_paths or ()) == [NamedAdapter("a", "/x"), NamedAdapter("b=", "/y")]
    mixed: Any = [{"lora_name": "a", "lora_path": "/x", "pinned": True}, "b=/y"]
    args = ServerArgs.from_kwargs(model_path="m", device="cpu", lora_paths=mixed, max_loras_per_batch=2)
    assert named_adapters(args.lora_paths or ()) == [NamedAdapter("a", "/x", True), NamedAdapter("b", "/y")]
    for given in ({"a": 1}, [7], [{"lora_name": "a"}]):
        with pytest.raises(UserError, match="lora|needs a path"):
            ServerArgs.from_kwargs(model_path="m", device="cpu", lora_paths=given)


@pytest.mark.parametrize(
    "entries", [["a=x", "a=y"], ["=x"], ["a="], ["{}"], ["{"], ['{"lora_name": 1, "lora_path": 2}'], ["a\n=x"]]
)
def test_refused_names(entries: list[str]) -> None:
    with pytest.raises(UserError):
        named_adapters(entries)
