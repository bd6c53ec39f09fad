"""The commands of the documents, in the order of the pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = ("README.md", "CONTRIBUTING.md", "lab/README.md", "benchmark/kernels/fused_moe_triton/README.md")
PAGES = (
    *(ROOT / name for name in NAMED),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmark" / "results").glob("*.md")),
)
SHELLS = ("", "sh", "bash")
NAMES = "sglang|python|make|curl|docker|pip|pytest|apt|mkdocs|nvidia-smi"
PROGRAMS = re.compile(rf'(?:[A-Z][A-Z_]*=(?:"[^"]*"|\S*) )*(?:{NAMES})\b')
GPU = "# GPU"


@dataclass(frozen=True)
class Command:
    """A line as a page shows it, without its remark."""

    page: str
    text: str
    needs_gpu: bool

    @property
    def words(self) -> list[str]:
        """Without leading variables, and without what stands in brackets because it may be left out."""
        words = shlex.split(self.text if "{" in self.text else re.sub(r"\s\[[^\]]*\]", "", self.text))
        while re.match(r"[A-Z][A-Z_]*=", words[0]):
            words = words[1:]
        return words

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands() -> list[Command]:
    return [command for page in PAGES for command in _of_page(page)]


def _of_page(page: Path) -> Iterator[Command]:
    for line in _code_lines(page.read_text()):
        if PROGRAMS.match(line):
            text, _, remark = line.partition("  #")
            yield Command(str(page.relative_to(ROOT)), text.strip(), f"#{remark}".startswith(GPU))


def _code_lines(text: str) -> Iterator[str]:
    """Of indented blocks and of fenced ones in a shell's language; a line goes on behind a backslash, and
    inside quotes."""
    fence, kept = None, ""
    for line in text.splitlines():
        mark = re.match(r"```(\w*)", line)
        if mark:
            fence = mark[1] if fence is None else None
            continue
        in_code = fence in SHELLS if fence is not None else line.startswith("    ")
        if not in_code:
            continue
        kept += line.strip()
        if kept.endswith("\\") or kept.count("'") % 2:
            kept = kept.removesuffix("\\") + " "
            continue
        yield kept
        kept = ""
