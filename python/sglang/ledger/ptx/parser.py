"""Reads a module of PTX with one kernel: its parameters, registers, arrays and instructions, each with its source line.

Registers of a block in braces, as inline assembly declares them, get names of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.types import TYPES, Type, bytes_type

_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:[.\w]+\s+)*?([\w$]+)(\[\d*\])?\s*(?:,|\)|$)")
_REG = re.compile(r"\.reg\s+(?:\.\w+\s+)*?\.(\w+)\s+(.*)")
_ARRAY = re.compile(r"\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?")
_LABEL = re.compile(r"([\w$]+):")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_RANGE = re.compile(r"(%?[\w$]+)<(\d+)>")
_NUMBER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+)U?$")


@dataclass(frozen=True, slots=True)
class Register:
    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A constant: an integer, or the bits of a floating-point number."""

    value: int


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset]; the base is a register, an array or a parameter, or nothing."""

    base: Register | Symbol | None
    offset: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A label, an array, a parameter, or a special register such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Pair:
    """r|p: a result, and the predicate beside it."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """!p: the complement of a predicate."""

    register: Register


Operand = Register | Number | Vector | Address | Symbol | Pair | Not


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    line: int
    """In the text of the module."""
    source: str
    """Such as "norm.py:20"."""
    text: str


@dataclass(frozen=True, slots=True)
class Array:
    name: str
    space: str
    size: int
    align: int
    data: bytes = b""


@dataclass(slots=True)
class Module:
    name: str = ""
    target: str = ""
    threads: int = 0
    """Of a block, as .reqntid says; 0 if it does not."""
    parameters: list[tuple[str, Type]] = field(default_factory=list)
    """A struct is bytes."""
    registers: dict[str, Type] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """The index of the instruction behind each label."""


def parse(text: str) -> Module:
    """Returns the module's kernel. Raises Unsupported for what it cannot read."""
    return _Reader(text).module


class _Reader:
    def __init__(self, text: str) -> None:
        self.module = Module()
        self._files: dict[str, str] = dict(_FILE.findall(text))
        self._source, self._depth = "?", 0
        self._scopes: list[dict[str, str]] = []
        self._pending = ""
        self._blocks = 0
        text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text)
        for number, line in enumerate(text.split("\n"), 1):
            line = line.split("//")[0].strip()
            if line.startswith(".section"):
                break  # what follows is for debuggers
            if line:
                self._line(number, line)
        if not self.module.name:
            raise Unsupported("a module without a kernel")

    def _line(self, number: int, line: str) -> None:
        if self._depth == 0:
            self._outside(line)
            return
        if re.match(r"\.loc\s", line):
            match = _LOC.match(line)
            assert match is not None
            name = self._files.get(match[1], "?").rpartition("/")[2]
            self._source = f"{name}:{match[2]}"
            return
        rest = f"{self._pending} {line}".strip()
        self._pending = ""
        while rest:
            if label := _LABEL.match(rest):
                self.module.labels[label[1]] = len(self.module.instructions)
                rest = rest[label.end() :].strip()
            elif rest[0] == "{":
                self._scopes.append({})
                self._depth += 1
                rest = rest[1:].strip()
            elif rest[0] == "}":
                self._depth -= 1
                if self._depth:
                    self._scopes.pop()
                rest = rest[1:].strip()
            else:
                statement, semicolon, behind = rest.partition(";")
                if not semicolon:
                    self._pending = rest
                    return
                self._statement(number, statement.strip())
                rest = behind.strip()

    def _outside(self, line: str) -> None:
        if match := re.match(r"\.target\s+(\w+)", line):
            self.module.target = match[1]
        elif match := re.match(r"(?:\.visible\s+)?\.entry\s+([\w$]+)", line):
            if self.module.name:
                raise Unsupported("a module with two kernels")
            self.module.name = match[1]
            line = line[match.end() :]
        elif ".func" in line:
            raise Unsupported(f"functions: {line}")
        elif not line.startswith((".param", ".reqntid", ".maxntid", ".version", ".address_size", ".file", "{", ")")):
            self._array(line)
        for kind, name, array in _PARAM.findall(line):
            bytes_of = int(array[1:-1]) * TYPES[kind].bits // 8 if array else 0
            self.module.parameters.append((name, bytes_type(bytes_of) if array else TYPES[kind]))
        if match := re.match(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?", line):
            self.module.threads = int(match[1]) * int(match[2] or 1)
        if line.endswith("{"):
            self._depth = 1

    def _array(self, line: str) -> None:
        match = _ARRAY.search(line)
        if match is None:
            if line.startswith((".pragma", ".minnctapersm", ".maxnreg", ".maxntid")):
                return
            raise Unsupported(f"the directive {line}")
        space, align, kind, name, count = match.groups()
        size = TYPES[kind].bits // 8 * (int(count) if count else 0 if count == "" else 1)
        values = line.partition("=")[2]
        data = bytes(int(value) for value in re.findall(r"\d+", values)) if kind in ("b8", "u8") else b""
        self.module.arrays[name] = Array(name, space, size, int(align or TYPES[kind].bits // 8), data)

    def _statement(self, number: int, text: str) -> None:
        if not text or text.startswith((".pragma", ".loc")):
            return
        if text.startswith(".reg"):
            match = _REG.match(text)
            assert match is not None, text
            self._declare(TYPES[match[1]], match[2])
            return
        if text.startswith("."):
            self._array(text)
            return
        guard, negated, rest = None, False, text
        if match := _GUARD.match(text):
            guard, negated = Register(self._scoped(match[2])), match[1] == "!"
            rest = text[match.end() :]
        opcode, _, operands = rest.partition(" ") if " " in rest.split("\t")[0] else rest.partition("\t")
        parsed = tuple(self._operand(word) for word in _split(operands))
        self.module.instructions.append(
            Instruction(opcode.strip(), parsed, guard, negated, number, self._source, " ".join(text.split()))
        )

    def _declare(self, kind: Type, names: str) -> None:
        for word in names.split(","):
            word = word.strip()
            many = _RANGE.match(word)
            for name in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [word]:
                unique = name
                if self._scopes:
                    self._blocks += 1
                    unique = f"{name}@{self._blocks}"
                    self._scopes[-1][name] = unique
                self.module.registers[unique] = kind

    def _scoped(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return name

    def _operand(self, word: str) -> Operand:
        if word[0] == "{":
            return Vector(tuple(self._operand(item) for item in _split(word[1:-1])))
        if word[0] == "[":
            return self._address(word[1:-1].strip())
        if "|" in word:
            first, second = word.split("|")
            return Pair(self._operand(first), self._operand(second))
        if word[0] == "!":
            return Not(Register(self._scoped(word[1:].strip())))
        if _NUMBER.match(word):
            return Number(_value(word))
        name = self._scoped(word)
        return Register(name) if name in self.module.registers else Symbol(word)

    def _address(self, text: str) -> Operand:
        base, sign, offset = re.match(r"([^\s+]+)\s*(\+?)\s*(.*)$", text).groups()  # type: ignore[union-attr]
        if _NUMBER.match(base):
            return Address(None, _value(base))
        named = self._operand(base)
        assert isinstance(named, (Register, Symbol)), text
        return Address(named, _value(offset) if sign and offset else 0)


def _split(text: str) -> list[str]:
    """Splits operands at commas outside of braces and brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in [*parts, text[start:].strip()] if part]


def _value(word: str) -> int:
    word = word.rstrip("U")
    if word[:2] in ("0f", "0F", "0d", "0D"):
        return int(word[2:], 16)
    return int(word, 0)
