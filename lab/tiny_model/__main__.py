"""python lab/tiny_model COMMAND: makes, trains, checks and installs the embedded model.

train     data, tokenizer, training and scores, in one run; the same command again resumes
files     everything but the weights: tokenizer, configuration, chat template
tokenizer makes the tokenizer anew from the data; models that were trained before need the old one
heldout   the held-out problems as JSON lines, the input of benchmark/evals/bench_tiny.py
gsm8k     word problems in the form of GSM8K
score     held-out exact match of a finished model, without a server
plot      the picture of a training record
table     scores of a training record or of bench_tiny reports, in Markdown
compare   greedy tokens of transformers and of a running server
install   copies a finished model into the package
drafts    trains what drafts for a finished model (an EAGLE-3 head, an MTP layer, a DFlash draft) and says how many
          draft tokens stand
install_drafts  copies these into the package
eyes      trains the tower with which a finished model sees, and says how many answers about pictures are right
install_eyes  writes the model that sees into the package, of the text model there and the output of `eyes`
adapters  trains three LoRA adapters of a finished model, and says how many held-out answers are right with each
install_adapters  copies these into the package
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes that make data are as many as the cores
sys.path[0] = str(Path(__file__).resolve().parents[1])  # the package, not the folder that `python FOLDER` puts there


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python lab/tiny_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands.add_parser("train"))
    files = commands.add_parser("files")
    files.add_argument("output", type=Path)
    commands.add_parser("tokenizer")
    heldout = commands.add_parser("heldout")
    heldout.add_argument("output", type=Path)
    heldout.add_argument("--count", type=int, default=40, help="problems a task")
    heldout.add_argument("--all-facts", action="store_true", help="every held-out way to ask for a fact, and no others")
    gsm8k = commands.add_parser("gsm8k")
    gsm8k.add_argument("output", type=Path)
    gsm8k.add_argument("--count", type=int, default=205)
    score = commands.add_parser("score")
    score.add_argument("model", type=Path)
    score.add_argument("--count", type=int, default=100, help="problems a task")
    score.add_argument("--device", default="cpu")
    score.add_argument("--tasks", type=_names, default=())
    plot = commands.add_parser("plot")
    plot.add_argument("record", type=Path, help="training.json of a finished run")
    plot.add_argument("output", type=Path, help="the .svg file to write")
    table = commands.add_parser("table")
    table.add_argument("records", type=Path, nargs="+", help="training.json, or reports of bench_tiny")
    _add_compare(commands.add_parser("compare"))
    install = commands.add_parser("install")
    install.add_argument("source", type=Path)
    _add_drafts(commands.add_parser("drafts"))
    install_drafts = commands.add_parser("install_drafts")
    install_drafts.add_argument("source", type=Path)
    _add_eyes(commands.add_parser("eyes"))
    install_eyes = commands.add_parser("install_eyes")
    install_eyes.add_argument("source", type=Path)
    install_eyes.add_argument("--output", type=Path, help="another directory than the package's")
    _add_adapters(commands.add_parser("adapters"))
    install_adapters = commands.add_parser("install_adapters")
    install_adapters.add_argument("source", type=Path)
    args = parser.parse_args()
    try:
        globals()[f"run_{args.command}"](args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _add_train(parser: argparse.ArgumentParser) -> None:
    from tiny_model.mixture import Shape

    shape = Shape()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument(
        "--minutes", type=float, default=8.9, help="of training, at most; the schedule fits itself to it"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, help="processes that make data (default: cores - 1; 0: none)")
    parser.add_argument("--checkpoint", type=Path, help="default: checkpoint.pt in the output directory")
    parser.add_argument("--start-from", type=Path, help="directory of a finished model to begin with")
    parser.add_argument("--only", type=_names, default=(), help="tasks, separated by commas")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--short-rows", type=int, default=shape.short_rows)
    parser.add_argument("--short-length", type=int, default=shape.short_length)
    parser.add_argument("--long-rows", type=int, default=shape.long_rows)
    parser.add_argument("--long-length", type=int, default=shape.long_length)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--score-every", type=int, default=1000)
    parser.add_argument("--score-count", type=int, default=48)
    parser.add_argument("--final-count", type=int, default=100, help="problems a task in the last scores")
    parser.add_argument("--stop-at", type=int, help="leave after this step; the same command without it resumes")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="directory that the server serves")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--count", type=int, default=10, help="problems a task")
    parser.add_argument("--device", default="cpu", help="of transformers")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"], help="of the server, too")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--least", type=float, default=0.99, help="share of prompts that must agree")
    parser.add_argument("--output", type=Path, help="JSON report")


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="directory of the finished model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1536, help="that the model writes for training")
    parser.add_argument("--documents", type=int, default=2000, help="of the model's own training, besides")
    parser.add_argument("--held-out", type=int, default=256, help="texts in which proposes are counted")
    parser.add_argument("--minutes", type=float, default=10, help="of training, for each of them")
    parser.add_argument("--only", type=_names, default=(), help="of eagle3, mtp and dflash, separated by commas")
    parser.add_argument("--device", default="cpu")


def _add_eyes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="directory of the finished text model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=80, help="of training")
    parser.add_argument("--steps", type=int, help="at most")
    parser.add_argument("--batch", type=int, default=512, help="pictures of a step")
    parser.add_argument("--rate", type=float, default=1.0, help="of the usual learning rates, the share")
    parser.add_argument("--judged", type=int, default=4096, help="held-out pictures")
    parser.add_argument("--log-every", type=int, default=100, help="steps")
    parser.add_argument("--device", default="cuda")


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="directory of the finished text model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=240, help="of training, for each of them")
    parser.add_argument("--judged", type=int, default=180, help="held-out problems, for each of them")
    parser.add_argument("--seed", type=int, default=0)


def run_train(args: argparse.Namespace) -> None:
    from tiny_model.mixture import TASK_NAMES, Shape
    from tiny_model.train import Settings, Trainer

    unknown = set(args.only) - set(TASK_NAMES)
    if unknown:
        raise ValueError(f"--only: no such tasks: {', '.join(sorted(unknown))}; there are {', '.join(TASK_NAMES)}")
    workers = max(1, (os.cpu_count() or 2) - 1) if args.workers is None else args.workers
    if args.device == "cpu" and args.workers is None:
        workers = 0
    settings = Settings(
        output=args.output,
        steps=args.steps,
        minutes=args.minutes,
        seed=args.seed,
        device=args.device,
        workers=workers,
        shape=Shape(args.short_rows, args.short_length, args.long_rows, args.long_length),
        only=args.only,
        start_from=args.start_from,
        checkpoint=args.checkpoint,
        compile=not args.no_compile,
        score_every=args.score_every,
        score_count=args.score_count,
        final_count=args.final_count,
        log_every=args.log_every,
        stop_at=args.stop_at,
    )
    trainer = Trainer(settings)
    if trainer.run():
        trainer.finish()
        print(f"finished: {settings.output}")


def run_files(args: argparse.Namespace) -> None:
    from tiny_model.layout import write_files

    write_files(args.output)


def run_tokenizer(_: argparse.Namespace) -> None:
    from tiny_model.layout import TOKENIZER_FILE, make_tokenizer

    make_tokenizer().save(str(TOKENIZER_FILE))
    print(TOKENIZER_FILE)


def run_heldout(args: argparse.Namespace) -> None:
    from tiny_model.heldout import all_items, every_held_out_fact, write

    items = every_held_out_fact() if args.all_facts else all_items(args.count)
    print(f"{args.output}: {write(args.output, items)} problems")


def run_gsm8k(args: argparse.Namespace) -> None:
    from tiny_model.heldout import write_gsm8k

    write_gsm8k(args.output, args.count)


def run_score(args: argparse.Namespace) -> None:
    from tiny_model.score import score_directory

    for task, value in score_directory(args.model, args.count, args.device, args.tasks).items():
        print(f"{task:20} {100 * value:5.1f}")


def run_plot(args: argparse.Namespace) -> None:
    from tiny_model.plot import plot

    plot(args.record, args.output)


def run_table(args: argparse.Namespace) -> None:
    from tiny_model.table import table

    print(table(args.records))


def run_compare(args: argparse.Namespace) -> None:
    from tiny_model.compare import compare

    raise SystemExit(compare(args))


def run_drafts(args: argparse.Namespace) -> None:
    from tiny_model.drafts import KINDS, train_drafts

    unknown = set(args.only) - set(KINDS)
    if unknown:
        raise ValueError(f"--only: no such drafts: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    kinds = args.only or KINDS
    train_drafts(args.model, args.output, args.texts, args.documents, args.minutes, args.held_out, args.device, kinds)


def run_eyes(args: argparse.Namespace) -> None:
    from tiny_model.eyes import Settings, train_eyes

    settings = Settings(
        output=args.output,
        seconds=args.seconds,
        device=args.device,
        batch=args.batch,
        rate=args.rate,
        steps=args.steps,
        judged=args.judged,
        log_every=args.log_every,
    )
    train_eyes(args.model, settings)


def run_adapters(args: argparse.Namespace) -> None:
    from tiny_model.adapters import train_adapters

    train_adapters(args.model, args.output, args.steps, args.judged, args.seed)


def run_install_adapters(args: argparse.Namespace) -> None:
    from tiny_model.install import install_adapters

    install_adapters(args.source)


def run_install_eyes(args: argparse.Namespace) -> None:
    from tiny_model.install import install_eyes

    install_eyes(args.source, args.output)


def run_install_drafts(args: argparse.Namespace) -> None:
    from tiny_model.install import install_drafts

    install_drafts(args.source)


def run_install(args: argparse.Namespace) -> None:
    from tiny_model.install import install

    install(args.source)


if __name__ == "__main__":
    main()
