"""An upstream source -> a directory on this machine that holds its package `sglang/`.

    fetch("0.5.15")                                          a release, from the package index
    fetch("newest")                                          its newest release
    fetch("https://github.com/sgl-project/sglang@main")      a git ref
    fetch("/path/to/checkout")                               a checkout, or a directory with `sglang/`

Releases and commits are kept under `cache_dir()`, outside the repository; what is there is treated as read-only.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

_VERSION = re.compile(r"v?(\d+\.\d+(\.\d+)?([a-z]+\d*)?(\.(post|dev|rc)\d+)*)")
_GIT = re.compile(r"(?P<url>(?:https?|ssh|git|file)://.+|git@.+|.+\.git)@(?P<ref>[^@]+)")
_PACKAGE_PLACES = (".", "python", "src")


class SourceError(Exception):
    """The source cannot be had; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """A pristine upstream tree: `root` is all of it, `package_parent` holds `sglang/`, `label` names it in reports."""

    label: str
    root: Path
    package_parent: Path


def fetch(spec: str) -> Path:
    """The directory that contains the package `sglang/` of an upstream PATH, VERSION or GIT-URL@REF.

    Raises SourceError when there is none.
    """
    return resolve(spec).package_parent


def resolve(spec: str) -> Source:
    """As `fetch`, with the whole tree and its label."""
    if Path(spec).expanduser().exists():
        return _from_path(Path(spec).expanduser().resolve())
    if spec == "newest":
        return _from_index(_newest())
    if match := _VERSION.fullmatch(spec):
        return _from_index(match[1])
    if match := _GIT.fullmatch(spec):
        return _from_git(match["url"], match["ref"])
    raise SourceError(f"{spec!r} is not an existing path, a version such as 0.5.15, newest, or a GIT-URL@REF.")


def cache_dir() -> Path:
    """`SM120_UPSTREAM_CACHE`, or ~/.cache/sm120-sglang/upstream."""
    configured = os.environ.get("SM120_UPSTREAM_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "sm120-sglang" / "upstream"


def _from_path(path: Path) -> Source:
    root = path.parent if path.name == "sglang" and (path / "srt").is_dir() else path
    return _source(root.name, root)


def _source(label: str, root: Path) -> Source:
    for place in _PACKAGE_PLACES:
        if (root / place / "sglang" / "srt").is_dir():
            return Source(label, root, (root / place).resolve())
    raise SourceError(f"{root} holds no sglang/srt, python/sglang/srt or src/sglang/srt: it is not an SGLang tree.")


def _newest() -> str:
    """The newest stable release of the package index."""
    command = [sys.executable, "-m", "pip", "index", "versions", "sglang"]
    done = subprocess.run(command, capture_output=True, text=True)
    match = re.match(r"sglang \(([\w.]+)\)", done.stdout)
    if match is None:
        raise SourceError(f"The package index does not say which sglang is the newest: {done.stderr.strip()[-500:]}")
    return match[1]


def _from_index(version: str) -> Source:
    kept = cache_dir() / "releases" / version
    if not kept.is_dir():
        with staged(kept) as staging, tempfile.TemporaryDirectory() as downloads:
            _pip_download(version, Path(downloads))
            _unpack(next(Path(downloads).iterdir()), staging)
    return _source(version, kept)


def _pip_download(version: str, into: Path) -> None:
    """Any wheel will do, since only the sources are read; the oldest releases and some new ones have an sdist alone."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(into),
        f"sglang=={version}",
    ]
    attempts = (
        ["--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_34_x86_64", "--platform=any"],
        ["--only-binary=:all:"],
        ["--no-binary=:all:", "--no-build-isolation"],
    )
    for extra in attempts:
        done = subprocess.run([*command, *extra], capture_output=True, text=True)
        if done.returncode == 0 and any(into.iterdir()):
            return
    raise SourceError(f"The package index has no sglang=={version}: {done.stderr.strip()[-500:]}")


def _unpack(archive: Path, into: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(into)
        return
    with tarfile.open(archive) as sdist:
        sdist.extractall(into, filter="data")
    (top,) = into.iterdir()  # an sdist is one directory
    for entry in top.iterdir():
        shutil.move(str(entry), into)
    top.rmdir()


def _from_git(url: str, ref: str) -> Source:
    """One commit of one repository, without its history. A branch is looked up again every time."""
    clone = cache_dir() / "git" / hashlib.sha256(url.encode()).hexdigest()[:16]
    if not clone.is_dir():
        with staged(clone) as staging:
            _git(staging, "init", "--quiet", "--bare")
    _git(clone, "fetch", "--quiet", "--depth=1", url, ref)
    commit = _git(clone, "rev-parse", "FETCH_HEAD").strip()
    kept = cache_dir() / "commits" / commit
    if not kept.is_dir():
        with staged(kept) as staging:
            archive = subprocess.run(["git", "-C", str(clone), "archive", commit], capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", str(staging)], input=archive.stdout, check=True)
    return _source(f"{ref}@{commit[:12]}", kept)


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise SourceError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class staged:
    """A directory that takes its final name only when the block ends well, so that a broken download is not kept."""

    def __init__(self, final: Path) -> None:
        self.final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        self.staging = Path(tempfile.mkdtemp(dir=final.parent, prefix=".staging-"))

    def __enter__(self) -> Path:
        return self.staging

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None and not self.final.exists():
            self.staging.chmod(0o755)
            self.staging.rename(self.final)
        else:
            shutil.rmtree(self.staging, ignore_errors=True)
