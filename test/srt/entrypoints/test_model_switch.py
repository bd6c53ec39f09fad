"""The switch of several models: order, swaps, limits, failures, over models that only count."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.model_switch import ASLEEP, AWAKE, ModelSwitch, Switched
from sglang.srt.entrypoints.models_file import read_models
from sglang.srt.entrypoints.openai.adapter_names import adapters_of
from sglang.srt.entrypoints.several_models import SwitchingApp
from sglang.srt.errors import UserError
from sglang.srt.managers.front.generate_request import RequestError


class Card:
    """Memory of the GPU, of which each model that is awake takes a part."""

    def __init__(self, room: int) -> None:
        self.room, self.log = room, list[str]()


class FakeModel:
    def __init__(self, name: str, card: Card, size: int) -> None:
        self.name, self.card, self.size, self.awake, self.running = name, card, size, False, 0

    async def sleep(self) -> None:
        assert self.awake and not self.running, "an answer is cut off"
        await asyncio.sleep(0)
        self.awake = False
        self.card.room += self.size
        self.card.log.append(f"-{self.name}")

    async def wake(self) -> None:
        assert not self.awake
        await asyncio.sleep(0)
        if self.size > self.card.room:
            raise RequestError(f"waking needs {self.size}, of which {self.card.room} are free", 503)
        self.card.room -= self.size
        self.awake = True
        self.card.log.append(f"+{self.name}")


def made(names: str, room: int = 10, size: int = 1, **limits: Any) -> tuple[ModelSwitch, Card]:
    card = Card(room)
    models = [Switched(name, FakeModel(name, card, size)) for name in names]
    return ModelSwitch(models, **{"min_stay_s": 0.0, **limits}), card


async def ask(switch: ModelSwitch, name: str, turns: int = 1) -> None:
    async with switch.use(name):
        model = switch.models[name].model
        assert isinstance(model, FakeModel)
        assert model.awake
        model.running += 1
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
                assert model.awake
        finally:
            model.running -= 1


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 300))


def test_one_is_awake() -> None:
    async def work() -> None:
        switch, card = made("abc")
        for name in "abca":
            await ask(switch, name)
        assert card.log == ["+a", "-a", "+b", "-b", "+c", "-c", "+a"]
        assert switch.swaps == 4

    run(work)


def test_the_one_used_longest_ago_sleeps() -> None:
    async def work() -> None:
        switch, card = made("abc", room=2, max_awake=0)
        for name in "abac":
            await ask(switch, name)
        assert card.log == ["+a", "+b", "-b", "+c"]
        await switch.unload()
        assert card.room == 2
        assert {each.state for each in switch.models.values()} == {ASLEEP}

    run(work)


def test_requests_of_one_model_cannot_keep_others_out() -> None:
    async def work() -> None:
        switch, card = made("ab")
        done = asyncio.Event()

        async def stream() -> None:
            while not done.is_set():
                await ask(switch, "a", 3)

        streams = [asyncio.create_task(stream()) for _ in range(4)]
        await asyncio.sleep(0.01)
        await ask(switch, "b", 5)
        done.set()
        await asyncio.gather(*streams)
        assert card.log[:3] == ["+a", "-a", "+b"]

    run(work)


def test_requests_beyond_the_limit_are_refused() -> None:
    async def work() -> None:
        switch, _ = made("ab", max_waiting=3)
        holding = asyncio.Event()

        async def hold() -> None:
            async with switch.use("a"):
                await holding.wait()

        held = asyncio.create_task(hold())
        await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(ask(switch, "b")) for _ in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="Too many") as refused:
            await ask(switch, "b")
        assert refused.value.retry_after
        waiting[0].cancel()
        holding.set()
        await asyncio.gather(held, *waiting, return_exceptions=True)
        assert switch.models["b"].active == switch.models["a"].active == 0

    run(work)


def test_a_model_that_does_not_fit_or_has_failed() -> None:
    async def work() -> None:
        switch, card = made("ab", room=1, max_awake=0)
        await ask(switch, "a")
        big = switch.models["b"].model
        assert isinstance(big, FakeModel)
        big.size = 5
        with pytest.raises(RequestError, match="needs 5"):
            await ask(switch, "b")
        await ask(switch, "a")
        switch.lost("b")
        with pytest.raises(RequestError, match="has failed"):
            await ask(switch, "b")
        await ask(switch, "a")
        assert switch.models["a"].state == AWAKE

    run(work)


def test_nobody_uses_it() -> None:
    async def work() -> None:
        switch, card = made("ab")
        switch.models["a"].ttl_s = 0.01
        await ask(switch, "a")
        while "-a" not in card.log:
            await asyncio.sleep(0.005)
        await ask(switch, "a")
        assert card.log[:3] == ["+a", "-a", "+a"]

    run(work)


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(seed: int) -> None:
    """200 swaps and more: nobody waits for ever, nothing is cut off, clients leave at any time."""

    async def work() -> None:
        rng = random.Random(seed)
        switch, card = made("abcd", room=rng.randint(1, 3), max_awake=rng.randint(0, 1))

        async def client() -> None:
            for _ in range(40):
                asking = asyncio.create_task(ask(switch, rng.choice("abcd"), rng.randint(0, 5)))
                for _ in range(rng.randint(0, 8)):
                    await asyncio.sleep(0)
                if rng.random() < 0.1:
                    asking.cancel()
                (ended,) = await asyncio.gather(asking, return_exceptions=True)
                assert ended is None or isinstance(ended, asyncio.CancelledError)

        async def unload() -> None:
            for _ in range(10):
                await asyncio.sleep(0.002)
                await switch.unload(rng.choice([None, "a", "b"]))

        await asyncio.gather(*(client() for _ in range(12)), unload())
        assert all(each.active == 0 and not each.waiting for each in switch.models.values())
        await switch.unload()
        assert switch.swaps > 20

    run(work)


def test_a_file_of_models(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "max_awake: 2\nmodels:\n  one:\n"
        "    flags: {model-path: /a, tp: 2, lora-paths: [x=/x, y=/y], enable-metrics: true}\n"
        "    aliases: [uno]\n    ttl: 60\n  two:\n    flags: {model-path: /b}\n"
    )
    read = read_models(str(file), ["--port", "3000"], "sglang serve")
    one, two = read.models
    assert (one.name, one.aliases, one.ttl_s, read.max_awake) == ("one", ("uno",), 60, 2)
    assert (one.args.tp_size, one.args.lora_paths, one.args.enable_metrics) == (2, ["x=/x", "y=/y"], True)
    assert one.args.enable_memory_saver and one.args.served_model_name == "one" and two.args.port == 3000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: []", "there must be `models`"),
        ("models: {a: []}", "must be an object"),
        ("models: {a: {flags: [b]}}", "must be an object"),
        ("models: {a: {}}", "has no model-path"),
        ("models: {a: {flags: {model-path: /a, port: 1}}}", "--port is of the whole server"),
        ("models: {a: {flags: {model-path: /a, no-such: 1}}}", "the model 'a'"),
        ("models: {a: {flags: {model-path: /a}, name: b}}", "'name', which is not known"),
        ("models: {a: {flags: {model-path: /a}, aliases: [b]}, b: {flags: {model-path: /b}}}", "two models have"),
        ("models: {a: {flags: {model-path: /a}, ttl: -1}}", "not negative"),
        ("models: {a: {flags: {model-path: /a, attn-dp-size: 2, tp: 2}}}", "do not go with it"),
        ("models: {a: {flags: {model-path: /a}, ttl: .nan}}", "not negative"),
        ("models: {a: {flags: {model-path: /a}, ttl: .inf}}", "not negative"),
        ("{max_awake: 1.5, models: {a: {flags: {model-path: /a}}}}", "whole number"),
        ("models: {a: {flags: {tp-size: 1}}}", "has no model-path"),
        ("models: [", "cannot be read"),
    ],
)
def test_a_wrong_file(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=said.replace("[", r"\[")):
        read_models(str(file), [], "sglang serve")


def test_a_folder_of_models(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    files = ["c", "mmproj-c", *(f"d-{number:05}-of-00003" for number in (1, 2, 3)), "in/e"]
    (tmp_path / "in").mkdir()
    for file in files:
        (tmp_path / f"{file}.gguf").write_bytes(b"")
    read = {each.name: Path(each.args.model_path).name for each in read_models(str(tmp_path), [], "sglang").models}
    assert read == {"a": "a", "b": "b", "c": "c.gguf", "d": "d-00001-of-00003.gguf", "in": "in"}
    (tmp_path / "models.yaml").write_text("models: {d: {flags: {}, ttl: 5}, a: {flags: {tp-size: 2}}, b: {}, c: }")
    read = {
        each.name: Path(each.args.model_path).name for each in read_models(str(tmp_path / "models.yaml"), [], "").models
    }
    assert read == {"d": "d-00001-of-00003.gguf", "a": "a", "b": "b", "c": "c.gguf"}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("plain", "plain"), ("alias", "plain"), ("tuned:sql", "tuned"), ("other:sql", "tuned"),
        ("plain:sql", None), ("alias:sql", None), ("plain:", None), ("sql", None), ("none:sql", None),
        ("plain:latest", "plain"), ("alias:latest", "plain"), ("tuned:latest", "tuned"), ("none:latest", None),
    ],
)  # fmt: skip
def test_names_of_models_and_adapters(name: str, model: str | None) -> None:
    def served(name: str, alias: str, enable_lora: bool) -> Any:
        args = SimpleNamespace(enable_lora=enable_lora)
        return SimpleNamespace(named=SimpleNamespace(name=name, aliases=(alias,), args=args))

    app = SwitchingApp([served("plain", "alias", False), served("tuned", "other", True)], made("ab")[0])
    if model is not None:
        assert app._named(name) == model
        return
    with pytest.raises(ApiError) as error:
        app._named(name)
    assert error.value.status == 404


def test_an_alias_is_the_model_where_there_are_adapters() -> None:
    adapters = SimpleNamespace(find=lambda name: name if name == "sql" else None)
    service: Any = SimpleNamespace(manager=SimpleNamespace(adapters=adapters), model_name="m", aliases=frozenset({"a"}))
    assert adapters_of(service, "a") is None
    assert adapters_of(service, "a:sql") == "sql"
    assert adapters_of(service, "m:latest") is adapters_of(service, "a:latest") is None
    with pytest.raises(ApiError):
        adapters_of(service, "b")
