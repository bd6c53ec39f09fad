"""New weights in a running engine: its tokens are those of an engine that was started with them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from forked_servers import forked_children
from live_server import free_port
from other_weights import write_other_weights
from safetensors.torch import load_file, save_file

import sglang
from sglang.embedded import DEFAULT_MODEL_PATH, EAGLE3_PATH
from sglang.srt.managers.front.generate_request import RequestError

PROMPTS = ["The capital of France is", "One, two, three,", "What is 15+27?"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with other weights."""
    return write_other_weights(tmp_path_factory.mktemp("other") / "model")


def engine(**flags: Any) -> sglang.Engine:
    return sglang.Engine(**{"model_path": DEFAULT_MODEL_PATH, "dtype": "float32", "max_total_tokens": 2048, **flags})


def tokens(served: sglang.Engine) -> list[list[int]]:
    return [answer["output_ids"] for answer in served.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def expected(other: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of fresh engines with both weights."""
    both = []
    for path in (DEFAULT_MODEL_PATH, str(other)):
        with forked_children(), engine(model_path=path) as fresh:
            both.append(tokens(fresh))
    assert both[0] != both[1]
    return both[0], both[1]


@pytest.fixture(scope="module")
def served() -> Iterator[sglang.Engine]:
    with forked_children(), engine() as running:
        yield running


def test_from_disk_and_back_without_a_flush(served: sglang.Engine, other: Path, expected: Any) -> None:
    old, new = expected
    assert tokens(served) == old
    assert served.update_weights_from_disk(str(other), flush_cache=False, weight_version="v2")[0]
    answers = served.generate(PROMPTS, GREEDY)
    assert [answer["output_ids"] for answer in answers] == new
    assert {answer["meta_info"]["cached_tokens"] for answer in answers} == {0}  # none of the old weights
    assert {answer["meta_info"]["weight_version"] for answer in answers} == {"v2"}
    assert served.update_weights_from_disk(DEFAULT_MODEL_PATH)[0]
    assert tokens(served) == old


def test_a_failed_update_leaves_the_old_weights(
    served: sglang.Engine, other: Path, tmp_path: Path, expected: Any
) -> None:
    tensors = load_file(other / "model.safetensors")
    name = sorted(tensors)[len(tensors) // 2]
    cases = {
        "lacks": {key: t for key, t in tensors.items() if key != name},
        "does not have": tensors | {"model.extra.weight": torch.ones(2)},
        "shape": tensors | {name: torch.ones(3, 5)},
        "NaN": tensors | {name: torch.full_like(tensors[name], torch.nan)},
    }
    for i, (said, wrong) in enumerate(cases.items()):
        folder = Path(shutil.copytree(other, tmp_path / str(i)))
        save_file(wrong, folder / "model.safetensors")
        ok, message, _ = served.update_weights_from_disk(str(folder))
        assert not ok and said in message
        assert tokens(served) == expected[0]
    assert not served.update_weights_from_disk(str(tmp_path / "nothing"))[0]


def test_tensors_whole_and_in_part(served: sglang.Engine, other: Path, expected: Any) -> None:
    old, new = expected
    tensors = load_file(other / "model.safetensors")
    names = sorted(tensors)
    assert served.begin_weight_update()[0] and not served.begin_weight_update()[0]
    for part in (names[::2], names[1::2]):
        ok, said = served.update_weights_from_tensor([(name, tensors[name]) for name in part])
        assert ok, said
    assert served.end_weight_update()[0] and not served.end_weight_update()[0]
    assert tokens(served) == new
    wrong = [(names[0], torch.full_like(tensors[names[0]], torch.nan)), (names[1], tensors[names[1]])]
    for sent, said in (
        (wrong, "NaN"),
        ([("nothing.weight", torch.ones(1))], "no such"),
        ([(names[0], torch.ones(3))], "shape"),
    ):
        ok, message = served.update_weights_from_tensor(sent)
        assert not ok and said in message
        assert tokens(served) == new
    ok, message = served.update_weights_from_tensor([(names[0], tensors[names[0]])], selector="draft")
    assert not ok and "no draft" in message
    back = load_file(Path(DEFAULT_MODEL_PATH) / "model.safetensors")
    assert served.update_weights_from_tensor(back.items())[0]  # as older clients: without begin and end
    assert tokens(served) == old


def test_checksums_snapshots_and_reset(served: sglang.Engine, other: Path, expected: Any) -> None:
    served.check_weights("snapshot")
    first = served.check_weights()["per_engine_checksum"]
    name = "model.layers.0.self_attn.q_proj.weight"
    values = load_file(Path(DEFAULT_MODEL_PATH) / "model.safetensors")[name].flatten()[:5].float().tolist()
    assert served.get_weights_by_name(name, 5) == values
    served.check_weights("reset_tensors")
    with pytest.raises(RequestError, match="cannot be used"):
        tokens(served)
    assert served.update_weights_from_disk(DEFAULT_MODEL_PATH)[0]
    served.check_weights("compare")
    assert served.check_weights()["per_engine_checksum"] == first
    assert tokens(served) == expected[0]


@pytest.mark.parametrize("flags", [{"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}], ids=str)
def test_all_ranks_have_the_new_weights(flags: dict[str, int], other: Path, expected: Any) -> None:
    with forked_children(), engine(**flags) as running:
        ok, said, _ = running.update_weights_from_disk(str(other))
        assert ok, said
        assert tokens(running) == expected[1]


def test_drafts_get_the_weights_of_their_model(other: Path, expected: Any) -> None:
    flags = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": EAGLE3_PATH}
    with forked_children(), engine(**flags) as running:
        assert tokens(running) == expected[0]
        ok, said, _ = running.update_weights_from_disk(str(other))
        assert ok, said
        assert tokens(running) == expected[1]  # verified by the model, whatever the draft says
        tensors = load_file(Path(DEFAULT_MODEL_PATH) / "model.safetensors")
        assert running.update_weights_from_tensor(tensors.items(), selector="target")[0]
        assert tokens(running) == expected[0]


def write_adapter(folder: Path) -> Path:
    """A random LoRA adapter of the embedded model's queries."""
    config = json.loads((Path(DEFAULT_MODEL_PATH) / "config.json").read_text())
    height, hidden = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    generator, tensors = torch.Generator().manual_seed(3), {}
    for layer in range(config["num_hidden_layers"]):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{module}.lora_A.weight"] = torch.randn(4, hidden, generator=generator)
        tensors[f"{module}.lora_B.weight"] = torch.randn(height, 4, generator=generator) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def test_adapters_stay_over_the_new_weights(other: Path, tmp_path: Path) -> None:
    flags = {"lora_paths": [f"a={write_adapter(tmp_path / 'a')}"], "lora_target_modules": ["all"], "max_lora_rank": 4}

    def both(running: sglang.Engine) -> list[list[int]]:
        return [running.generate(PROMPTS[0], GREEDY, lora_path=name)["output_ids"] for name in (None, "a")]

    with forked_children(), engine(model_path=str(other), **flags) as fresh:
        want = both(fresh)
    assert want[0] != want[1]
    with forked_children(), engine(**flags) as running:
        assert both(running) != want
        names = running.check_weights()["ranks"][0]["checksums"]
        assert names and not [name for name in names if "adapters" in name]  # their slots are no weights of the model
        ok, said, _ = running.update_weights_from_disk(str(other), flush_cache=False)
        assert ok, said
        assert both(running) == want


def test_quantized_weights_sent_as_tensors(other: Path) -> None:
    tensors = load_file(other / "model.safetensors")
    with forked_children(), engine(model_path=str(other), quantization="fp8") as fresh:
        want = tokens(fresh)
    with forked_children(), engine(quantization="fp8") as running:
        assert tokens(running) != want
        assert running.begin_weight_update()[0]
        names = sorted(tensors)
        for part in (names[::2], names[1::2]):
            assert running.update_weights_from_tensor([(name, tensors[name]) for name in part])[0]
        ok, said = running.end_weight_update()
        assert ok, said
        assert tokens(running) == want


def test_requests_in_place_keep_their_cache_to_themselves(served: sglang.Engine, other: Path, expected: Any) -> None:
    prompt, params = "Tell me a long story about numbers.", {**GREEDY, "max_new_tokens": 300}
    stream = iter(served.generate(prompt, params, stream=True))
    next(stream)
    served.pause_generation("in_place")
    ok, said, paused = served.update_weights_from_disk(str(other), weight_version="mixed")
    assert ok and paused == 1 and "not flushed" in said
    served.continue_generation()
    *_, last = stream
    assert last["meta_info"]["completion_tokens"] == 300
    spans = last["meta_info"]["weight_versions"]
    assert len(spans) == 2 and spans[0]["start"] == 0 < spans[1]["start"] and spans[1]["version"] == "mixed"
    again = served.generate(prompt, GREEDY)
    with forked_children(), engine(model_path=str(other)) as fresh:
        assert again["output_ids"] == fresh.generate(prompt, GREEDY)["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 0
    assert served.update_weights_from_disk(DEFAULT_MODEL_PATH)[0]


@pytest.mark.parametrize("flags", [{}, {"tp_size": 2}], ids=str)
def test_a_trainer_broadcasts_tensors(flags: dict[str, int], other: Path, expected: Any) -> None:
    tensors, port = load_file(other / "model.safetensors"), free_port()
    ranks = flags.get("tp_size", 1)
    names = sorted(tensors)
    specs = [[str(tensors[name].dtype) for name in names], [list(tensors[name].shape) for name in names]]
    words = [sys.executable, "-c", TRAINER, str(other), str(port), str(ranks + 1)]
    with forked_children(), engine(**flags) as running:
        assert not running.update_weights_from_distributed(names, *specs)[0]  # there is no group
        trainer = subprocess.Popen(words)
        ok, said = running.init_weights_update_group("127.0.0.1", port, 1, ranks + 1, "trainers", "gloo")
        assert ok, said
        assert not running.init_weights_update_group("127.0.0.1", port, 1, ranks + 1, "trainers", "gloo")[0]
        ok, said = running.update_weights_from_distributed(names, *specs, group_name="trainers")
        assert ok, said
        assert tokens(running) == expected[1]
        assert running.destroy_weights_update_group("trainers")[0]
        assert not running.destroy_weights_update_group("trainers")[0]
        assert trainer.wait(300) == 0


def test_a_trainer_that_ends_before_it_has_sent_all(served: sglang.Engine, other: Path, expected: Any) -> None:
    tensors, port = load_file(other / "model.safetensors"), free_port()
    names = sorted(tensors)
    specs = [[str(tensors[name].dtype) for name in names], [list(tensors[name].shape) for name in names]]
    half = TRAINER.replace(".items()):", ".items())[:5]:")
    trainer = subprocess.Popen([sys.executable, "-c", half, str(other), str(port), "2"])
    ok, said = served.init_weights_update_group("127.0.0.1", port, 1, 2, "trainers", "gloo")
    assert ok, said
    ok, said = served.update_weights_from_distributed(names, *specs, group_name="trainers")
    assert not ok and "nothing was written, and the group is closed" in said
    assert not served.destroy_weights_update_group("trainers")[0]
    assert tokens(served) == expected[0]
    trainer.wait(300)


TRAINER = """
import os, sys
from safetensors.torch import load_file
from sglang.srt.distributed.update_group import UpdateGroup
group = UpdateGroup("127.0.0.1", int(sys.argv[2]), 0, int(sys.argv[3]), "trainers", "gloo")
for _, tensor in sorted(load_file(sys.argv[1] + "/model.safetensors").items()):
    group.send(tensor)
group.close()
os._exit(0)  # threads of gloo may still run
"""
"""Sends a model's tensors, as a trainer does."""


def test_random_sequences_of_updates(served: sglang.Engine, other: Path, tmp_path: Path, expected: Any) -> None:
    """Updates that succeed and fail, pauses, aborts and requests: tokens are always those of the last good weights."""
    random, folders = Random(5), (DEFAULT_MODEL_PATH, str(other))
    tensors = [load_file(Path(folder) / "model.safetensors") for folder in folders]
    names = sorted(tensors[0])
    served.update_weights_from_disk(folders[0])
    now = 0
    for step in range(25):
        kind = random.choice(("disk", "tensors", "broken", "pause", "abort", "flush"))
        if kind == "disk":
            now = random.randrange(2)
            assert served.update_weights_from_disk(folders[now], flush_cache=random.random() < 0.5)[0]
        elif kind == "tensors":
            now = random.randrange(2)
            assert served.update_weights_from_tensor(tensors[now].items(), flush_cache=random.random() < 0.5)[0]
        elif kind == "broken":
            number = random.randrange(len(names))
            sent = {name: torch.zeros(3) if i == number else tensors[1 - now][name] for i, name in enumerate(names)}
            assert not served.update_weights_from_tensor(sent.items())[0]
        elif kind == "pause":
            served.pause_generation(random.choice(("abort", "retract", "in_place")))
            now = 1 - now
            assert served.update_weights_from_disk(folders[now], flush_cache=False)[0]
            served.continue_generation()
        elif kind == "abort":
            stream = iter(served.generate(PROMPTS[0], {**GREEDY, "max_new_tokens": 200}, stream=True))
            next(stream)
            served.abort_request(abort_all=True)
            for _ in stream:
                pass
        else:
            served.flush_cache()
        assert tokens(served) == expected[now], (step, kind)
    served.update_weights_from_disk(folders[0])
