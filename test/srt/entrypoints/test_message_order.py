"""Conversations that a chat template refuses as they are, in the order that it takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.entrypoints.openai.chat_template import ChatTemplate
from sglang.srt.entrypoints.openai.message_order import MessageRules, fitted_messages
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

TEMPLATES = Path(__file__).parents[2] / "scripted" / "templates"
EMBEDDED = (Path(DEFAULT_MODEL_PATH) / "chat_template.jinja").read_text()
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PAIRS = frozenset({("user", "user"), ("assistant", "assistant"), ("tool", "user")})


def own(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(number: int) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "look", "tool_call_id": "abcdefgh0", "content": text}


SESSION = [
    system("rules"),
    system("skills", "developer"),
    user("question"),
    system("first reminder"),
    answer("", tool_calls=[call(0)]),
    result("found"),
    system("second reminder"),
    user("thanks"),
    answer("welcome"),
    user("more"),
]


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        (EMBEDDED, MessageRules()),
        (CHATML, MessageRules()),
        (DROPS_SYSTEM, MessageRules(system=False, later_system=False)),
        (own("system_first"), MessageRules(later_system=False)),
        (own("alternating"), MessageRules(later_system=False, refused=PAIRS)),
        (own("no_system"), MessageRules(system=False, later_system=False, refused=PAIRS, named_results=True)),
        ("{{ raise_exception('no') }}", MessageRules()),
        ("{% for m in messages[:1] %}{{ m.content }}{% endfor %}", MessageRules()),
    ],
)
def test_what_a_template_takes(source: str, rules: MessageRules) -> None:
    assert ChatTemplate(source, {}).message_rules(None) == rules


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["system_first", "alternating", "no_system"])
def test_every_text_of_a_session_reaches_the_prompt(name: str, in_place: bool) -> None:
    template = ChatTemplate(own(name), {})
    texts = [message["content"] for message in SESSION if message["content"]]
    with pytest.raises(Exception, match="the chat template refused"):
        template.render(ChatCompletionRequest(messages=SESSION))
    prompt = template.render(
        ChatCompletionRequest(messages=fitted_messages(SESSION, template.message_rules(None), in_place))
    )
    assert all(text in prompt for text in texts)


@pytest.mark.parametrize(
    ("source", "messages", "helps"),
    [
        (own("system_first"), SESSION, True),
        (own("alternating"), SESSION, True),
        (own("alternating"), [user("a"), user("b")], True),
        (own("no_system"), [system("rules"), user("a")], True),
        (own("alternating"), [user("a"), answer("", tool_calls=[{**call(0), "id": "short"}])], False),
        (own("no_system"), [answer("a")], False),
    ],
)
def test_a_refusal_names_the_flag_if_that_would_change_the_order(
    source: str, messages: list[dict[str, Any]], helps: bool
) -> None:
    with pytest.raises(Exception, match="the chat template refused") as refusal:
        ChatTemplate(source, {}).render(ChatCompletionRequest(messages=messages))
    assert ("--fold-system-messages in-place" in str(refusal.value)) == helps


def test_results_get_the_names_of_their_calls_where_the_template_wants_names() -> None:
    first, second = call(0), {**call(1), "function": {"name": "seek", "arguments": "{}"}}
    nameless = [{"role": "tool", "tool_call_id": each["id"], "content": "found"} for each in (second, first)]
    own_name = {**result("found"), "name": "own"}
    messages = [user("a"), answer("", tool_calls=[first, second]), *nameless, own_name]
    prompt = ChatTemplate(own("no_system"), {}).render(ChatCompletionRequest(messages=messages))
    assert re.findall(r"response:(\w+)", prompt) == ["seek", "look", "own"]
    prints_names = CHATML.replace("m.role", "m.name or m.role")
    kept = ChatTemplate(prints_names, {}).render(ChatCompletionRequest(messages=messages))
    assert kept.count("<tool>found") == 2, "a template that takes results without names gets what the client sent"


@pytest.mark.parametrize("calls", [[], [{**call(0), "id": 7}], [{"function": {"name": "look"}}]])
@pytest.mark.parametrize("fields", [{}, {"tool_call_id": "other"}, {"tool_call_id": None, "name": None}])
def test_a_result_of_no_call_is_refused_as_the_template_says(
    calls: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    messages = [user("a"), answer("", tool_calls=calls), {"role": "tool", "content": "found", **fields}]
    with pytest.raises(Exception, match="has no attribute 'name'"):
        ChatTemplate(own("no_system"), {}).render(ChatCompletionRequest(messages=messages))


def test_system_messages_go_to_the_first_one_in_their_order() -> None:
    fitted = fitted_messages(SESSION, MessageRules(later_system=False))
    first = system("rules\n\nskills\n\nfirst reminder\n\nsecond reminder")
    assert fitted == [first, *(message for message in SESSION if message["role"] not in ("system", "developer"))]


def test_reminders_stay_in_place_as_text_of_what_is_before_them() -> None:
    fitted = fitted_messages(SESSION, MessageRules(later_system=False), in_place=True)
    assert fitted == [
        system("rules\n\nskills"),
        user("question\n\n<system-reminder>\nfirst reminder\n</system-reminder>"),
        SESSION[4],
        result("found\n\n<system-reminder>\nsecond reminder\n</system-reminder>"),
        *SESSION[7:],
    ]


def test_a_reminder_behind_an_answer_belongs_to_what_follows() -> None:
    marked = "<system-reminder>\nnote\n</system-reminder>"
    rules = MessageRules(later_system=False)
    session = [user("a"), answer("b"), system("note")]
    assert fitted_messages([*session, user("c")], rules, in_place=True)[2:] == [user(f"{marked}\n\nc")]
    assert fitted_messages(session, rules, in_place=True)[2:] == [user(marked)]
    assert fitted_messages([*session, answer("c")], rules, in_place=True)[2:] == [user(marked), answer("c")]


def test_turns_are_joined_where_they_must_alternate() -> None:
    session = [user("a"), user("b"), answer("c", reasoning_content="x"), answer("d", tool_calls=[call(0)])]
    session += [answer("", tool_calls=[call(1)], reasoning_content="y"), result("e"), result("f"), user("g")]
    assert fitted_messages(session, MessageRules(refused=PAIRS)) == [
        user("a\n\nb"),
        answer("c\n\nd", reasoning_content="x\n\ny", tool_calls=[call(0), call(1)]),
        result("e"),
        result("f\n\ng"),
    ]


def test_a_template_without_a_system_role_reads_it_from_the_first_user() -> None:
    rules = MessageRules(system=False, later_system=False)
    assert fitted_messages([system("a"), user("b"), answer("c")], rules) == [user("a\n\nb"), answer("c")]
    assert fitted_messages([system("a"), answer("c")], rules) == [user("a"), answer("c")]


def test_pictures_stay_parts_in_their_order() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    session = [user([picture, {"type": "text", "text": "a"}]), user("b"), user([picture])]
    (joined,) = fitted_messages(session, MessageRules(refused=PAIRS))
    assert joined["content"] == [picture, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}, picture]
    kept = [answer("", tool_calls=[call(0)]), result("a"), user([picture])]  # results are text to most templates
    assert fitted_messages(kept, MessageRules(refused=PAIRS)) == kept


def test_what_a_template_takes_stays_as_it_came() -> None:
    assert fitted_messages(SESSION, MessageRules()) is SESSION


def test_the_request_is_not_changed() -> None:
    session = [user("a"), user("b"), system("c"), user("d")]
    before = [dict(message) for message in session]
    fitted_messages(session, MessageRules(later_system=False, refused=PAIRS), in_place=True)
    assert session == before
