"""The health check of the container: exit status 0 if the server of process 1 answers at the port that it was given."""

import sys
import urllib.request
from pathlib import Path

DEFAULT_PORT = "30000"


def port_of(words: list[str]) -> str:
    """The last --port of a command line, in either spelling."""
    port = DEFAULT_PORT
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--port":
            port = following
        elif word.startswith("--port="):
            port = word.removeprefix("--port=")
    return port


def main() -> None:
    command = Path(sys.argv[1] if len(sys.argv) > 1 else "/proc/1/cmdline").read_bytes()
    port = port_of(command.decode(errors="replace").split("\0"))
    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


if __name__ == "__main__":
    main()
