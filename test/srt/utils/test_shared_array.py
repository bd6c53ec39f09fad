import numpy as np
import pytest

from sglang.srt.utils import shared_array
from sglang.srt.utils.shared_array import SharedArray, SharedArrayError


@pytest.mark.parametrize("dtype", shared_array.DTYPES)
def test_an_array_is_read_as_it_was_written_also_when_its_file_is_gone_meanwhile(tmp_path, dtype):
    bits = "int16" if dtype == "bfloat16" else dtype  # numpy has no bfloat16
    array = np.arange(24).reshape(2, 3, 4).astype(bits).transpose(1, 0, 2)
    shared = shared_array.write(tmp_path, array, dtype=dtype)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    result = shared_array.read(tmp_path, shared)
    shared_array.remove(tmp_path, shared)
    shared_array.remove(tmp_path, shared)
    assert not list(tmp_path.iterdir())
    np.testing.assert_array_equal(result, array)
    assert result.dtype == array.dtype
    with pytest.raises(ValueError, match="read-only"):
        result[0, 0, 0] = 1


def test_an_empty_array_has_a_file_too(tmp_path):
    shared = shared_array.write(tmp_path, np.empty((0, 4), np.float32))
    assert shared_array.read(tmp_path, shared).shape == (0, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "../secret"},
        {"name": "/etc/passwd"},
        {"name": ""},
        {"name": "x" * 129},
        {"dtype": "object"},
        {"dtype": "float64"},
        {"shape": [5]},
        {"shape": [-2, -2]},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [1] * 9},
    ],
)
def test_a_message_that_lies_is_refused(tmp_path, wrong):
    good = shared_array.write(tmp_path, np.zeros(4, np.float32))
    fields = {"name": good.name, "shape": good.shape, "dtype": good.dtype} | wrong
    with pytest.raises(SharedArrayError):
        shared_array.read(tmp_path, SharedArray(**fields))


def test_links_are_not_followed_and_an_object_array_is_not_written(tmp_path):
    (tmp_path / "target").write_bytes(bytes(16))
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        shared_array.read(tmp_path, SharedArray("link", [4], "float32"))
    with pytest.raises(SharedArrayError):
        shared_array.write(tmp_path, np.array([{}]))
    assert len(list(tmp_path.iterdir())) == 2
