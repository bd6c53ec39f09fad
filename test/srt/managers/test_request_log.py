from __future__ import annotations

import logging

import pytest

from sglang.srt.managers.front.request_log import REDACTED, SHORT_TEXT, RequestLog
from sglang.srt.server_args import ServerArgs

from .ended_requests import ended, request

PROMPT = "My name is Ada. " * 100
OUTPUT = "Good day, Ada. " * 100
SCHEMA = '{"properties": {"Ada": {"type": "string"}}}'


def lines_of(
    level: int, caplog: pytest.LogCaptureFixture, prompt: str | None = PROMPT, output: str = OUTPUT
) -> list[str]:
    caplog.clear()
    log = RequestLog(ServerArgs(model_path="m", log_requests=True, log_requests_level=level))
    sent = request(stop=["Ada"], json_schema=SCHEMA, temperature=0.5)
    with caplog.at_level(logging.INFO):
        log.received(sent, prompt)
        log.finished(ended(sent, text=output[: int(min(log.kept_chars, len(output)))]))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("level", [0, 1])
def test_the_lower_levels_hold_no_text_of_clients(level: int, caplog: pytest.LogCaptureFixture) -> None:
    lines = lines_of(level, caplog)
    assert "Ada" not in "".join(lines)
    assert "'prompt_tokens': 3" in lines[0] and "completion tokens=7" in lines[1] and "reason=stop" in lines[1]
    assert ("'temperature': 0.5" in lines[0]) == (level == 1)
    assert (f"<{len(SCHEMA)} characters>" in lines[0]) == (level == 1)


def test_level_2_has_beginnings(caplog: pytest.LogCaptureFixture) -> None:
    received, finished = lines_of(2, caplog)
    assert PROMPT[:SHORT_TEXT] in received and PROMPT[: SHORT_TEXT + 1] not in received
    assert OUTPUT[:SHORT_TEXT] in finished and OUTPUT[: SHORT_TEXT + 1] not in finished


def test_level_3_has_everything(caplog: pytest.LogCaptureFixture) -> None:
    received, finished = lines_of(3, caplog)
    assert PROMPT in received and OUTPUT in finished


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcdefghijklmnop1234",
        "hf_abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnopqrst",
        "AKIAABCDEFGHIJKLMNOP",
        "Bearer abc.def-ghi_jkl/mno",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    ],
)
@pytest.mark.parametrize("before", [0, SHORT_TEXT - 10])
def test_credentials_stay_out_of_level_2(secret: str, before: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the cut would leave half of one."""
    text = "x " * (before // 2) + secret + " is the key"
    lines = lines_of(2, caplog, text, text)
    assert secret[6:] not in "".join(lines) and secret[:10] not in "".join(lines)
    assert all(REDACTED[:5] in line for line in lines)
    assert all(secret in line for line in lines_of(3, caplog, text, text))


def test_a_request_id_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(ServerArgs(model_path="m", log_requests=True, log_requests_level=0))
    sent = request("r\n[INFO] Finished: rid=other")
    with caplog.at_level(logging.INFO):
        log.received(sent, None)
        log.finished(ended(sent))
    assert all("\n" not in record.getMessage() for record in caplog.records)
