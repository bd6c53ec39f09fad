"""Small faults in PTX, as a kernel or a compiler might have them: what an execution must notice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    kind: str
    line: int
    """In the text, from 1 on."""
    before: str
    after: str

    def applied(self, text: str) -> str:
        """Returns the text with the fault."""
        lines = text.split("\n")
        assert lines[self.line - 1] == self.before
        lines[self.line - 1] = self.after
        return "\n".join(lines)


_SCALES = re.compile(r"(%r\d+),\s*(\{[^{}]*\}),\s*(%r\d+),\s*(\{[^{}]*\});")
_GROUP = re.compile(r"\{([^{}]*)\}")


def _without_mask(line: str) -> str:
    """An access is not masked: neither by a guard, nor by a copy's number of bytes."""
    if match := re.match(r"(.*cp\.async.*),\s*%r\d+;(.*)", line):
        return f"{match[1]};{match[2]}"
    match = re.match(r"\s*@!?%p\d+\s+((ld|st)\.global.*)", line)
    return f"\t{match[1]}" if match else line


def _without_barrier(line: str) -> str:
    """A barrier is missing."""
    return "" if re.match(r"\s*bar\.(warp\.)?sync", line) else line


def _waits_less(line: str) -> str:
    """A copy is waited for one step too late."""
    return re.sub(r"(cp\.async\.wait_group\s+)(\d+)", lambda m: f"{m[1]}{int(m[2]) + 1}", line)


def _other_scale(line: str) -> str:
    """The block scales of A are taken for B."""
    return _SCALES.sub(lambda m: f"{m[1]}, {m[2]}, {m[1]}, {m[4]};", line) if "block_scale" in line else line


def _swapped_fragment(line: str) -> str:
    """Two registers of A are exchanged."""
    if "mma.sync" not in line:
        return line
    groups = list(_GROUP.finditer(line))
    if len(groups) < 2:
        return line
    items = [item.strip() for item in groups[1][1].split(",")]
    if len(items) < 2 or items[0] == items[1]:
        return line
    items[0], items[1] = items[1], items[0]
    return f"{line[: groups[1].start()]}{{ {', '.join(items)} }}{line[groups[1].end() :]}"


def _other_lane(line: str) -> str:
    """A shuffle goes to another lane."""
    return re.sub(r"(shfl\.sync\.bfly\.b32\s+[^,]+,\s*[^,]+,\s*)(\d+)", lambda m: f"{m[1]}{int(m[2]) // 2 or 2}", line)


def _off_by_one(line: str) -> str:
    """A limit counts as inside."""
    return re.sub(r"setp\.lt\.s32", "setp.le.s32", line)


def _other_place(line: str) -> str:
    """An access to shared memory is a vector too far on."""
    match = re.match(r"\s*(?:@!?%p\d+\s+)?(?:ld|st)\.shared\.(?:v(\d)\.)?b(\d+)", line)
    if match is None:
        return line
    step = int(match[1] or 1) * int(match[2]) // 8
    return re.sub(r"\[\s*(%r\d+)\s*(?:\+\s*(\d+)\s*)?\]", lambda m: f"[{m[1]}+{int(m[2] or 0) + step}]", line, count=1)


KINDS: dict[str, Callable[[str], str]] = {
    "mask": _without_mask,
    "barrier": _without_barrier,
    "wait": _waits_less,
    "scale": _other_scale,
    "fragment": _swapped_fragment,
    "shuffle": _other_lane,
    "limit": _off_by_one,
    "place": _other_place,
}


def mutations(text: str) -> Iterator[Mutation]:
    """Yields every fault of every kind that the text can have."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith(("//", ".")):
            continue
        for kind, change in KINDS.items():
            changed = change(line)
            if changed != line:
                yield Mutation(kind, number, line, changed)
