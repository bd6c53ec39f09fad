from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from sglang.srt import environ
from sglang.srt.environ import adopt_environment, envs
from sglang.srt.errors import UserError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "_already_warned", set())
    for name in list(os.environ):
        if name.startswith(("SGLANG_", "SGL_")):
            monkeypatch.delenv(name)


def test_defaults() -> None:
    assert envs.SGLANG_FORCE_ARCH is None
    assert envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is False


def test_read_at_access(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_FORCE_ARCH", " sm_120 ")
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "True")
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    assert envs.SGLANG_FORCE_ARCH == "sm_120"
    assert envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is True
    assert envs.SGLANG_MOE_CONFIG_DIR == tmp_path
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "")
    assert envs.SGLANG_FORCE_ARCH is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "maybe"),
        ("SGLANG_MOE_CONFIG_DIR", "/no/such/directory"),
        ("SGLANG_REQ_WAITING_TIMEOUT", "soon"),
        ("SGLANG_REQ_RUNNING_TIMEOUT", "nan"),
    ],
)
def test_bad_value_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name}='{value}'"):
        getattr(envs, name)


def test_old_spelling_is_adopted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SGLANG_FORCE_ARCH", "")  # so that what is adopted goes when the test ends
    monkeypatch.delenv("SGLANG_FORCE_ARCH")
    monkeypatch.setenv("SGL_FORCE_ARCH", "sm_90")
    monkeypatch.setenv("SGL_CACHE_DIR", "/old")
    monkeypatch.setenv("SGLANG_CACHE_DIR", "/new")
    with caplog.at_level(logging.WARNING):
        adopt_environment()
        adopt_environment()
    assert envs.SGLANG_FORCE_ARCH == "sm_90"
    assert envs.SGLANG_CACHE_DIR == Path("/new")
    assert sum("SGL_FORCE_ARCH is the older spelling of SGLANG_FORCE_ARCH" in text for text in caplog.messages) == 1


def test_variables_without_effect_warn_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SGLANG_DISABLE_CUDNN_CHECK", "1")
    monkeypatch.setenv("SGL_ENABLE_JIT_DEEPGEMM", "0")
    monkeypatch.setenv("SGL_NO_SUCH_THING", "1")
    monkeypatch.setenv("SGLANG_NO_SUCH_THING_EITHER", "1")
    monkeypatch.setenv("SGLANGUAGE", "1")
    with caplog.at_level(logging.WARNING):
        adopt_environment()
        adopt_environment()
    assert sorted(text.split(" has no effect")[0].split()[-1] for text in caplog.messages) == [
        "SGLANG_DISABLE_CUDNN_CHECK",
        "SGLANG_NO_SUCH_THING_EITHER",
        "SGL_ENABLE_JIT_DEEPGEMM",
        "SGL_NO_SUCH_THING",
    ]
    assert "DeepGEMM is not used" in caplog.text


def test_names_are_the_attribute_names() -> None:
    assert "SGLANG_FORCE_ARCH" in environ.KNOWN
    assert type(envs).SGLANG_FORCE_ARCH.name == "SGLANG_FORCE_ARCH"
    assert not environ.KNOWN & set(environ.IGNORED)
