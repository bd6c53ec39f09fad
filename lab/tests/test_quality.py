"""What forms cost: figures are those of whole rows of logits, and results are kept."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quality import __main__ as quality
from quality import forms, head, model, parallel, tables, texts
from quality.model import Model, write_16_bits
from srt.configs.gguf_files import add_byte_level, convert, trained
from srt.models.harness import hf_logits, random_tokens, save_tiny

from sglang.quantize.__main__ import main as quantize
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.reference import round_activation
from sglang.srt.utils.hf_tokenizer import load_tokenizer


def test_figures_are_those_of_whole_rows_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "ROWS", 16)
    monkeypatch.setattr(head, "COLUMNS", 64)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(201, 32, generator=generator).bfloat16()
    plain = torch.randn(50, 32, generator=generator).bfloat16().float()
    form = (plain + 0.2 * torch.randn(50, 32, generator=generator)).bfloat16().float()
    ids = torch.randint(201, (50,), generator=generator)
    reference = head.make_reference(plain, weight)
    scores = head.score(form, ids, weight, reference)
    p, q = ((states @ weight.float().T).log_softmax(-1) for states in (plain, form))
    torch.testing.assert_close(scores.divergence, (p.exp() * (p - q)).sum(-1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(scores.logprobs, q.gather(1, ids[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(reference.logprobs(ids, weight), p.gather(1, ids[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    assert torch.equal(scores.same, p.argmax(-1) == q.argmax(-1)) and 0 < scores.same.sum() < 50
    assert torch.equal(head.likeliest(form, weight), q.argmax(-1))
    itself = head.score(plain, ids, weight, reference)
    assert itself.same.all() and itself.divergence.abs().max() < 1e-5
    first = reference.first(7, torch.device("cpu"))
    assert len(first.hidden) == len(first.lse) == 7


def tiny(folder: Path) -> tuple[Any, Path]:
    """A model whose head is its embedding, in GGUF with a tokenizer."""
    tokenizer = trained("qwen2")
    size = tokenizer.get_vocab_size()
    model = save_tiny(
        "llama_wide", folder / "saved", vocab_size=size, tie_word_embeddings=True, max_position_embeddings=1024
    )
    add_tokenizer = partial(add_byte_level, tokenizer=tokenizer, pre="qwen2")
    return model, convert(folder / "saved", folder / "model.gguf", more=add_tokenizer)


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    return tiny(tmp_path)


@torch.inference_mode()
def test_hidden_states_are_those_of_transformers(model_file: tuple[Any, Path], tmp_path: Path) -> None:
    """Prompts of several lengths, in chunks; quantized products round activations, as GPUs do."""
    hf, file = model_file
    prompts = [random_tokens(count, seed=count) for count in (40, 17)]
    write_16_bits(str(file), tmp_path / "plain")
    assert (
        quantize(["--model", str(tmp_path / "plain"), "--scheme", "fp8_channel", "--output", str(tmp_path / "fp8")])
        == 0
    )

    def logits(path: str, **flags: Any) -> list[torch.Tensor]:
        model = Model(str(tmp_path / path), {}, 2, 64, **flags)
        assert (model.quantized_share > 0.99) == (path == "fp8")
        return [states @ model.head.float().T for states in model.hidden_states(prompts, 16)]

    for ids, plain, exact, rounded in zip(
        prompts, logits("plain"), logits("fp8", rounds=False), logits("fp8"), strict=True
    ):
        want = hf_logits(hf, ids)

        def error(got: torch.Tensor, want: torch.Tensor = want) -> float:
            return ((got - want).norm() / want.norm()).item()

        assert len(plain) == len(ids) and error(plain) < 0.06
        assert error(plain) < error(exact) < error(rounded) < 0.5


def test_a_kernel_that_dequantizes_weights_gets_rounded_activations() -> None:
    seen: list[torch.Tensor] = []

    def product(x: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: Any = None) -> torch.Tensor:
        seen.append(x)
        return x

    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.tensor([0.01])
    model._behind_rounding(product, SCHEMES["nvfp4"], scale)(x)
    assert torch.equal(seen[0], round_activation(x, SCHEMES["nvfp4"], scale.max()).bfloat16())
    assert not torch.equal(seen[0], x) and seen[0].dtype == x.dtype


def test_questions_stand_behind_others_and_their_answers(model_file: tuple[Any, Path], tmp_path: Path) -> None:
    write_16_bits(str(model_file[1]), tmp_path / "plain")
    from sglang.srt.server_args import ServerArgs

    tokenizer = load_tokenizer(ServerArgs(model_path=str(tmp_path / "plain")))
    assert tokenizer is not None
    facts = texts.read_facts(["France: Paris, Nice", "Peru: Lima"], 3)
    assert sorted(facts) == [("Lima", "Peru"), ("Nice", "France"), ("Paris", "France")]
    (prompt,) = texts.question_prompts(tokenizer, facts)
    for (city, country), (first, end) in zip(facts, prompt.answers, strict=True):
        assert tokenizer.decode(prompt.ids[first:end]) == f" {country}."
        assert tokenizer.decode(prompt.ids[:first]).endswith(f"\n{city} is a city in the country of")
    cities = texts.read_facts(quality.CITIES.read_text().splitlines(), 1000)
    assert len(cities) >= 200 and len({city for city, _ in cities}) == len(cities)


def test_windows_are_whole(model_file: tuple[Any, Path], tmp_path: Path) -> None:
    write_16_bits(str(model_file[1]), tmp_path / "plain")
    from sglang.srt.server_args import ServerArgs

    tokenizer = load_tokenizer(ServerArgs(model_path=str(tmp_path / "plain")))
    assert tokenizer is not None
    found = texts.windows(tokenizer, "It's a small text. " * 20, 40, 16)
    assert [len(ids) for ids in found] == [16, 16, 16]
    with pytest.raises(UserError, match="The text has"):
        texts.windows(tokenizer, "Short.", 40, 16)


def test_cells_come_in_the_order_of_their_worth() -> None:
    cells = forms.cells(50, 8, [forms.PLAIN, "nvfp4"])
    assert [(cell.weights, cell.cache, cell.tokens) for cell in cells] == [
        ("16-bit", "16-bit", 50), ("16-bit", "fp8", 50), ("16-bit", "fp4", 50), ("nvfp4", "16-bit", 50),
        ("nvfp4", "fp8", 8), ("nvfp4", "fp4", 8),
    ]  # fmt: skip
    assert [cell.name for cell in forms.cells(50, 8, ["nvfp4"], ["fp4"])] == ["nvfp4.fp4.8"]
    assert forms.longest_first(["16-bit", "nvfp4", "nvfp4-gptq"]) == ["nvfp4-gptq", "16-bit", "nvfp4"]


def test_a_run_keeps_what_it_has_measured(
    model_file: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(texts, "python_reference", lambda: "It's a small text. " * 40)
    words = ["--model-path", str(model_file[1]), "--out", str(tmp_path / "out"), "--tokens", "64", "--window", "32"]
    words += ["--cross-tokens", "32", "--chunk", "16", "--questions", "4", "--calibration-tokens", "64"]
    words += ["--weights", "16-bit", "transformers", "int4_g32", "int4_g32-gptq", "fp8_block"]
    assert quality.main(words) == 0
    capsys.readouterr()
    monkeypatch.setattr(quality.Run, "_scores", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(parallel.Processes, "_start", lambda *_: pytest.fail("measured again"))
    assert quality.main([*words, "--jobs", "2"]) == 0
    capsys.readouterr()
    assert quality.main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 13
    assert quality.main([*words, "--table"]) == 0
    title, _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "62 tokens:"
    assert rows[0].startswith("| 16-bit | 16-bit | ") and rows[0].endswith(" |  |  |  | 0 of 4 |")
    assert [row.split(" | ")[:2] for row in rows[:7]] == [
        ["| 16-bit", "16-bit"], ["| 16-bit", "fp8"], ["| 16-bit", "fp4"], ["| transformers", "16-bit"],
        ["| `fp8_block`", "16-bit"], ["| `int4_g32`", "16-bit"], ["| `int4_g32`, gptq", "16-bit"],
    ]  # fmt: skip
    assert float(rows[3].split(" | ")[4]) < 0.01 < float(rows[5].split(" | ")[4])


def test_processes_share_the_forms(
    model_file: tuple[Any, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The reference comes first; a second run goes on with what one that ended left."""
    (tmp_path / "text.txt").write_text("It's a small text. " * 40)
    (tmp_path / "calibration.jsonl").write_text("")
    words = ["--model-path", str(model_file[1]), "--out", str(tmp_path / "out"), "--tokens", "64", "--window", "32"]
    words += ["--chunk", "16", "--questions", "0", "--weights", "16-bit", "fp8_channel", "--caches", "16-bit"]
    words += ["--texts", str(tmp_path), "--jobs", "2"]
    assert quality.main([*words, "--limit", "0"]) == 1
    assert "not begun (the limit of time): model 16-bit" in capfd.readouterr().out
    assert quality.main(words) == 0
    first, second, _, title, *_, plain, form = capfd.readouterr().out.splitlines()
    assert (first.split(":")[0], second.split(":")[0], title) == (
        "model 16-bit",
        "model fp8_channel",
        "model, 62 tokens:",
    )
    assert plain.startswith("| 16-bit | 16-bit | ") and form.startswith("| `fp8_channel` | 16-bit | ")


def test_processes_that_fail_or_last_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a GPU; when the time is over none is left."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def task(name: str, code: str) -> parallel.Task:
        return parallel.Task(name, [sys.executable, "-c", code], tmp_path / name)

    print_gpu = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    with parallel.Processes(2, "cuda", 60) as processes:
        processes.run([task("a", print_gpu), task("b", print_gpu), task("c", "raise SystemExit(3)")])
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line.split(":")[0] for line in lines] == ["a", "b", "c"]
    assert lines[2].endswith(f"status 3: {tmp_path / 'c'}")
    assert {(tmp_path / name).read_text() for name in "ab"} == {"0\n", "1\n"}
    with parallel.Processes(1, "cpu", 60) as processes:
        waits = task("waits", "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")
        processes.run([waits, task("never", "")])
    assert capsys.readouterr().out.splitlines() == ["not begun (SIGTERM): never", "waits: not finished (SIGTERM)"]


def test_rows_say_if_few_weights_are_quantized(model_file: tuple[Any, Path], tmp_path: Path) -> None:
    write_16_bits(str(model_file[1]), tmp_path / "plain")
    words = ["--model", str(tmp_path / "plain"), "--output", str(tmp_path / "some"), "--include", "*.down_proj"]
    assert quantize([*words, "--scheme", "fp8_channel"]) == 0
    share = Model(str(tmp_path / "some"), {}, 2, 64).quantized_share
    assert 0.1 < share < 0.4
    one = {"weights": "fp8_channel", "cache": "16-bit", "count": 8, "perplexity": 2.0, "perplexity_16_bit": 2.0}
    one |= {"quantized_share": share, "divergence": 0.0, "same": 1.0, "questions": 0}
    assert f"| `fp8_channel`, {share:.0%} of the weights | 16-bit |" in tables.table([one])


def test_a_form_that_is_refused_has_a_row() -> None:
    assert "| `nvfp4` | 16-bit | refused | | | | |" in tables.table(
        [{"weights": "nvfp4", "cache": "16-bit", "tokens": 8, "refused": "No."}]
    )
