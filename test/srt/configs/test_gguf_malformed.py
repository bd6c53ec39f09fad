"""GGUF files that are damaged or hostile are refused with a message, and cost little memory."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import pytest

from sglang.srt.configs.gguf.files import model_files, read_model
from sglang.srt.configs.gguf.header import read_header
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.errors import UserError

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
HUGE = 1 << 63


def text(value: bytes | str, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def array(key: str, kind: int, count: int, items: bytes = b"") -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", kind, count) + items)


def tensor(name: str = "a", dims: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0, count: int = -1) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims) if count < 0 else count, *dims, kind, offset)


def file(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 256,
    version: int = 3,
    counts: tuple[int | None, int | None] = (None, None),
    magic: bytes = b"GGUF",
) -> bytes:
    num_tensors, num_pairs = counts
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


GOOD = file((number("a", 1),), (tensor(),))

MALFORMED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "does not begin with GGUF"),
    "three bytes": (b"GGU", "does not begin with GGUF"),
    "another magic": (file(magic=b"GGML"), "does not begin with GGUF"),
    "only the magic": (b"GGUF", "ends within the version"),
    "version 1": (file(version=1), "version 1 is not supported"),
    "version 4": (file(version=4), "version 4 is not supported"),
    "version 0": (file(version=0), "version 0 is not supported"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "no counts": (GOOD[:12], "ends within the number of tensors"),
    "2^63 tensors": (file(counts=(HUGE, 0)), "tensors, more than"),
    "2^64 - 1 tensors": (file(counts=((1 << 64) - 1, 0)), "tensors, more than"),
    "2^63 pairs": (file(counts=(0, HUGE)), "metadata pairs, more than"),
    "more pairs than there are": (file((number("a", 1),), counts=(0, 9), data=0), "ends within|is there twice"),
    "more tensors than there are": (file((), (tensor(),), counts=(2, 0), data=0), "has 0 dimensions"),
    "a key of 2^63": (file((text("a", HUGE) + bytes(12),)), "a key has .* bytes, more than"),
    "a key of 4 GB": (file((text("a", 1 << 32) + bytes(12),)), "a key has .* bytes, more than"),
    "a key that ends behind the file": (file((text("a", 4000) + bytes(12),)), "ends within a key"),
    "a key that is no text": (file((text(b"\xff\xfe") + struct.pack("<II", U32, 1),)), "a key is no text"),
    "a key twice": (file((number("a", 1), number("a", 2))), "'a' is there twice"),
    "a string of 4 GB": (file((pair("a", STRING, text("", 4 << 30)),)), "a has 4,294,967,296 bytes, more than"),
    "a string of 2^63": (file((pair("a", STRING, text("", HUGE)),)), "more than the"),
    "a string that ends behind the file": (file((pair("a", STRING, text("", 1 << 20)),)), "ends within a"),
    "a string that is no text": (file((pair("a", STRING, text(b"\xc3\x28")),)), "a is no text in UTF-8"),
    "an unknown type": (file((pair("a", 13, bytes(8)),)), "a has the unknown type 13"),
    "a type of 2^32 - 1": (file((pair("a", (1 << 32) - 1, bytes(8)),)), "the unknown type 4294967295"),
    "an array of 2^63 numbers": (file((array("a", U8, HUGE),)), "items of a, more than"),
    "an array of 2^63 strings": (file((array("a", STRING, HUGE),)), "items of a, more than"),
    "an array of a million numbers in a small file": (file((array("a", U64, 1 << 20),)), "ends within a"),
    "an array of a million strings in a small file": (file((array("a", STRING, 1 << 20),)), "ends within a"),
    "an array of arrays": (file((array("a", ARRAY, 2, bytes(24)),)), "are arrays"),
    "an array of an unknown type": (file((array("a", 99, 2, bytes(24)),)), "unknown type 99"),
    "an alignment of 0": (file((number("general.alignment", 0),), (tensor(),)), "must be a power of two"),
    "an alignment of 24": (file((number("general.alignment", 24),), (tensor(),)), "must be a power of two"),
    "an alignment of 2 GB": (file((number("general.alignment", 1 << 31),), (tensor(),)), "must be a power of two"),
    "an alignment that is text": (file((pair("general.alignment", STRING, text("32")),)), "must be a power of two"),
    "no dimensions": (file((), (tensor(dims=()),)), "has 0 dimensions"),
    "five dimensions": (file((), (tensor(dims=(1,) * 5),)), "has 5 dimensions"),
    "2^32 - 1 dimensions": (file((), (tensor(count=(1 << 32) - 1),)), "has 4294967295 dimensions"),
    "a dimension of 0": (file((), (tensor(dims=(32, 0)),)), "larger than the file"),
    "a dimension of 2^63": (file((), (tensor(dims=(HUGE,)),)), "larger than the file"),
    "dimensions whose product overflows": (file((), (tensor(dims=(1 << 32, 1 << 32)),)), "larger than the file"),
    "a type that is not read": (file((), (tensor(kind=16),)), "the tensor a has the type IQ2_XXS, which is not read"),
    "a type that nobody knows": (file((), (tensor(kind=999),)), "the tensor a has the type number 999"),
    "rows that end within a block": (file((), (tensor(dims=(48, 2), kind=2),)), "48 elements, no multiple of 32"),
    "a tensor that is not aligned": (file((), (tensor(offset=8),), data=1024), "begins at 8, no multiple"),
    "a tensor behind the file": (file((), (tensor(offset=1 << 20),)), "bytes behind the file"),
    "an offset of 2^63": (file((), (tensor(offset=HUGE),)), "bytes behind the file"),
    "truncated data": (GOOD[:-32], "32 bytes behind the file"),
    "a tensor twice": (file((), (tensor(), tensor(offset=256)), data=512), "the tensor a is there twice"),
    "tensors that overlap": (file((), (tensor(), tensor("b", offset=128)), data=512), "a and b overlap"),
    "a name of 2^63": (file((), (text("a", HUGE) + bytes(40),)), "a tensor's name has"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_damaged_header_is_refused(case: str, tmp_path: Path) -> None:
    data, message = MALFORMED[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        resolve_model_path(str(path))
    assert str(path) in str(caught.value)


def test_the_header_that_the_others_are_made_of_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    header = read_header(path)
    assert header.metadata == {"a": 1}
    assert [(each.name, each.shape) for each in header.tensors] == [("a", (2, 32))]


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for length in range(len(GOOD) - 1):
        path.write_bytes(GOOD[:length])
        with pytest.raises(UserError):
            read_header(path)


def test_arrays_of_small_items_do_not_fill_the_memory(tmp_path: Path) -> None:
    """A byte of an array is eight in a list, and an empty string eight bytes of the file."""
    million = 1 << 20
    path = tmp_path / "model.gguf"
    path.write_bytes(file(tuple(array(f"a{i}", U8, 2 * million, bytes(2 * million)) for i in range(32))))
    pid = os.fork()
    if not pid:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
        try:
            read_header(path)
        except UserError as error:
            os._exit(0 if "arrays have more than" in str(error) else 2)
        except BaseException:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _part(number_: int, count: int, tensors: tuple[bytes, ...]) -> bytes:
    pairs = (number("split.no", number_), number("split.count", count), number("split.tensors.count", 2))
    return file(pairs, tensors)


PARTS: dict[str, tuple[dict[str, bytes], str]] = {
    "one is missing": ({"m-00001-of-00002.gguf": _part(0, 2, (tensor("a"),))}, "lacks parts .*m-00002-of-00002"),
    "the same twice": (
        {f"m-0000{i}-of-00002.gguf": _part(0, 2, (tensor("a"),)) for i in (1, 2)},
        "is part 0 .* of 2 .* taken for part 1",
    ),
    "in another order": (
        {f"m-0000{i}-of-00002.gguf": _part(2 - i, 2, (tensor(f"t{i}"),)) for i in (1, 2)},
        "is part 1 .* taken for part 0",
    ),
    "of another number of parts": (
        {f"m-0000{i}-of-00002.gguf": _part(i - 1, 3, (tensor(f"t{i}"),)) for i in (1, 2)},
        "of 3 according to",
    ),
    "the same tensor": (
        {f"m-0000{i}-of-00002.gguf": _part(i - 1, 2, (tensor("a"),)) for i in (1, 2)},
        "hold the same tensor",
    ),
    "fewer tensors than are promised": (
        {"m-00001-of-00002.gguf": _part(0, 2, (tensor("a"),)), "m-00002-of-00002.gguf": _part(1, 2, ())},
        "split.tensors.count is 2, but the parts hold 1",
    ),
    "part 3 of 2": ({"m-00003-of-00002.gguf": GOOD}, "calls itself part 3 of 2"),
    "part 0": ({"m-00000-of-00002.gguf": GOOD}, "calls itself part 0 of 2"),
    "99999 parts": ({"m-00001-of-99999.gguf": GOOD}, "calls itself part 1 of 99999"),
    "a part under the name of a whole file": ({"m.gguf": _part(1, 2, (tensor("a"),))}, "is part 1"),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_do_not_belong_together_are_refused(case: str, tmp_path: Path) -> None:
    files, message = PARTS[case]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_model(model_files(tmp_path / next(iter(files))))


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.symlink_to(second)
    second.symlink_to(first)
    with pytest.raises(UserError, match="lacks parts|does not exist"):
        read_model(model_files(first))


ARCH = pair("general.architecture", STRING, text("llama"))


def _model(*pairs: bytes) -> bytes:
    return file((ARCH, *pairs), (tensor("token_embd.weight", (32, 4)),), data=512)


def _kv(key: str, value: int) -> bytes:
    return number(f"llama.{key}", value)


WHOLE = (
    _kv("block_count", 1), _kv("embedding_length", 32), _kv("attention.head_count", 1), _kv("context_length", 64),
    pair("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)), _kv("feed_forward_length", 32),
)  # fmt: skip
CONFIGS: dict[str, tuple[bytes, str]] = {
    "no architecture": (file((), (tensor("token_embd.weight"),)), "'general.architecture' is missing"),
    "an architecture that is not read": (
        file((pair("general.architecture", STRING, text("mamba")),), (tensor("token_embd.weight"),)),
        "architecture 'mamba' are not read",
    ),
    "an architecture that is a number": (file((number("general.architecture", 1),)), "must be of type str"),
    "no layers": (_model(*WHOLE[1:]), "'llama.block_count' is missing"),
    "a count that is text": (_model(pair("llama.block_count", STRING, text("1")), *WHOLE[1:]), "must be of type int"),
    "no embedding": (file((ARCH, *WHOLE), (tensor("output.weight"),)), "token_embd.weight is missing"),
    "an embedding of another width": (
        _model(WHOLE[0], _kv("embedding_length", 64), *WHOLE[2:]),
        "embedding_length is 64",
    ),
    "no heads": (
        _model(*WHOLE[:2], _kv("attention.head_count", 0), *WHOLE[3:]),
        "head_count must be at least 1; got 0",
    ),
    "a number that is none": (
        _model(*WHOLE, pair("llama.rope.freq_base", F32, struct.pack("<f", float("nan")))),
        "'llama.rope.freq_base' must be a number; got nan",
    ),
    "a negative scaling": (
        _model(
            *WHOLE,
            pair("llama.rope.scaling.type", STRING, text("yarn")),
            pair("llama.rope.scaling.factor", F32, struct.pack("<f", -2.0)),
        ),
        "rope.scaling.factor must be positive",
    ),
    "heads of no size": (_model(*WHOLE, _kv("attention.key_length", 0)), "key_length must be at least 1"),
    "a piece of a thousand characters": (
        _model(
            *WHOLE,
            array("tokenizer.ggml.tokens", STRING, 1, text("a" * 1000)),
            pair("tokenizer.ggml.model", STRING, text("llama")),
            array("tokenizer.ggml.scores", F32, 1, bytes(4)),
        ),
        "a token has 1000 characters, more than",
    ),
    "a key that nobody reads": (_model(*WHOLE, _kv("attention.clamp", 3)), "llama.attention.clamp = 3: not supported"),
    "heads that differ by layer": (
        _model(*WHOLE, array("llama.attention.head_count_kv", U32, 2, struct.pack("<II", 1, 2))),
        "head_count_kv differs by layer",
    ),
    "an unknown rotary scaling": (
        _model(
            *WHOLE,
            pair("llama.rope.scaling.type", STRING, text("spiral")),
            pair("llama.rope.scaling.factor", F32, struct.pack("<f", 2.0)),
        ),
        "'spiral' is not supported",
    ),
    "more tokens than rows": (
        _model(*WHOLE, array("tokenizer.ggml.tokens", STRING, 9, b"".join(text(str(i)) for i in range(9)))),
        "9 tokens, but the embedding has 4 rows",
    ),
    "an end token that is none": (
        _model(
            *WHOLE,
            array("tokenizer.ggml.tokens", STRING, 2, text("a") + text("b")),
            number("tokenizer.ggml.eos_token_id", 7),
        ),
        "eos_token_id is 7, but there are 2 tokens",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_model_that_cannot_be_read_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    data, message = CONFIGS[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        resolve_model_path(str(path))
    assert str(path) in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_a_tensor_of_another_family_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    tensors = (tensor("token_embd.weight", (32, 4)), tensor("blk.0.ssm_a.weight", offset=512))
    path.write_bytes(file((ARCH, *WHOLE), tensors, data=1024))
    with pytest.raises(UserError, match="no layer of llama has the tensor blk.0.ssm_a.weight"):
        resolve_model_path(str(path))
