"""LoRA adapters over HTTP: by lora_path, behind the model's name and as a model; loading and unloading, also under
traffic; what is refused."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import safetensors.torch
import torch
from live_server import LiveServer, live_server

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.sent_tensors import sent_file

PROMPT = "Question: Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?\nAnswer:"


def write(folder: Path, seed: int, rank: int = 4) -> Path:
    """A random adapter of the embedded model's attention."""
    config = json.loads((Path(DEFAULT_MODEL_PATH) / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    heights = {"q_proj": config["num_attention_heads"] * dim, "v_proj": config["num_key_value_heads"] * dim}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, height in heights.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
            tensors[f"{module}.lora_B.weight"] = torch.randn(height, rank, generator=generator) * 0.1
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": [*heights]}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("loras")
    return {name: write(root / name, seed) for seed, name in enumerate(("a", "b", "c"))}


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Iterator[LiveServer]:
    flags = ("--lora-paths", f"a={folders['a']}", f"org:b={folders['b']}", "--max-loras-per-batch", "2")
    rest = ("--max-lora-rank", "8", "--served-model-name", "tiny", "--lora-target-modules", "all")
    with live_server(*flags, *rest, "--allowed-local-lora-path", str(folders["a"].parent)) as running:
        yield running


@pytest.fixture(scope="module")
def http(served: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=300) as client:
        yield client


def generate(http: httpx.Client, **body: Any) -> str:
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = http.post("/generate", json={"text": PROMPT, "sampling_params": sampling, **body})
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["text"]
    return said


def completed(http: httpx.Client, model: str, **body: Any) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **body}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_every_way_to_name_an_adapter(http: httpx.Client) -> None:
    base, a, b = (generate(http, lora_path=name) for name in (None, "a", "org:b"))
    assert len({base, a, b}) == 3
    assert completed(http, "tiny") == base
    for model, text in (("tiny:a", a), ("a", a), ("org:b", b), ("tiny:org:b", b), ("other:a", a)):
        assert completed(http, model) == text, model
    assert completed(http, "tiny", lora_path="org:b") == b
    assert completed(http, "tiny:a", lora_path="org:b") == a  # the model's name wins
    both = http.post(
        "/generate",
        json={
            "text": [PROMPT] * 3,
            "lora_path": ["a", None, "org:b"],
            "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
        },
    ).json()
    assert [one["text"] for one in both] == [a, base, b]


def ask(http: httpx.Client, path: str, model: str | None, **more: Any) -> httpx.Response:
    """A question of the kind that an API has, at temperature 0."""
    question, limits = [{"role": "user", "content": "Hello"}], {"max_tokens": 8, "temperature": 0}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": question, **limits},
        "/v1/completions": {"prompt": "Hello", **limits},
        "/v1/messages": {"messages": question, **limits},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 8, "temperature": 0},
        "/api/chat": {"messages": question, "stream": False, "options": {"num_predict": 8, "temperature": 0}},
        "/api/generate": {"prompt": "Hello", "stream": False, "options": {"num_predict": 8, "temperature": 0}},
    }
    return http.post(path, json={**bodies[path], **({} if model is None else {"model": model}), **more})


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"]
)
def test_one_rule_for_names(http: httpx.Client, path: str) -> None:
    """Every API knows adapters by the same names, and refuses names that it does not know."""

    def said(model: str | None, **more: Any) -> str:
        answer = ask(http, path, model, **more)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        parts = [body.get("content"), *(out.get("content") for out in body.get("output", ()))]
        texts = [part["text"] for content in parts if isinstance(content, list) for part in content if "text" in part]
        for choice in body.get("choices", ()):
            texts.append(choice["text"] if "text" in choice else choice["message"]["content"])
        texts += [
            body[key] if key == "response" else body[key]["content"] for key in ("response", "message") if key in body
        ]
        assert any(texts), body
        return "".join(texts)

    base, a = said("tiny"), said("a")
    assert a == said("tiny:a") == said("other:a") != base == said(None)
    if path == "/api/generate":
        assert said("a", raw=True) != said("tiny", raw=True)
    for unknown in ("tiny:nobody", "nobody", "claude-x", "a:latest"):
        refused = ask(http, path, unknown)
        assert refused.status_code == 404 and "does not exist" in refused.text, refused.text
    if path.startswith("/api/"):
        assert http.post(path, json={"model": "nobody"}).status_code == 404  # which would load it
        assert [model["name"] for model in http.get("/api/tags").json()["models"]] == ["tiny", "a", "org:b"]


def test_chat_and_models(served: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        cards = {card.id: card for card in client.models.list()}
        assert [*cards] == ["tiny", "a", "org:b"]
        assert cards["a"].model_extra is not None and cards["a"].model_extra["parent"] == "tiny"
        assert client.models.retrieve("org:b").id == "org:b"
        said = {
            model: client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
            )
            .choices[0]
            .message.content
            for model in ("tiny", "tiny:a", "a")
        }
        assert said["tiny:a"] == said["a"] != said["tiny"]
        for unknown in ("tiny:nobody", "nobody", "gpt-9"):
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                client.completions.create(model=unknown, prompt="x")
    answer = httpx.post(f"{served.url}/generate", json={"text": "x", "lora_path": "nobody"})
    assert answer.status_code == 404 and "nobody" in answer.text


def test_load_and_unload(http: httpx.Client, folders: dict[str, Path]) -> None:
    base = generate(http)
    loaded = http.post("/load_lora_adapter", json={"lora_name": "c", "lora_path": str(folders["c"])})
    assert loaded.status_code == 200 and loaded.json()["success"]
    assert loaded.json()["loaded_adapters"] == {
        "a": str(folders["a"]), "org:b": str(folders["b"]), "c": str(folders["c"]),
    }  # fmt: skip
    with_c = generate(http, lora_path="c")
    assert with_c != base
    again = http.post("/load_lora_adapter", json={"lora_name": "c", "lora_path": str(folders["c"])})
    assert again.status_code == 400 and "loaded already" in again.json()["error_message"]
    gone = http.post("/unload_lora_adapter", json={"lora_name": "c"})
    assert gone.status_code == 200 and "c" not in gone.json()["loaded_adapters"]
    assert http.post("/generate", json={"text": "x", "lora_path": "c"}).status_code == 404
    assert http.post("/unload_lora_adapter", json={"lora_name": "c"}).status_code == 400
    body = {"lora_name": "c", "lora_path": str(folders["c"])}
    of_vllm = http.post("/v1/load_lora_adapter", json=body)
    assert of_vllm.status_code == 200 and of_vllm.text.startswith("Success")
    assert completed(http, "c") == with_c
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "c"}).status_code == 200
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "c"}).status_code == 404


def test_unloading_waits_for_requests(http: httpx.Client, folders: dict[str, Path]) -> None:
    body = {"lora_name": "d", "lora_path": str(folders["c"])}
    assert http.post("/load_lora_adapter", json=body).status_code == 200
    alone = generate(http, lora_path="d")
    with ThreadPoolExecutor(8) as threads:
        sampling = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
        running = [
            threads.submit(http.post, "/generate", json={"text": PROMPT, "lora_path": "d", "sampling_params": sampling})
            for _ in range(4)
        ]
        while not http.get("/v1/loads").json()["loads"][0]["num_running_reqs"] and not running[0].done():
            pass
        assert http.post("/unload_lora_adapter", json={"lora_name": "d"}).status_code == 200
        for each in running:  # those that came before it ended whole, the others were refused
            answer = each.result()
            assert answer.status_code == 404 or answer.json()["text"].startswith(alone)


def test_what_is_refused(http: httpx.Client, folders: dict[str, Path], tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", 7)
    large = write(folders["a"].parent / "large", 8, rank=16)
    link = folders["a"].parent / "link"
    link.symlink_to(outside)
    for path in (str(outside), str(link), str(large), "", "/", "no/such/dir", f"{folders['a']}/../../outside"):
        answer = http.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
        assert answer.status_code == 400 and not answer.json()["success"], path
    for name in ("", "a\n", "x" * 300, "tiny", "a"):
        answer = http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(folders["c"])})
        assert answer.status_code == 400, name
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "a", "org:b"]
    assert generate(http, lora_path="a") != generate(http)


def sent(folder: Path, name: str) -> dict[str, Any]:
    """The body with which a client sends an adapter."""
    weights = (folder / "adapter_model.safetensors").read_bytes()
    config = json.loads((folder / "adapter_config.json").read_text())
    return {
        "lora_name": name, "config_dict": config, "serialized_named_tensors": [base64.b64encode(weights).decode()],
    }  # fmt: skip


def test_an_adapter_is_sent(http: httpx.Client, folders: dict[str, Path]) -> None:
    wanted = generate(http, lora_path="a")
    answer = http.post("/load_lora_adapter_from_tensors", json=sent(folders["a"], "s"))
    assert answer.status_code == 200 and answer.json()["success"], answer.text
    kept = Path(answer.json()["loaded_adapters"]["s"])
    assert kept.is_dir()
    assert generate(http, lora_path="s") == wanted
    assert http.post("/unload_lora_adapter", json={"lora_name": "s"}).status_code == 200
    assert not kept.exists()
    assert generate(http, lora_path="a") == wanted


def test_an_adapter_of_a_trainer_on_this_machine(http: httpx.Client, folders: dict[str, Path]) -> None:
    """verl sends a handle of tensors for each rank."""
    tensors = safetensors.torch.load_file(folders["a"] / "adapter_model.safetensors")
    handles = [MultiprocessingSerializer.serialize(tensors, output_str=True) for _ in range(2)]
    body = sent(folders["a"], "verl") | {"serialized_named_tensors": handles}
    assert http.post("/load_lora_adapter_from_tensors", json=body).status_code == 200
    assert generate(http, lora_path="verl") == generate(http, lora_path="a")
    again = http.post("/load_lora_adapter_from_tensors", json=body | {"lora_name": "verl 2"})
    assert again.status_code == 400 and "was sent before" in again.text
    handle = MultiprocessingSerializer.serialize(tensors, output_str=True)
    file = sent_file(base64.b64decode(handle))
    assert file is not None and file.exists()
    refused = body | {"serialized_named_tensors": [handle], "load_format": "flattened_bucket"}
    assert http.post("/load_lora_adapter_from_tensors", json=refused).status_code == 400
    assert not file.exists(), "the server removes what it is sent, also where it refuses the call"
    assert http.post("/unload_lora_adapter", json={"lora_name": "verl"}).status_code == 200


def test_what_is_refused_when_sent(http: httpx.Client, folders: dict[str, Path]) -> None:
    good = sent(folders["c"], "s")
    (text,) = good["serialized_named_tensors"]
    cases = {
        "pickle": {"serialized_named_tensors": [base64.b64encode(pickle.dumps({"a": 1})).decode()]},
        "base64": {"serialized_named_tensors": ["%%%"]},
        "one file": {"serialized_named_tensors": [text, "AAAA"]},
        "not a readable safetensors": {
            "serialized_named_tensors": [base64.b64encode(b"\xff" * 8 + b"{" * 99).decode()]
        },
        "expected_checksums": {"expected_checksums": {"a": "b"}},
        "load_format": {"load_format": "flattened_bucket"},
        "added_tokens_config": {"added_tokens_config": {"<x>": 5000}},
        "rank": {"config_dict": {**good["config_dict"], "r": 10**9}},
        "peft_type": {"config_dict": {}},
        "printable": {"lora_name": "a\n"},
    }
    for said, change in cases.items():
        answer = http.post("/load_lora_adapter_from_tensors", json={**good, **change})
        assert answer.status_code == 400 and said in answer.text, f"{said}: {answer.text}"
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "a", "org:b"]


def test_replaced_in_place(http: httpx.Client, folders: dict[str, Path]) -> None:
    a, b = (generate(http, lora_path=name) for name in ("a", "org:b"))
    for folder, wanted in (("a", a), ("b", b), ("a", a)):
        body = {"lora_name": "e", "lora_path": str(folders[folder]), "load_inplace": True}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert generate(http, lora_path="e") == wanted
    bad = http.post("/load_lora_adapter", json={"lora_name": "e", "lora_path": "nowhere", "load_inplace": True})
    assert bad.status_code == 400 and generate(http, lora_path="e") == a
    assert http.post("/unload_lora_adapter", json={"lora_name": "e"}).status_code == 200


HOSTILE_CONFIGS: dict[str, tuple[bytes, str]] = {
    "not finite": (
        b'{"peft_type": "LORA", "r": 4, "lora_alpha": 1e999, "target_modules": ["q_proj", "v_proj"]}',
        "alpha",
    ),
    "rank of 10^9": (b'{"peft_type": "LORA", "r": 1000000000, "target_modules": ["q_proj"]}', "rank"),
    "rank of 10^4000": (b'{"peft_type": "LORA", "r": 1' + b"0" * 4000 + b"}", "r"),
    "deep": (b'{"peft_type": "LORA", "r": 4, "auto_mapping": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "config"),
    "large": (b'{"peft_type": "LORA", "x": "' + b"x" * (5 << 20) + b'"}', "4 MiB"),
    "no object": (b"[1, 2]", "object"),
}


@pytest.mark.parametrize("case", HOSTILE_CONFIGS)
def test_hostile_configs(http: httpx.Client, folders: dict[str, Path], case: str) -> None:
    """From a directory and from a body: refused as the client's mistake, and nothing changes."""
    config, said = HOSTILE_CONFIGS[case]
    folder = folders["a"].parent / f"hostile {case}"
    shutil.copytree(folders["a"], folder)
    (folder / "adapter_config.json").write_bytes(config)
    loaded = http.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": str(folder)})
    assert loaded.status_code == 400 and said in loaded.text, loaded.text[:500]
    good = json.dumps(sent(folders["a"], "x") | {"config_dict": None}).encode()
    body = good.replace(b'"config_dict": null', b'"config_dict": ' + config)
    answer = http.post("/load_lora_adapter_from_tensors", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text[:500]
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "a", "org:b"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_numbers_that_are_not_finite(http: httpx.Client, folders: dict[str, Path], value: float) -> None:
    """The last one becomes so when it is multiplied by the factor."""
    folder = folders["a"].parent / f"with {value}"
    shutil.copytree(folders["a"], folder)
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    next(tensor for name, tensor in tensors.items() if "lora_B" in name)[0, 0] = value
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    for path, body in (
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": str(folder)}),
        ("/load_lora_adapter_from_tensors", sent(folder, "x")),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400 and "finite" in answer.text, answer.text
    assert http.post("/generate", json={"text": "x", "lora_path": "x"}).status_code == 404


def test_links(http: httpx.Client, folders: dict[str, Path], tmp_path: Path) -> None:
    """Files of an allowed directory that point elsewhere, to nothing, or to themselves."""
    for number, target in enumerate(
        (write(tmp_path / "elsewhere", 9) / "adapter_model.safetensors", tmp_path / "none", None)
    ):
        folder = folders["a"].parent / f"links {number}"
        shutil.copytree(folders["a"], folder)
        weights = folder / "adapter_model.safetensors"
        weights.unlink()
        weights.symlink_to(weights if target is None else target)
        answer = http.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": str(folder)})
        assert answer.status_code == 400, answer.text
        assert "elsewhere" not in answer.text.replace(str(folder), "")


def test_files_that_change_after_an_adapter_has_left_main_memory(tmp_path: Path) -> None:
    one, two, three = (write(tmp_path / f"{seed}", seed) for seed in range(3))
    limits = ("--max-loras-per-batch", "1", "--max-loaded-loras", "2", "--max-lora-rank", "4")
    rest = ("--allowed-local-lora-path", str(tmp_path))
    with (
        live_server("--lora-paths", f"one={one}", f"two={two}", *limits, *rest) as running,
        httpx.Client(base_url=running.url, timeout=300) as http,
    ):
        before = generate(http, lora_path="one")
        assert generate(http, lora_path="two") != before
        assert http.post("/load_lora_adapter", json={"lora_name": "three", "lora_path": str(three)}).status_code == 200
        generate(http, lora_path="two")  # so "one" has left
        kept = (one / "adapter_model.safetensors").read_bytes()
        (one / "adapter_model.safetensors").write_bytes((two / "adapter_model.safetensors").read_bytes())
        for _ in range(2):
            refused = http.post("/generate", json={"text": PROMPT, "lora_path": "one"})
            assert refused.status_code == 400 and "has changed" in refused.text, refused.text
        assert generate(http, lora_path="three") != before  # the others are served
        (one / "adapter_model.safetensors").write_bytes(kept)
        assert generate(http, lora_path="one") == before
