"""python lab/quality --model-path smollm2 --out DIR: what forms of weights and of the KV cache cost real models.

For each form: perplexity of a text, the divergence (Kullback-Leibler) from 16 bits, the share of tokens whose likeliest
successor is that of 16 bits, and how many of 200 questions are answered. The text is the reference of the Python
language. It is read in windows, all of them together by a chunk a step, so that tokens read earlier chunks from the KV
cache. Products are computed on this machine's processor as the reference of the kernels has them: weights dequantized,
activations rounded by their scheme.

Each result is a file in DIR, and a second run goes on where the first one ended. `--table` prints what is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the package, not the folder that `python FOLDER` puts there

from quality import forms, head, parallel, peers, tables, texts  # noqa: E402
from quality.model import STEP_TOKENS, Model, write_16_bits  # noqa: E402
from sglang.quantize.__main__ import CALIBRATED  # noqa: E402
from sglang.quantize.__main__ import main as quantize  # noqa: E402
from sglang.srt.errors import UserError  # noqa: E402

CITIES = Path(__file__).with_name("cities.txt")
QUESTION_CHUNK = 64
QUESTION_TOKENS = 640
"""As many as a prompt of questions has at most."""


class Run:
    """All measurements of one model. `folder` has a file for each, the reference, and the forms' checkpoints."""

    def __init__(self, args: argparse.Namespace, model_path: str) -> None:
        self.args, self.model_path = args, model_path
        self.name = Path(model_path).name.removesuffix(".gguf")
        self.folder = Path(args.out) / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.texts = Path(args.texts or args.out)
        self.facts = texts.read_facts(CITIES.read_text().splitlines(), args.questions)
        self.cells = forms.cells(args.tokens, args.cross_tokens, args.weights, args.caches)

    def table(self) -> str:
        """Returns what has been measured."""
        return tables.table([result for cell in self.cells if (result := self.stored(cell)) is not None])

    def missing(self) -> list[forms.Cell]:
        """Returns the cells that nothing has measured, or, of 16 bits, whose reference is lost."""
        plain = None if self.has_reference() else forms.Cell(forms.PLAIN, forms.PLAIN, self.args.tokens)
        return [cell for cell in self.cells if cell == plain or self.stored(cell) is None]

    def has_reference(self) -> bool:
        """Returns whether the cell of 16 bits has left what others are compared with."""
        return self._reference_path().exists()

    def measure(self, cell: forms.Cell) -> dict[str, Any]:
        """Returns the result of a cell, which is computed if no earlier run has done it."""
        if (stored := self.stored(cell)) is not None and cell not in self.missing():
            return stored
        started = time.process_time()
        result = {"weights": cell.weights, "cache": cell.cache, "tokens": cell.tokens}
        try:
            result |= self._scores(cell)
        except UserError as error:
            result["refused"] = str(error)
        self._save(cell, result | {"cpu_seconds": round(time.process_time() - started, 1)})
        return result

    def stored(self, cell: forms.Cell) -> dict[str, Any] | None:
        """Returns the result of a cell, None if there is none yet."""
        path = self._path(cell)
        result: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return result

    def _path(self, cell: forms.Cell) -> Path:
        return self.folder / f"{cell.name}.json"

    def _reference_path(self) -> Path:
        return self.folder / f"reference.{self.args.tokens}.pt"

    def _save(self, cell: forms.Cell, result: dict[str, Any]) -> None:
        """Writes a result as a whole or not at all."""
        partial = self._path(cell).with_suffix(".part")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.rename(self._path(cell))

    def _scores(self, cell: forms.Cell) -> dict[str, Any]:
        flags = {"kv_cache_dtype": forms.CACHES[cell.cache]}
        if cell.weights in forms.PEERS:
            return self._scores_of_peer(cell)
        requests = max(-(-len(self.facts) // texts.QUESTIONS_A_PROMPT), -(-self.args.tokens // self.args.window))
        model = self._model(self._checkpoint(cell.weights), flags, requests, max(self.args.window, QUESTION_TOKENS))
        prompts = self._prompts(model, cell)
        hidden = torch.cat([states[:-1] for states in model.hidden_states(prompts, self.args.chunk)])
        right = self._answers(model) if self.facts and cell.tokens == self.args.tokens else []
        return self._figures(hidden, prompts, model.head, cell) | {
            "quantized_share": model.quantized_share,
            "right": sum(right),
            "questions": len(right),
            "wrong": [city for (city, _), is_right in zip(self.facts, right, strict=False) if not is_right],
        }

    def _scores_of_peer(self, cell: forms.Cell) -> dict[str, Any]:
        path = self._checkpoint(forms.PLAIN)
        model = self._model(path, {}, 1, self.args.window)
        prompts = self._prompts(model, cell)
        if cell.weights == forms.LLAMA_CPP:
            found = peers.hidden_states_of_llama_cpp(self.model_path, prompts, self.args.device)
        else:
            found = peers.hidden_states(path, prompts, self.args.device)
        return self._figures(torch.cat([states[:-1] for states in found]), prompts, model.head, cell)

    def _model(self, path: str, flags: dict[str, Any], requests: int, tokens: int) -> Model:
        step_tokens = max(STEP_TOKENS, requests * self.args.chunk)
        return Model(path, flags, requests, tokens, device=self.args.device, step_tokens=step_tokens)

    def _prompts(self, model: Model, cell: forms.Cell) -> list[list[int]]:
        return texts.windows(model.tokenizer, texts.measured_text(self.texts), cell.tokens, self.args.window)

    def _figures(
        self, hidden: torch.Tensor, prompts: list[list[int]], weight: torch.Tensor, cell: forms.Cell
    ) -> dict[str, Any]:
        hidden = hidden.to(weight.device)
        following = torch.tensor([ids[1:] for ids in prompts], device=weight.device).flatten()
        known = self._reference(hidden, weight, cell)
        scores = head.score(hidden, following, weight, known)
        return {
            "count": len(hidden),
            "perplexity": scores.logprobs.double().mean().neg().exp().item(),
            "perplexity_16_bit": known.logprobs(following, weight).double().mean().neg().exp().item(),
            "divergence": scores.divergence.double().mean().item(),
            "same": scores.same.double().mean().item(),
            "questions": 0,
        }

    def _checkpoint(self, weights: str) -> str:
        form = forms.WEIGHTS[weights]
        out = self.folder / "checkpoints" / weights
        done = out.with_suffix(".done")
        if not done.exists():
            shutil.rmtree(out, ignore_errors=True)
            if not form.scheme:
                write_16_bits(self.model_path, out)
                done.touch()
                return str(out)
            arguments = ["--model-path", self._checkpoint(forms.PLAIN), "--scheme", form.scheme, "--output", str(out)]
            arguments += ["--rounding", form.rounding]
            if form.rounding in CALIBRATED:
                arguments += ["--calibrate", str(texts.calibration_file(self.texts))]
                arguments += ["--calibration-device", self.args.calibration_device or self.args.device]
                arguments += ["--calibration-tokens", str(self.args.calibration_tokens)]
            if quantize(arguments):
                raise UserError(f"sglang.quantize cannot write {weights}")
            done.touch()
        return str(out)

    def _reference(self, hidden: torch.Tensor, weight: torch.Tensor, cell: forms.Cell) -> head.Reference:
        """Returns the reference of as many tokens; the first cell, of 16 bits, makes it."""
        path = self._reference_path()
        if not path.exists():
            if (cell.weights, cell.cache) != (forms.PLAIN, forms.PLAIN):
                raise SystemExit(f"error: {path} is missing; the cell of 16 bits makes it")
            made = head.make_reference(hidden, weight)
            parts = (made.hidden, made.expected, made.lse, made.likeliest)
            torch.save(tuple(part.cpu() for part in parts), path)
        return head.Reference(*torch.load(path)).first(len(hidden), hidden.device)

    def _answers(self, model: Model) -> list[bool]:
        """Returns for each question whether greedy decoding gives the answer: each of its tokens is likeliest."""
        prompts = texts.question_prompts(model.tokenizer, self.facts)
        right = []
        for asked, states in zip(prompts, model.hidden_states([p.ids for p in prompts], QUESTION_CHUNK), strict=True):
            found = head.likeliest(states.to(model.head.device), model.head).tolist()
            right += [found[first - 1 : end - 1] == asked.ids[first:end] for first, end in asked.answers]
        return right


def _together(args: argparse.Namespace, runs: Sequence[Run]) -> int:
    """Measures with processes side by side: first the references, then a process for each form of each model. Returns
    the exit status."""
    given = ("out", "tokens", "cross_tokens", "window", "chunk", "questions", "calibration_tokens", "device")
    given += ("calibration_device", "texts")
    options = [
        (f"--{name.replace('_', '-')}", str(value)) for name in given if (value := getattr(args, name)) is not None
    ]

    def task(run: Run, form: str, caches: Sequence[str]) -> parallel.Task:
        command = [sys.executable, str(Path(__file__).parent), *(word for option in options for word in option)]
        command += ["--model-path", run.model_path, "--weights", form, "--caches", *caches]
        return parallel.Task(f"{run.name} {form}", command, run.folder / f"{form}.log")

    texts.measured_text(runs[0].texts)
    texts.calibration_file(runs[0].texts)
    with parallel.Processes(args.jobs, args.device, args.limit) as processes:
        processes.run([task(run, forms.PLAIN, [forms.PLAIN]) for run in runs if not run.has_reference()])
        processes.run(
            [
                task(run, form, args.caches)
                for form in forms.longest_first(args.weights)
                for run in runs
                if run.has_reference() and any(cell.weights == form for cell in run.missing())
            ]
        )
    for run in runs:
        print(f"\n{run.name}, {run.table()}", flush=True)
    return 1 if any(run.missing() for run in runs) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is missing, or prints a table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model-path", required=True, nargs="+", help="models in 16 bits, or in GGUF, whose head is their embedding"
    )
    parser.add_argument("--out", required=True, help="directory with one of results for each model")
    parser.add_argument("--texts", help="directory of text.txt and calibration.jsonl (default: --out; made if missing)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the forms (1: this one measures all)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which --jobs ends the run")
    parser.add_argument("--tokens", type=int, default=50_000, help="of text, for each form alone, and questions")
    parser.add_argument("--cross-tokens", type=int, default=8_192, help="for forms of weights with a quantized cache")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a window in a step")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--calibration-tokens", type=int, default=16384, help="for GPTQ")
    parser.add_argument("--calibration-device", choices=("cpu", "cuda"), help="(default: --device)")
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=forms.WEIGHTS,
        default=[form for form in forms.WEIGHTS if form != forms.LLAMA_CPP],
        metavar="FORM",
    )
    parser.add_argument("--caches", nargs="+", choices=forms.CACHES, default=list(forms.CACHES), metavar="CACHE")
    parser.add_argument("--table", action="store_true", help="print what has been measured")
    args = parser.parse_args(argv)
    runs = [Run(args, path) for path in args.model_path]
    if args.table:
        print("\n\n".join(run.table() for run in runs))
        return 0
    if args.jobs > 1:
        return _together(args, runs)
    with torch.inference_mode():
        for run in runs:
            for cell in run.cells:
                result = run.measure(cell)
                print(json.dumps({key: value for key, value in result.items() if key != "wrong"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
