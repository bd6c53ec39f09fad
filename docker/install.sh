#!/bin/sh
# Everything that the image does at build time, step by step; CI runs the same in a bare Debian.
#
#   install.sh system                 Python, and the C compiler and headers that Triton builds its launchers with
#   install.sh torch                  PyTorch alone, the largest layer
#   install.sh dependencies           what pyproject.toml asks for, at the versions of constraints.txt
#   install.sh package                the package itself
#   install.sh check                  what must be there is there, ptxas for sm_120 and sm_121 among it
#   install.sh smoke [server flags]   as any user: serves the embedded model and asks it one thing
#
# Variables: TORCH (torch), TORCH_INDEX_URL (an index with builds of it), FLASHINFER_INDEX_URL (one with FlashInfer's
# compiled kernels), SOURCE (/src), VENV (/opt/sglang).
set -eu

TORCH="${TORCH:-torch}"
SOURCE="${SOURCE:-/src}"
VENV="${VENV:-/opt/sglang}"
PIP="$VENV/bin/python -m pip install --no-cache-dir --quiet"

system() {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
        ca-certificates gcc libc6-dev python3 python3-dev python3-venv
    rm -rf /var/lib/apt/lists/*
}

torch() {
    python3 -m venv "$VENV"
    # shellcheck disable=SC2086
    $PIP ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$TORCH"
}

dependencies() {
    # torch brings the Triton that fits it; neither is held to the pins, which are those of the CPU build.
    grep -vE '^(torch|triton)==' "$SOURCE/constraints.txt" > /tmp/constraints.txt
    "$VENV/bin/python" - "$SOURCE/pyproject.toml" > /tmp/requirements.txt <<'END'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))
extras = project["project"]["optional-dependencies"]
wanted = project["project"]["dependencies"] + extras["cuda"] + extras["flashinfer"]
print("\n".join([*project["build-system"]["requires"], *(w for w in wanted if not w.startswith("torch"))]))
END
    # shellcheck disable=SC2086
    $PIP -c /tmp/constraints.txt -r /tmp/requirements.txt
    # FlashInfer compiles with nvcc when it is first used, which the image has not; these are its kernels, compiled.
    if [ -n "${FLASHINFER_INDEX_URL:-}" ]; then
        version=$("$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("flashinfer-python"))')
        # shellcheck disable=SC2086
        $PIP --extra-index-url "$FLASHINFER_INDEX_URL" "flashinfer-jit-cache==$version"
    fi
    rm /tmp/constraints.txt /tmp/requirements.txt
}

package() {
    # shellcheck disable=SC2086
    $PIP --no-deps --no-build-isolation "$SOURCE"
}

check() {
    "$VENV/bin/python" - <<'END'
from sglang.doctor.reading import Sources, read_machine
machine = read_machine(Sources(), with_copies=False)
assert machine.torch is not None, machine.torch_problem
missing = {"sm_120", "sm_121"} - (machine.ptxas_archs or frozenset())
assert not missing, f"{machine.ptxas} does not know {', '.join(sorted(missing))}"
print(f"torch {machine.torch.version}, CUDA {machine.torch.cuda}, Triton {machine.triton}, ptxas {machine.ptxas}")
END
    "$VENV/bin/sglang" version
}

smoke() {
    "$VENV/bin/sglang" serve --port 30123 "$@" &
    server=$!
    trap 'kill $server 2>/dev/null; wait $server || true' EXIT
    "$VENV/bin/python" - "$server" <<'END'
import json, os, sys, time, urllib.error, urllib.request
url, deadline = "http://127.0.0.1:30123", time.monotonic() + 300
while True:
    try:
        urllib.request.urlopen(url + "/health", timeout=5)
        break
    except (urllib.error.URLError, ConnectionError):
        os.kill(int(sys.argv[1]), 0)  # fails when the server is gone
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.5)
question = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": "What is 15+27?"}]}
request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(question).encode())
request.add_header("Content-Type", "application/json")
answer = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["message"]["content"]
print(f"15+27: {answer!r}")
assert answer == "15 + 27 = 42"
END
}

step="$1"
shift
case "$step" in
system | torch | dependencies | package | check | smoke) "$step" "$@" ;;
*) echo "error: unknown step $step; see the head of $0" >&2 && exit 2 ;;
esac
