"""The `sglang` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.embedded import DEFAULT_MODEL_PATH, DFLASH_PATH, EAGLE3_PATH, SEEING_PATH
from sglang.launch_server import report_user_errors, serve
from sglang.srt.errors import UserError
from sglang.version import __version__

USAGE = """\
usage: sglang COMMAND [options]

  serve      start a server; without --model-path it serves the small model that ships with the package;
             with --models FILE it serves several models of a YAML file, or of a folder, of which some sleep;
             with --dry-run it only says whether one would start, and how
  generate   print how a model continues one text; no chat template is applied
  plan       print the memory and the speed of a model on some GPUs, layout by layout; needs no GPU
  bench      benchmarks: serving, one-batch, offline, sweep, report
  tune       measure on this GPU which kernels and tiles a model should use here
  doctor     look for problems that make a server on this machine hang, slow down or not start
  version    print the version

`sglang COMMAND --help` explains a command.
"""


def _has_model(argv: Sequence[str]) -> bool:
    spellings = {word.partition("=")[0] for word in argv}
    abbreviations = {"--model-path"[:length] for length in range(len("--model"), len("--model-path") + 1)}
    return bool(spellings & {"--config", "--help", "-h", *abbreviations})


def _begins_with_model(argv: Sequence[str]) -> bool:
    return bool(argv) and not argv[0].startswith("-")


def with_model(argv: Sequence[str]) -> list[str]:
    """`argv`, naming the embedded model unless it names one itself (a positional first word counts)."""
    words = list(argv)
    if _begins_with_model(words):
        return ["--model-path", *words]
    if _has_model(words):
        return words
    path, drafts = SEEING_PATH, list[str]()
    algorithm = _drafts_without_path(words)
    if algorithm in EMBEDDED_DRAFTS:
        drafts = ["--speculative-draft-model-path", EMBEDDED_DRAFTS[algorithm]]
    elif algorithm in ("NEXTN", "EAGLE"):  # only the form without eyes has the layer
        path = DEFAULT_MODEL_PATH
        print(
            "The embedded model drafts with its own layer in its form without eyes; images are refused.",
            file=sys.stderr,
        )
    parsers = ["--tool-call-parser", "auto", "--reasoning-parser", "auto"]
    return ["--model-path", path, "--served-model-name", Path(DEFAULT_MODEL_PATH).name, *parsers, *drafts, *words]


EMBEDDED_DRAFTS = {"EAGLE3": EAGLE3_PATH, "DFLASH": DFLASH_PATH}


def _drafts_without_path(argv: Sequence[str]) -> str:
    """Returns the speculative algorithm that the words name without a path of its draft model; "" for none."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--speculative-algorithm", nargs="?", default="")
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model", nargs="?")
    options, _ = parser.parse_known_args(list(argv))
    return "" if options.speculative_draft_model_path else str(options.speculative_algorithm).upper()


def run_serve(argv: Sequence[str]) -> None:
    """Runs a server until it ends."""
    if any(word.partition("=")[0] == "--models" for word in argv):
        serve(argv, "sglang serve")
        return
    if not (_begins_with_model(argv) or _has_model(argv)):
        print(
            "Without --model-path this serves the small model that ships with the package; "
            "it knows little more than sums.",
            file=sys.stderr,
            flush=True,
        )
    serve(with_model(argv), "sglang serve")


def run_generate(argv: Sequence[str]) -> None:
    """One prompt through the engine, streamed to standard output. Other options are those of the server."""
    parser = argparse.ArgumentParser(
        prog="sglang generate", allow_abbrev=False, epilog="Server options such as --tp are accepted too."
    )
    parser.add_argument("--prompt", required=True, help="Text to continue; `-` reads standard input.")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="Default: 128.")
    parser.add_argument("--temperature", type=float, default=None, help="Default: the model's.")
    options, rest = parser.parse_known_args(list(argv))

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.environ import adopt_environment
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.log import configure_logging

    adopt_environment()
    args = ServerArgs.from_cli(["--log-level", "warning", *with_model(rest)], "sglang generate")
    configure_logging(args.log_level)
    args.incremental_streaming_output = False
    sampling: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    if options.temperature is not None:
        sampling["temperature"] = options.temperature
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    printed = 0
    with Engine(server_args=args) as engine:
        outputs = engine.generate(prompt, sampling_params=sampling, stream=True)
        assert isinstance(outputs, Iterator)
        for output in outputs:
            text = output["text"]
            print(text[printed:], end="", flush=True)
            printed = len(text)
    print()
    if not printed:
        print(
            "The model ended at once. It got the text as it is, without the chat template; for answers in a "
            "conversation use sglang serve.",
            file=sys.stderr,
        )


def run_plan(argv: Sequence[str]) -> None:
    from sglang.plan.command import run_plan as run

    run(argv)


def run_doctor(argv: Sequence[str]) -> int:
    from sglang.doctor.command import run_doctor as run

    return run(argv)


def run_tune(argv: Sequence[str]) -> int:
    from sglang.measuring.command import run_tune as run

    return run(argv)


def run_bench(argv: Sequence[str]) -> int:
    from sglang.bench.command import run_bench as run

    return run(argv)


def run_version(argv: Sequence[str]) -> None:
    """Prints the version."""
    if argv:
        raise UserError(f"sglang version takes no arguments; got {' '.join(argv)}.")
    print(f"sm120-sglang {__version__}")


COMMANDS: Mapping[str, Callable[[Sequence[str]], int | None]] = {
    "serve": run_serve,
    "generate": run_generate,
    "plan": run_plan,
    "tune": run_tune,
    "doctor": run_doctor,
    "bench": run_bench,
    "version": run_version,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] == "--version":
        words[0] = "version"
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"error: unknown command {words[0]!r}; one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return report_user_errors(lambda: command(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
