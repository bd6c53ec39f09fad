"""Requests with LoRA adapters in the scheduler, against transformers with each adapter merged into the weights in
fp32: every mixture of adapters in a step, prefixes, eviction and reload, more adapters than slots, unloading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang.srt.configs.adapters.files import content_id
from sglang.srt.managers.scheduler import adapter_table
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import AbortReq
from sglang.srt.server_args import ServerArgs
from srt.adapter_files import LINEAR, write_adapter
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.models.harness import VOCAB, save_tiny

NEW_TOKENS = 8
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "o_proj", "down_proj")
FORMS: dict[str, dict[str, Any]] = {
    "rank 1": {"rank": 1, "names": ("q_proj", "down_proj")},
    "rank 8, no q": {"rank": 8, "names": ("k_proj", "v_proj", "up_proj")},
    "rank 17, rslora": {"rank": 17, "use_rslora": True},
    "rank 64, bf16": {"rank": 64, "dtype": torch.bfloat16},
    "patterns": {
        "rank": 4, "ranks": {"q_proj": 9, "layers.1.mlp.up_proj": 33}, "alphas": {"o_proj": 3.5, "q_proj": 40},
    },
    "one layer": {"layers_to_transform": [1], "target_modules": ".*layers.1.*(_proj)"},
    "all-linear": {"target_modules": "all-linear", "fan_in_fan_out": True},
}  # fmt: skip


def prompt(seed: int, length: int = 20) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Adapters:
    """A tiny model on disk with adapters, and what transformers says about each."""

    def __init__(self, name: str, folder: Path, forms: dict[str, dict[str, Any]]) -> None:
        self.folder = folder / "model"
        base = save_tiny(name, self.folder)
        self.models: dict[str | None, Any] = {None: base}
        self.paths = {form: folder / f"adapter {number}" for number, form in enumerate(forms)}
        for number, (form, options) in enumerate(forms.items()):
            self.models[form] = write_adapter(self.paths[form], base, number, **options)
        self.ids = {form: content_id(path) for form, path in self.paths.items()}
        self._outputs: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}

    def greedy(self, form: str | None, ids: list[int], count: int = NEW_TOKENS) -> list[int]:
        output = self._outputs.setdefault((form, tuple(ids)), [])
        while len(output) < count:
            with torch.inference_mode():
                output.append(int(self.models[form](torch.tensor([ids + output])).logits[0, -1].argmax()))
        return output[:count]

    def scheduler(self, load: bool = True, **options: Any) -> Scheduler:
        args = ServerArgs.from_kwargs(
            model_path=str(self.folder), device="cpu", skip_tokenizer_init=True, enable_lora=True,
            **{"max_total_tokens": 4096, "max_running_requests": 8, "max_lora_rank": 64, **options},
        )  # fmt: skip
        scheduler = Scheduler(args, create_runner(args), StopChecker(None))
        for form in self.paths if load else ():
            self.load(scheduler, form)
        return scheduler

    def load(self, scheduler: Scheduler, form: str, pinned: bool = False) -> None:
        assert scheduler.adapters is not None
        scheduler.adapters.begin(self.ids[form], str(self.paths[form]))
        assert scheduler.adapters.end(self.ids[form], pinned) == ""

    def ask(self, scheduler: Scheduler, rid: str, form: str | None, ids: list[int]) -> None:
        msg = request(rid, ids, NEW_TOKENS, temperature=0.0, ignore_eos=True)
        if form is not None:
            msg.adapter = msg.cache_namespace = self.ids[form]
        add(scheduler, msg)

    def check(self, collector: Collector, asked: dict[str, tuple[str | None, list[int]]]) -> None:
        for rid, (form, ids) in asked.items():
            assert collector.tokens[rid] == self.greedy(form, ids), f"{rid}: {form}"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapters]:
    yield Adapters("qwen3", tmp_path_factory.mktemp("adapters"), FORMS)


def run(adapters: Adapters, scheduler: Scheduler, asked: dict[str, tuple[str | None, list[int]]]) -> Collector:
    collector = Collector()
    for rid, (form, ids) in asked.items():
        adapters.ask(scheduler, rid, form, ids)
    run_to_end(scheduler, collector)
    adapters.check(collector, asked)
    assert_clean(scheduler)
    return collector


def test_every_form_changes_answers(adapters: Adapters) -> None:
    answers = {form: tuple(adapters.greedy(form, prompt(1))) for form in (None, *FORMS)}
    assert len(set(answers.values())) == len(answers)


def test_one_prompt_with_every_adapter_at_once(adapters: Adapters) -> None:
    scheduler = adapters.scheduler()
    asked = {str(form): (form, prompt(1)) for form in (None, *FORMS)}
    for _ in range(2):  # from the prefix cache the second time
        run(adapters, scheduler, asked)
    assert scheduler.stats._cached > 0


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize("pinned", [False, True])
def test_more_adapters_than_slots(
    adapters: Adapters, policy: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = adapters.scheduler(False, max_loras_per_batch=2, lora_eviction_policy=policy, chunked_prefill_size=16)
    assert scheduler.adapters is not None
    for number, form in enumerate(FORMS):
        adapters.load(scheduler, form, pinned and number == 0)
    loads: list[int] = []
    load = scheduler.runner.load_adapter
    scheduler.runner.load_adapter = lambda slot, adapter: (loads.append(slot), load(slot, adapter))[1]
    generator = torch.Generator().manual_seed(3)
    forms = [None, *FORMS]
    order = torch.randint(0, len(forms), (30,), generator=generator).tolist()
    asked = {f"r{i}": (forms[number], prompt(i % 4)) for i, number in enumerate(order)}
    monkeypatch.setattr(adapter_table, "MAX_PASSED", 2)  # or those of one adapter pass all others
    run(adapters, scheduler, asked)
    assert len(loads) > len(FORMS)  # some came twice
    if pinned:
        first = adapters.ids[next(iter(FORMS))]
        slot = scheduler.adapters._loaded[first].slot
        assert slot and loads.count(slot) == 1
    assert scheduler.adapters.usage() == {"loaded": len(FORMS), "in_slots": 2}


def test_a_waiting_adapter_is_passed_a_bounded_number_of_times(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = "rank 1", "rank 8, no q"
    asked: dict[str, tuple[str | None, list[int]]] = {"first": (one, prompt(0)), "waits": (other, prompt(0))}
    asked |= {f"r{i}": (one, prompt(i)) for i in range(12)}
    entered: dict[int, int] = {}
    for bound in (1, 3, 6, 1000):
        monkeypatch.setattr(adapter_table, "MAX_PASSED", bound)
        scheduler, collector = adapters.scheduler(False, max_loras_per_batch=1, max_running_requests=2), Collector()
        for form in (one, other):
            adapters.load(scheduler, form)
        for rid, (form, ids) in asked.items():
            adapters.ask(scheduler, rid, form, ids)
            for _ in range(4 if rid == "first" else 0):  # so that the two that run end at different times
                scheduler.step()
                collector.take(scheduler)
        run_to_end(scheduler, collector)
        adapters.check(collector, asked)
        entered[bound] = [*collector.tokens].index("waits")  # as their first tokens came
    assert entered == {1: 2, 3: 4, 6: 7, 1000: len(asked) - 1}


def test_a_long_wait_drains_slots(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    """By --lora-drain-wait-threshold, which the leader's clock decides; the time is played."""
    monkeypatch.setattr(adapter_table, "MAX_PASSED", 1000)
    now = [0.0]
    monkeypatch.setattr(adapter_table.time, "monotonic", lambda: now[0])
    one, other = "rank 1", "rank 8, no q"
    asked: dict[str, tuple[str | None, list[int]]] = {"first": (one, prompt(0)), "waits": (other, prompt(0))}
    asked |= {f"r{i}": (one, prompt(i)) for i in range(12)}
    entered: dict[float, int] = {}
    for threshold in (0.0, 4.0):
        now[0] = 0.0
        scheduler = adapters.scheduler(
            False, max_loras_per_batch=1, max_running_requests=2, lora_drain_wait_threshold=threshold
        )
        table, collector, told = scheduler.adapters, Collector(), []
        assert table is not None
        for form in (one, other):
            adapters.load(scheduler, form)
        for rid, (form, ids) in asked.items():
            adapters.ask(scheduler, rid, form, ids)
            for _ in range(4 if rid == "first" else 0):  # so that the two that run end at different times
                scheduler.step()
                collector.take(scheduler)
        while not scheduler.idle:
            for decision in table.decisions():
                told.append((decision.rid, now[0]))
                table.drain(decision.rid)
            scheduler.step()
            collector.take(scheduler)
            now[0] += 1.0
        adapters.check(collector, asked)
        entered[threshold] = [*collector.tokens].index("waits")
        assert told[:1] == ([("waits", threshold)] if threshold else [])
    assert 1 < entered[4.0] < entered[0.0] == len(asked) - 1


def test_strict_loading(adapters: Adapters, tmp_path: Path) -> None:
    """An adapter that lacks a module which its config names is refused by --lora-strict-loading alone."""
    base = adapters.models[None]
    write_adapter(tmp_path / "lacks", base, 1, names=LINEAR[:3], target_modules=[*LINEAR[:4]])
    whole = {"names": LINEAR[:4], "layers_to_transform": [1]}
    write_adapter(tmp_path / "layer", base, 1, **whole)
    write_adapter(
        tmp_path / "excluded", base, 1, names=LINEAR[:3], target_modules=[*LINEAR[:4]], exclude_modules=["o_proj"]
    )
    write_adapter(tmp_path / "pattern", base, 1, names=LINEAR[:3], target_modules=".*_proj")
    for strict in (False, True):
        table = adapters.scheduler(False, lora_strict_loading=strict).adapters
        assert table is not None
        for name in ("lacks", "layer", "excluded", "pattern"):
            table.begin(content_id(tmp_path / name), str(tmp_path / name))
            problem = table.end(content_id(tmp_path / name), False)
            assert ("layers.0.self_attn.o_proj has no lora_A" in problem) == (strict and name == "lacks"), problem
            assert (strict and name == "lacks") or not problem


def test_prefixes_never_cross(adapters: Adapters) -> None:
    scheduler = adapters.scheduler()
    ids = prompt(9, 40)
    forms = [None, "rank 64, bf16", "rank 17, rslora"]
    for number, form in enumerate(forms):
        cached = scheduler.stats._cached
        run(adapters, scheduler, {f"{number}": (form, ids)})
        assert scheduler.stats._cached == cached, form


def test_aborts_and_unloading(adapters: Adapters) -> None:
    scheduler = adapters.scheduler()
    assert scheduler.adapters is not None
    adapters.ask(scheduler, "a", "rank 1", prompt(1))
    adapters.ask(scheduler, "b", "patterns", prompt(1))
    for _ in range(3):
        scheduler.step()
    assert scheduler.uses_adapter(adapters.ids["rank 1"])
    scheduler.abort(AbortReq(["a"]))
    assert not scheduler.uses_adapter(adapters.ids["rank 1"])
    scheduler.adapters.unload(adapters.ids["rank 1"])
    collector = Collector()
    run_to_end(scheduler, collector)
    adapters.check(collector, {"b": ("patterns", prompt(1))})
    adapters.ask(scheduler, "gone", "rank 1", prompt(1))
    (message,) = scheduler.outbox
    assert message.finish[0] is not None and message.finish[0].status_code == 404
    scheduler.outbox.clear()
    adapters.load(scheduler, "rank 1")
    run(adapters, scheduler, {"again": ("rank 1", prompt(1))})


def test_drafts_are_verified_with_the_adapter(adapters: Adapters) -> None:
    scheduler = adapters.scheduler(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
    ids = prompt(2, 6) * 4
    run(adapters, scheduler, {str(form): (form, ids) for form in (None, *FORMS)})


def test_retracted_requests(adapters: Adapters) -> None:
    scheduler = adapters.scheduler(False, max_loras_per_batch=2, max_total_tokens=96, page_size=1)
    for form in FORMS:
        adapters.load(scheduler, form)
    asked = {f"r{i}": (form, prompt(i)) for i, form in enumerate([*FORMS, None, *FORMS])}
    run(adapters, scheduler, asked)


@pytest.mark.parametrize(
    ("model", "names"),
    [("deepseek_v3", LATENT), ("qwen3_5", DELTA), ("qwen3_moe", LINEAR[:4]), ("llama_bias_llama3", LINEAR)],
)
def test_other_layers(tmp_path: Path, model: str, names: tuple[str, ...]) -> None:
    one = Adapters(model, tmp_path, {"a": {"names": names}, "b": {"names": names[:1], "rank": 3}})
    asked = {f"{form} {seed}": (form, prompt(seed)) for form in (None, "a", "b") for seed in (1, 2)}
    run(one, one.scheduler(disable_shared_experts_fusion=True), asked)
    assert one.greedy("a", prompt(1)) != one.greedy(None, prompt(1))


ENDS_FORMS: dict[str, dict[str, Any]] = {
    "embedding": {"rank": 5, "names": ("embed_tokens",)},
    "head": {"rank": 17, "names": ("lm_head",), "use_rslora": True, "strength": 12.0},
    "all": {"names": ("embed_tokens", "lm_head", *LINEAR), "rank": 8},
    "layers": {"names": LINEAR},
}


@pytest.mark.parametrize("model", ["qwen3", "qwen3_tied_bias", "gemma3_capped"])
def test_embedding_and_output_head(tmp_path: Path, model: str) -> None:
    """Also tied to one another, with a factor of the embedding and capped logits."""
    one = Adapters(model, tmp_path, ENDS_FORMS)
    answers = {form: tuple(one.greedy(form, prompt(1))) for form in (None, *ENDS_FORMS)}
    assert len(set(answers.values())) == len(answers)
    asked = {f"{form} {seed}": (form, prompt(seed)) for form in (None, *ENDS_FORMS) for seed in (1, 2)}
    run(one, one.scheduler(lora_target_modules=["all"]), asked)
    bare = one.scheduler(False, max_lora_rank=64).adapters
    assert bare is not None
    for form in ("embedding", "head", "layers"):
        bare.begin(one.ids[form], str(one.paths[form]))
        assert ("--lora-target-modules all" in bare.end(one.ids[form], False)) == (form != "layers")


def test_other_weights_of_the_base_model(tmp_path: Path) -> None:
    """PEFT repeats them; rows that were trained are refused, other types and rows that a checkpoint pads are not."""
    one = Adapters("qwen3", tmp_path, {"a": {"names": ("embed_tokens", "lm_head"), "rank": 2}})
    table = one.scheduler(False, lora_target_modules=["embed_tokens", "lm_head"]).adapters
    assert table is not None
    file = one.paths["a"] / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for end in ("model.embed_tokens", "lm_head"):
        name = f"base_model.model.{end}.base_layer.weight"
        for changed in (False, True):
            other = tensors[name].clone()
            other[200:] += 0.5 if changed else 0.0
            safetensors.torch.save_file(tensors | {name: other.bfloat16()}, file)
            adapter = content_id(one.paths["a"])
            table.begin(adapter, str(one.paths["a"]))
            problem = table.end(adapter, False)
            assert (f"{name} differs from the model's" in problem) == changed and changed == bool(problem), problem


def test_drafts_with_the_models_own_head(tmp_path: Path) -> None:
    """They share the embedding and the output head, and have them without the adapter."""
    one = Adapters("qwen3", tmp_path, ENDS_FORMS)
    options: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(one.folder)}
    scheduler = one.scheduler(lora_target_modules=["all"], speculative_num_steps=2, **options)
    run(one, scheduler, {str(form): (form, prompt(3)) for form in (None, *ENDS_FORMS)})


def test_prompt_log_probabilities(tmp_path: Path) -> None:
    one = Adapters("qwen3", tmp_path, ENDS_FORMS)
    scheduler, collector, ids = one.scheduler(lora_target_modules=["all"]), Collector(), prompt(4)
    for form in (None, *ENDS_FORMS):
        message = request(str(form), ids, 2, temperature=0.0, ignore_eos=True)
        message.adapter = message.cache_namespace = None if form is None else one.ids[form]
        message.return_logprob, message.logprob_start_len = True, 0
        add(scheduler, message)
    run_to_end(scheduler, collector)
    for form in (None, *ENDS_FORMS):
        with torch.inference_mode():
            wanted = one.models[form](torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        got = torch.tensor(collector.input_logprobs[str(form)])
        torch.testing.assert_close(got, wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], rtol=0, atol=1e-4)


LATENT_FORMS: dict[str, dict[str, Any]] = {
    "kv_b": {"names": ("kv_b_proj",), "rank": 5, "strength": 12.0},
    "all": {"names": LATENT, "rank": 17},
    "others": {"names": ("q_b_proj", "o_proj")},
}


@pytest.mark.parametrize("model", ["deepseek_v3", "deepseek_v2_lite", "glm4_moe_lite", "deepseek_v32", "mistral4"])
def test_keys_and_values_of_latents(tmp_path: Path, model: str) -> None:
    """Decoding absorbs them; so do prompts with such an adapter that would expand them otherwise."""
    one = Adapters(model, tmp_path, LATENT_FORMS)
    answers = {form: tuple(one.greedy(form, prompt(1, 60))) for form in (None, *LATENT_FORMS)}
    assert len(set(answers.values())) == len(answers)
    scheduler = one.scheduler(disable_shared_experts_fusion=True)
    for _ in range(2):  # behind a cached prefix the second time
        run(one, scheduler, {f"{form}": (form, prompt(1, 60)) for form in (None, *LATENT_FORMS)})
