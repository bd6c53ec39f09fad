"""`python -m sglang.launch_server --model-path DIR [options]`"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from sglang.srt.errors import UserError

# Everything else is imported while `report_user_errors` watches: Ctrl-C may come during the second that this takes.
USER_ERROR = 2
"""Exit status for something that the user can correct."""
BROKEN_PIPE, INTERRUPTED = 128 + 13, 128 + 2
"""The exit statuses that a shell reports for a process that SIGPIPE or SIGINT ended."""


def report_user_errors(run: Callable[[], int | None]) -> int:
    """Runs it; what it returns is the exit status. A UserError becomes one line on standard error and exit status 2; a
    reader of the output that leaves (`| head`) ends it with the status of SIGPIPE, Ctrl-C with one line and that of
    SIGINT. Other exceptions pass."""
    try:
        status = run() or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        # What is still buffered goes nowhere when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def serve(argv: Sequence[str] | None, prog: str) -> None:
    """Serve as the command line says, until told to stop. Raises UserError."""
    from sglang.srt.environ import adopt_environment
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.log import configure_logging

    adopt_environment()
    words = list(sys.argv[1:] if argv is None else argv)
    if (models := take_flag(words, "--models")) is not None:
        serve_models(models, words, prog)
        return
    args = ServerArgs.from_cli(words, prog)
    configure_logging(args.log_level)
    if args.dry_run:
        from sglang.dry_run import dry_run

        dry_run(args)
        return
    if args.node_rank > 0:
        from sglang.srt.entrypoints.ranks_only import run_ranks

        run_ranks(args)
        return
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(args)


def take_flag(words: list[str], flag: str) -> str | None:
    """Takes a flag out of the words of a command line, and returns its value; None: it is not there. Raises
    UserError."""
    for index, word in enumerate(words):
        name, given, value = word.partition("=")
        if name == flag and (given or index + 1 < len(words)):
            taken = value if given else words[index + 1]
            del words[index : index + (1 if given else 2)]
            return taken
        if name == flag:
            raise UserError(f"{flag} needs a value")
    return None


def serve_models(models: str, words: Sequence[str], prog: str) -> None:
    """Serves the models of a YAML file or a folder; `words` are flags of all of them. Raises UserError."""
    from sglang.srt.entrypoints.models_file import read_models
    from sglang.srt.entrypoints.several_models import launch_several
    from sglang.srt.utils.log import configure_logging

    file = read_models(models, words, prog)
    configure_logging(file.models[0].args.log_level)
    if file.models[0].args.dry_run:
        from sglang.dry_run import dry_run

        for model in file.models:
            dry_run(model.args)
        return
    launch_several(file)


if __name__ == "__main__":
    sys.exit(report_user_errors(lambda: serve(None, "python -m sglang.launch_server")))
