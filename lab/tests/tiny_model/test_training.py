"""The model in training is the model that is served; training learns, stops and goes on."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark.evals.defects import forget_norm, scale_block, swap_experts, transpose_square, with_defect
from tiny_model import train
from tiny_model.export import load_weights, save_weights
from tiny_model.feed import batches
from tiny_model.layout import make_config
from tiny_model.mixture import Encoder, Shape
from tiny_model.model import TinyModel
from tiny_model.optimizer import Optimizer, is_matrix, orthogonal
from tiny_model.plot import plot
from tiny_model.rounding import E2M1, int4, mxfp4, rounded_weights
from tiny_model.score import scores
from tiny_model.table import table
from tiny_model.train import Progress, Settings, Trainer, learning_rate, step_loss
from tokenizers import Tokenizer

CPU = torch.device("cpu")
SHAPE = Shape(short_rows=2, short_length=128, long_rows=1, long_length=256)


@pytest.fixture(scope="module", autouse=True)
def matmul_precision() -> Iterator[None]:
    """Training multiplies in tf32; the tests after it must not."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def config(files: Path) -> dict[str, Any]:
    return small_config(Tokenizer.from_file(str(files / "tokenizer.json")))


def small_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """With fewer layers than the real one, of both kinds."""
    return {**make_config(tokenizer), "num_hidden_layers": 3}


@pytest.fixture(autouse=True, scope="module")
def small_models(files: Path) -> Iterator[None]:
    """Runs here train small models, with the tokenizer that is there already."""

    def copy_files(output: Path) -> Tokenizer:
        shutil.copytree(files, output, dirs_exist_ok=True)
        return Tokenizer.from_file(str(output / "tokenizer.json"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_config", small_config)
        patch.setattr(train, "write_files", copy_files)
        yield


def save(model: TinyModel, files: Path, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    for path in files.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "config.json").write_text(json.dumps(model.config))
    save_weights(model, directory)
    return directory


@torch.no_grad()
def test_transformers_computes_the_same(config: dict[str, Any], files: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = TinyModel(config, torch.float32, seed=1)
    directory = save(model, files, tmp_path / "model")
    load_weights(model, directory)  # rounded to bfloat16, like those in the file
    reference, report = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]

    tokens = torch.randint(0, config["vocab_size"], (2, 96))
    first, second = tokens[:, :40], tokens[:, 40:]
    documents = torch.cat((torch.zeros_like(first), torch.ones_like(second)), dim=1)
    positions = torch.cat((torch.arange(40), torch.arange(56))).expand(2, -1)
    hidden, _ = model(tokens, positions, documents)
    logits = model.logits(hidden)
    wanted = torch.cat((reference(first).logits, reference(second).logits), dim=1)
    assert torch.allclose(logits, wanted, atol=1e-4), "packed documents must not see each other"


def test_loading_another_model_is_refused(config: dict[str, Any], files: Path, tmp_path: Path) -> None:
    directory = save(TinyModel(config, torch.float32), files, tmp_path / "model")
    with pytest.raises(ValueError, match="unknown weights"):
        load_weights(TinyModel({**config, "num_hidden_layers": 2}, torch.float32), directory)
    with pytest.raises(ValueError, match="missing or has another shape"):
        load_weights(TinyModel({**config, "num_hidden_layers": 4}, torch.float32), directory)


@torch.no_grad()
def test_router_weights_are_of_the_chosen(config: dict[str, Any]) -> None:
    layer = TinyModel(config, torch.float32).layers[1]
    weights, loss = layer.route(torch.randn(2, 50, config["hidden_size"]), layer.router)
    assert ((weights > 0).sum(-1) == 2).all()
    assert torch.allclose(weights.sum(-1), torch.ones(2, 50))
    assert float(loss) > 0.01 - 1e-3, "an even router has a balance loss of 0.01; no router has less"


def settings(output: Path, **changes: Any) -> Settings:
    usual = Settings(
        output=output,
        steps=20,
        minutes=600,
        device="cpu",
        shape=SHAPE,
        only=("add", "facts", "copy"),
        round_from=0.5,
        log_every=5,
        checkpoint_every=1000,
        score_every=1000,
        final_count=4,
    )
    return replace(usual, **changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = Trainer(settings(tmp_path_factory.mktemp("trained")))
    assert trainer.run()
    trainer.finish()
    return trainer


def test_loss_falls(trained: Trainer) -> None:
    history = trained.progress.history
    assert [row["step"] for row in history] == [5, 10, 15, 20]
    assert history[0]["loss"] > 5
    assert history[-1]["loss"] < 0.6 * history[0]["loss"]
    for task in ("add", "facts", "copy"):
        assert history[-1]["tasks"][task] < 0.75 * history[0]["tasks"][task], task


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """It stops where weights begin to be rounded."""
    short: dict[str, Any] = {"steps": 4, "log_every": 1}
    whole = Trainer(settings(tmp_path / "whole", **short))
    assert whole.run()
    stopped = Trainer(settings(tmp_path / "stopped", stop_at=2, **short))
    assert not stopped.run()
    resumed = Trainer(settings(tmp_path / "stopped", **short))
    assert resumed.progress.step == 2
    assert resumed.run()
    assert len(whole.progress.history) == 4
    assert [row["loss"] for row in resumed.progress.history] == [row["loss"] for row in whole.progress.history]
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name].bfloat16(), weight.bfloat16(), rtol=0, atol=0)


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    assert not Trainer(settings(tmp_path, stop_at=0)).run()
    with pytest.raises(ValueError, match="on other data .* remove it, or give another --checkpoint"):
        Trainer(settings(tmp_path, seed=1))


def test_what_a_run_leaves(trained: Trainer, tmp_path: Path) -> None:
    output = trained.settings.output
    record = json.loads((output / "training.json").read_text())
    assert record["scores"].keys() == {"add", "facts", "copy"}
    assert record["settings"]["seed"] == 0 and record["settings"]["shape"]["short_rows"] == 2
    assert (output / "model.safetensors").stat().st_size == pytest.approx(2 * record["parameters"], rel=0.01)
    plot(output / "training.json", tmp_path / "curve.svg")
    drawn = ElementTree.parse(tmp_path / "curve.svg").getroot()
    lines = drawn.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3 + 1 + 3


def test_scores_are_those_of_greedy_decoding(config: dict[str, Any], files: Path, tmp_path: Path) -> None:
    """A model that has learned three answers by heart: what transformers writes is what the score says it writes."""
    from tiny_model.heldout import all_items
    from tiny_model.render import answer_text, prompt_text
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    encoder = Encoder(tokenizer)
    found = list(all_items(4, ("facts",)))
    learned = [encoder.document(item.problem, item.thinking) for item in found[:3]]
    model = TinyModel(config, torch.float32)
    optimizer = Optimizer(model)
    from tiny_model.mixture import _fill

    rows = _fill([[document] for document in learned], 64)
    for _ in range(25):
        step_loss(model, [rows], CPU).total.backward()
        optimizer.step(1.0)
        optimizer.zero_grad()
    directory = save(model, files, tmp_path / "model")
    load_weights(model, directory)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    right = 0
    for item in found:
        prompt = torch.tensor([tokenizer.encode(prompt_text(item.problem, item.thinking)).ids])
        out = reference.generate(prompt, max_new_tokens=30, do_sample=False)[0, prompt.shape[1] :].tolist()
        right += tokenizer.decode(out, skip_special_tokens=False) == answer_text(item.problem, item.thinking)
    assert right >= 3
    assert scores(model, encoder, 4, CPU, ("facts",)) == {"facts": right / 4}


def test_batches_of_processes_are_those_made_here(files: Path) -> None:
    tokenizer_file = files / "tokenizer.json"
    here, elsewhere = batches(tokenizer_file, SHAPE, 3, 7, 0), batches(tokenizer_file, SHAPE, 3, 7, 2)
    for _ in range(3):
        for a, b in zip(next(here), next(elsewhere), strict=True):
            assert (a.tokens == b.tokens).all() and (a.weights == b.weights).all()
    elsewhere.close()


def test_schedule() -> None:
    usual = settings(Path(), steps=100, minutes=1)
    rates = [learning_rate(step / 100, usual) for step in range(101)]
    assert rates[0] < 0.2 and rates[2] == rates[40] == 1 and rates[100] == 0
    assert all(a >= b for a, b in itertools.pairwise(rates[40:]))
    progress = Progress(step=10)
    assert progress.share(usual, elapsed=6) == pytest.approx(0.1)
    assert progress.share(usual, elapsed=45) == pytest.approx(0.75), "time that runs out ends the schedule, too"


def test_orthogonal_updates() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, 32, 64) @ torch.randn(64, 64)
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.min() > 0.3 and values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices[0], full_matrices=False)
    assert float((orthogonal(matrices)[0] * (left @ right)).sum() / 32) > 0.6


def test_rounding_gives_weights_of_the_formats() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    for group in mxfp4(weight).view(-1, 32):
        scale = float(2 ** (group.abs().max().log2().floor() - 2))
        steps = (group.abs() / scale).tolist()
        assert any(all(any(abs(s * f - m) < 1e-5 for m in E2M1) for s in steps) for f in (1, 0.5)), steps
    for before, after in zip(weight.view(-1, 32), int4(weight).view(-1, 32), strict=True):
        levels = after / (before.abs().max() / 7)
        assert torch.allclose(levels, levels.round(), atol=1e-4) and levels.abs().max() <= 7.01
    assert float((mxfp4(weight) - weight).norm() / weight.norm()) < 0.2
    assert float((int4(weight) - weight).norm() / weight.norm()) < 0.12


def test_rounded_weights_come_back(config: dict[str, Any]) -> None:
    model = TinyModel(config, torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with rounded_weights(model, step=0):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]) != is_matrix(name), name
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


DEFECTS = {
    "swapped experts": swap_experts(layer=1, first=0, second=3),
    "wrong block scale": scale_block("model.layers.1.self_attn.q_proj.weight", row=1, column=0, factor=2.0),
    "transposed": transpose_square("model.layers.2.self_attn.o_proj.weight"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_change_what_the_model_computes(name: str, config: dict[str, Any], files: Path, tmp_path: Path) -> None:
    source = save(TinyModel(config, torch.float32), files, tmp_path / "good")
    bad = with_defect(source, tmp_path / "bad", DEFECTS[name])
    tokens, place = torch.randint(0, 4096, (1, 32)), torch.zeros(1, 32, dtype=torch.int32)
    outputs = []
    for directory in (source, bad):
        model = TinyModel(config, torch.float32)
        load_weights(model, directory)
        outputs.append(model.logits(model(tokens, torch.arange(32)[None], place)[0]))
    assert not torch.allclose(*outputs, atol=1e-3)


def test_a_defect_that_changes_nothing_is_refused(config: dict[str, Any], files: Path, tmp_path: Path) -> None:
    source = save(TinyModel(config, torch.float32), files, tmp_path / "good")
    with pytest.raises(ValueError, match="leaves everything as it was"):
        with_defect(source, tmp_path / "bad", forget_norm("model.norm.weight"))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_learns_the_same(compiled: bool, trained: Trainer, tmp_path: Path) -> None:
    """In bfloat16, with the kernels of the GPU."""
    trainer = Trainer(settings(tmp_path, device="cuda", compile=compiled))
    assert trainer.run()
    trainer.finish()
    for row, wanted in zip(trainer.progress.history, trained.progress.history, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=0.1)


def test_tables_show_records_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "bf16.json").write_text(json.dumps({"scores": {"add": 1.0, "sort": 0.5}}))
    rows = {"add": {"score": 0.75}, "copy": {"score": 0.25}}
    (tmp_path / "int4.json").write_text(json.dumps({"tasks": rows, "targets": {}}))
    lines = table([tmp_path / "bf16.json", tmp_path / "int4.json"]).splitlines()
    assert lines[0] == "| task | bf16 | int4 |"
    assert lines[2:] == ["| add | 100.0 | 75.0 |", "| sort | 50.0 |  |", "| copy |  | 25.0 |", "| mean | 75.0 | 50.0 |"]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"neither a training\.json nor a report"):
        table([tmp_path / "other.json"])


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "tiny_model")]
    for more, message in (
        (["train", "--output", str(tmp_path), "--device", "cpu", "--only", "juggling"], "no such tasks: juggling"),
        (["install", str(tmp_path)], "did training end?"),
    ):
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
