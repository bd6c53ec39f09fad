"""The documented command where nothing is installed but this project and what it requires, as on a fresh machine.

The environment is a real one, a venv of its own; its packages are links to those of the environment that runs the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
import upstream_trees
from upstream import packages, source, stub_import

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a venv with the project as `pip install -e '.[dev]'` leaves it, and nothing else."""
    venv = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "project.pth").write_text(f"{ROOT / 'python'}\n")
    for name in packages.project_distributions():
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return venv / "bin" / "python"


def run(python: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In the root of the repository, without a variable of the caller's environment that Python or a server reads."""
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    environment |= {"HOME": str(home), "SGLANG_CACHE_DIR": str(home / "cache")}
    return subprocess.run([str(python), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_environment_has_what_the_project_requires_and_nothing_else(python: Path, tmp_path: Path) -> None:
    listed = (
        "import json; from importlib import metadata; print(json.dumps([d.name for d in metadata.distributions()]))"
    )
    found = {packages.canonicalize_name(name) for name in json.loads(run(python, tmp_path, "-c", listed).stdout)}
    assert found - {"sm120-sglang"} == packages.project_distributions()  # a checkout that is installed is itself listed
    assert {"torch", "triton", "transformers", "libcst"} <= found


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_documented_command_verifies_a_tree(python: Path, tmp_path: Path) -> None:
    tree, out = upstream_trees.write(tmp_path / "release", upstream_trees.runnable()), tmp_path / "produced"
    command = ["scripts/rebase_upstream.py", "--upstream", str(tree), "--out", str(out), "--verify"]
    done = run(python, tmp_path, *command, "--triton", triton.__version__)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "extend-tiles          applied" in done.stdout and "and fit with each" in done.stdout


def load(tree: Path, statements: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """`statements` in a process that has entered `tree`, with `paths` beside what is installed."""
    start = (
        f"import importlib; from pathlib import Path; from upstream import stub_import; TREE = Path({str(tree)!r})\n"
    )
    path = os.pathsep.join(map(str, (*paths, ROOT / "scripts", ROOT / "python")))
    command = [sys.executable, "-c", start + textwrap.dedent(statements)]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)


def test_what_happens_to_be_installed_changes_nothing(tmp_path: Path) -> None:
    """A package that no installation of the project has, beside ours: neither it nor its version is seen."""
    tree, site = upstream_trees.write(tmp_path / "release", upstream_trees.runnable()), tmp_path / "site"
    for name in ("sgl_kernel", "stray_package"):
        package, about = site / name, site / f"{name}-9.dist-info"
        package.mkdir(parents=True)
        about.mkdir()
        (package / "__init__.py").write_text("raise AssertionError('a stray package was imported')")
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
        (about / "RECORD").write_text(f"{name}/__init__.py,,\n")
    done = load(
        tree,
        """
        import importlib.metadata, importlib.util
        assert importlib.util.find_spec("stray_package") and importlib.metadata.version("stray_package") == "9"
        stub_import.enter(TREE)
        stub_import.publish_defaults()
        assert importlib.util.find_spec("stray_package") is None
        assert "stray_package" not in {found.name for found in importlib.metadata.distributions()}
        assert importlib.metadata.version("torch")
        """,
        site,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_package_that_a_release_requires_and_nobody_knows_is_named(tmp_path: Path) -> None:
    files = upstream_trees.runnable()
    files["sglang/srt/utils.py"] = "import package_of_tomorrow\nclass Base: ..."
    arguments = files["sglang/srt/server_args.py"].replace("class ServerArgs:", "class ServerArgs(Base):")
    files["sglang/srt/server_args.py"] = "from sglang.srt.utils import Base\n" + arguments.replace("__init__", "start")
    tree = upstream_trees.write(tmp_path / "release", files)
    message = load(tree, "stub_import.enter(TREE)\nstub_import.publish_defaults()").stderr.splitlines()[-1]
    assert "default arguments cannot be made: TypeError" in message and "stub_import.DEPENDENCIES" in message
    assert "sglang.srt.utils: ModuleNotFoundError: No module named 'package_of_tomorrow'" in message


def test_what_the_releases_import_is_required_by_the_project_or_a_stub() -> None:
    ours = metadata.packages_distributions()
    required = packages.project_distributions()
    for name in upstream_trees.THIRD_PARTY.split():
        is_ours = not required.isdisjoint(map(packages.canonicalize_name, ours.get(name, ())))
        assert is_ours or name in stub_import.DEPENDENCIES, name


@pytest.mark.upstream
@pytest.mark.timeout(3600)
def test_the_documented_command_verifies_a_release(python: Path, tmp_path: Path) -> None:
    release = source.resolve("0.5.23").root
    command = ["scripts/rebase_upstream.py", "--upstream", str(release), "--out", str(tmp_path / "out"), "--verify"]
    done = run(python, tmp_path, *command, "--triton", triton.__version__)
    assert "not checked" not in done.stdout and "## Verdict" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
