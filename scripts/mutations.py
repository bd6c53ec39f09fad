"""Changes the core of the server in one place at a time, and counts which of these changes the tests notice.

    make mutations                                    # 120 changes, about two hours on two cores
    python scripts/mutations.py --count 12 --rooms step graphs

The changes are those of cosmic-ray: another operator, comparison or number, a negated condition, `break` for `continue`
and the like. They are drawn at random, equally many from every room; what has no effect when the code runs is left out:
annotations, assertions, code for type checkers and texts. Each is made in a copy of the tree, in which the room's tests
run then, a part of those that CI runs, until one fails. A change that no test notices is printed as a difference.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
COPIED = ("python", "test", "benchmark", "scripts", "docs", "pyproject.toml", "README.md", "Makefile")
SRT, TESTS = "python/sglang/srt", "test/srt"
SLOWER = 4
"""A test that takes so many times as long as without the change, and a minute, has noticed it."""


@dataclass(frozen=True)
class Room:
    modules: tuple[str, ...]
    """Below SRT; names may have wildcards."""
    tests: tuple[str, ...]
    """Arguments of pytest, those that find most first."""


ROOMS = {
    "step": Room(
        ("managers/scheduler/batch_builder.py", "managers/scheduler/schedule_batch.py", "model_executor/step.py"),
        (
            f"{TESTS}/managers/test_scheduler.py",
            f"{TESTS}/managers/test_steps_of_several_tokens.py",
            f"{TESTS}/model_executor/test_verify_steps.py",
            f"{TESTS}/managers/test_scheduler_parity.py",
        ),
    ),
    "metadata": Room(
        ("layers/attention/metadata.py", "layers/attention/sites.py", "layers/attention/page_table.py",
         "layers/attention/selection.py", "layers/attention/sparse_rows.py", "layers/attention/latent_chunks.py",
         "layers/attention/flashinfer_backend.py", "model_executor/device_state.py"),
        (
            f"{TESTS}/layers/attention/test_flashinfer.py",
            f"{TESTS}/layers/attention/test_backends.py",
            f"{TESTS}/layers/attention/test_index_rows.py",
            f"{TESTS}/layers/attention/test_latent_attention.py",
            f"{TESTS}/model_executor/test_verify_steps.py",
            f"{TESTS}/model_executor/test_backend_matrix.py",
        ),
    ),
    "graphs": Room(
        ("model_executor/graph_runner.py", "model_executor/graph_capture.py", "model_executor/draft_runner.py",
         "model_executor/step_output.py", "model_executor/model_runner.py"),
        (
            f"{TESTS}/model_executor/test_graph_runner.py",
            f"{TESTS}/model_executor/test_graph_capture.py",
            f"{TESTS}/model_executor/test_verify_steps.py",
            f"{TESTS}/managers/test_scheduler_parity.py",
            f"{TESTS}/speculative/test_draft_chain.py",
        ),
    ),
    "cache tables": Room(
        ("mem_cache/*.py",),
        (f"{TESTS}/mem_cache", f"{TESTS}/managers/test_scheduler.py", f"{TESTS}/managers/test_turns.py"),
    ),
    "states": Room(
        ("layers/recurrent/*.py", "mem_cache/checkpoint_table.py"),
        (
            f"{TESTS}/mem_cache",
            f"{TESTS}/models/test_hybrid.py",
            f"{TESTS}/model_executor/test_verify_steps.py",
            f"{TESTS}/layers/recurrent",
        ),
    ),
    "memory plan": Room(
        ("plan/memory.py", "plan/attention_memory.py", "plan/capacity.py", "plan/pool_sizes.py", "plan/state_rows.py"),
        (f"{TESTS}/plan", f"{TESTS}/kernels"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    room: str
    module: str
    operator: str
    occurrence: int


@dataclass(frozen=True)
class Outcome:
    mutation: Mutation
    noticed: bool
    seconds: float
    difference: str


class WithoutEffect(ast.NodeTransformer):
    """Takes out of a module what has no effect when it runs."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Pass()

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Conditions are in front of it; a message is a text."""
        return ast.Raise()

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def effect(source: str) -> str:
    return ast.dump(WithoutEffect().visit(ast.parse(source)))


def mutated(source: str, operator: str, occurrence: int) -> str | None:
    from cosmic_ray import mutating, plugins

    result: str | None = mutating.mutate_code(source, plugins.get_operator(operator)(), occurrence)
    return result


def mutations_of(room: str, module: str) -> dict[int, list[Mutation]]:
    """All that cosmic-ray knows of a module, by line."""
    from cosmic_ray import ast as parsed
    from cosmic_ray import plugins

    nodes = list(parsed.ast_nodes(parsed.get_ast((ROOT / module).read_text())))
    by_line: dict[int, list[Mutation]] = {}
    for name in sorted(plugins.operator_names()):
        operator = plugins.get_operator(name)
        if not operator.arguments():
            positions = (position for node in nodes for position in operator().mutation_positions(node))
            for occurrence, ((line, _), _) in enumerate(positions):
                by_line.setdefault(line, []).append(Mutation(room, module, name, occurrence))
    return by_line


def has_effect(mutation: Mutation) -> bool:
    source = (ROOT / mutation.module).read_text()
    changed = mutated(source, mutation.operator, mutation.occurrence)
    try:
        return changed is not None and effect(changed) != effect(source)
    except SyntaxError:  # cosmic-ray takes the star of an argument for an operator
        return False


def draw(rooms: list[str], number: int, seed: int) -> list[Mutation]:
    """Equally many of every room. Lines are drawn first, so that one with many operators counts once."""
    rng, drawn = random.Random(seed), []
    for index, room in enumerate(rooms):
        paths = {path for name in ROOMS[room].modules for path in (ROOT / SRT).glob(name) if path.stat().st_size}
        lines = [
            mutations
            for module in sorted(str(path.relative_to(ROOT)) for path in paths)
            for _, mutations in sorted(mutations_of(room, module).items())
        ]
        rng.shuffle(lines)
        chosen = (rng.choice(mutations) for mutations in lines)
        wanted = (number + len(rooms) - 1 - index) // len(rooms)
        drawn += list(islice(filter(has_effect, chosen), wanted))
    return drawn


def run_tests(tree: Path, room: str, limit_s: float | None) -> tuple[bool, float]:
    """Returns whether all passed, and the seconds that they took."""
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(tree / "python"), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *ROOMS[room].tests]
    try:
        done = subprocess.run(
            words, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return False, time.monotonic() - start
    return done.returncode == 0, time.monotonic() - start


def try_out(mutation: Mutation, tree: Path, limit_s: float) -> Outcome:
    path = tree / mutation.module
    before = (ROOT / mutation.module).read_text()
    after = mutated(before, mutation.operator, mutation.occurrence)
    assert after is not None
    path.write_text(after)
    try:
        passed, seconds = run_tests(tree, mutation.room, limit_s)
    finally:
        path.write_text(before)
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), mutation.module, mutation.operator, "", "", 1, ""
    )
    return Outcome(mutation, not passed, seconds, "\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description="Count which changes of the core the tests notice.")
    parser.add_argument("--count", type=int, default=120, help="changes altogether")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(ROOMS))
    parser.add_argument("--jobs", type=int, default=2, help="changes that are tried at once")
    parser.add_argument("--out", type=Path, help="file for the outcomes as JSON, also of a run that is interrupted")
    args = parser.parse_args()
    drawn = draw(args.rooms, args.count, args.seed)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for job in range(args.jobs):
            tree = Path(folder) / str(job)
            for name in COPIED:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
                tree.mkdir(exist_ok=True)
                copy(ROOT / name, tree / name)
            trees.put(tree)
        tree = trees.get()
        limits: dict[str, float] = {}
        for room in args.rooms:
            passed, seconds = run_tests(tree, room, None)
            if not passed:
                sys.exit(f"error: the tests of the room {room} fail without a change")
            limits[room] = max(60.0, SLOWER * seconds)
            print(f"{room}: its tests take {seconds:.0f} s", flush=True)
        trees.put(tree)

        def run(mutation: Mutation) -> Outcome:
            tree = trees.get()
            try:
                return try_out(mutation, tree, limits[mutation.room])
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(args.jobs) as executor:
            for outcome in executor.map(run, drawn):
                outcomes.append(outcome)
                place = f"{outcome.mutation.room}: {outcome.mutation.module}"
                print(f"{'noticed ' if outcome.noticed else 'SURVIVED'} {outcome.seconds:5.0f} s  {place}", flush=True)
                if not outcome.noticed:
                    print(outcome.difference, flush=True)
                if args.out is not None:
                    args.out.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    noticed = sum(outcome.noticed for outcome in outcomes)
    print(f"{noticed} of {len(outcomes)} changes were noticed: {noticed / len(outcomes):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
