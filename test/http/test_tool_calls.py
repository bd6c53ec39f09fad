"""Function calls and reasoning through the real `openai` client; the embedded model writes both.

What a grammar takes part in runs with each library of grammars, the rest with one. `make thorough` has more formats,
and each case with each library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, live_server

from sglang.embedded import DEFAULT_MODEL_PATH

MODEL = "tiny"
APPLES = [
    {
        "role": "user",
        "content": "Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?",
    }
]


def function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    function("add_numbers", "Adds two numbers.", a={"type": "integer"}, b={"type": "integer"}),
    function("get_time", "Returns the time in a city.", city={"type": "string"}),
]
ADD = [{"role": "user", "content": "Use the tool to add 12 and 30."}]
TIME = [{"role": "user", "content": "What time is it in Paris?"}]
END_OF_THOUGHTS = next(
    token["id"]
    for token in json.loads((Path(DEFAULT_MODEL_PATH) / "tokenizer.json").read_text())["added_tokens"]
    if token["content"] == "</think>"
)


@pytest.fixture(scope="module")
def llguidance_server() -> Iterator[LiveServer]:
    parsers = ("--tool-call-parser", "auto", "--reasoning-parser", "auto")
    with live_server(*parsers, "--served-model-name", MODEL, "--grammar-backend", "llguidance") as running:
        yield running


def connect(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def client(parsing_server: LiveServer) -> Iterator[openai.OpenAI]:
    with connect(parsing_server) as made:
        yield made


@pytest.fixture(params=["xgrammar", "llguidance"])
def each_client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """For what a grammar takes part in: a client of a server with each of the libraries that compile them."""
    name = {"xgrammar": "parsing_server", "llguidance": "llguidance_server"}[request.param]
    with connect(request.getfixturevalue(name)) as made:
        yield made


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    fixed = {"model": MODEL, "temperature": 0, "max_tokens": 200}
    return client.chat.completions.create(**{**fixed, "messages": messages, **options})


def streamed(chunks: Any) -> dict[str, Any]:
    """What a client puts together from a stream."""
    result: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        if not chunk.choices:
            result["usage"] = chunk.usage
            continue
        (choice,) = chunk.choices
        result["content"] += choice.delta.content or ""
        result["reasoning"] += choice.delta.model_extra.get("reasoning_content") or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(result["calls"]) and call.type == "function" and call.function.arguments == ""
                result["calls"].append([call.id, call.function.name, ""])
            else:
                assert call.function.name is None and call.function.arguments
                result["calls"][call.index][2] += call.function.arguments
        result["finish"] = choice.finish_reason or result["finish"]
    return result


@pytest.mark.values
@pytest.mark.parametrize(
    ("messages", "name", "arguments"), [(ADD, "add_numbers", {"a": 12, "b": 30}), (TIME, "get_time", {"city": "Paris"})]
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_call(each_client: openai.OpenAI, messages: list[Any], name: str, arguments: Any, choice: str) -> None:
    answer = ask(each_client, messages, tools=TOOLS, tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    assert re.fullmatch("call_[0-9a-f]{24}", call.id) and call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    stream = streamed(ask(each_client, messages, tools=TOOLS, tool_choice=choice, stream=True))
    assert stream["finish"] == "tool_calls" and stream["content"] == ""
    ((call_id, streamed_name, text),) = stream["calls"]
    assert re.fullmatch("call_[0-9a-f]{24}", call_id)
    assert (streamed_name, text) == (name, call.function.arguments)


def test_named_function(each_client: openai.OpenAI) -> None:
    """The model would take another one by itself."""
    choice = {"type": "function", "function": {"name": "add_numbers"}}
    options = {
        "tools": TOOLS,
        "tool_choice": choice,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    (call,) = ask(each_client, TIME, **options).choices[0].message.tool_calls
    assert call.function.name == "add_numbers" and set(json.loads(call.function.arguments)) == {"a", "b"}


def test_no_call(client: openai.OpenAI) -> None:
    answer = ask(client, TIME, tools=TOOLS, tool_choice="none").choices[0]
    assert answer.finish_reason == "stop" and answer.message.tool_calls is None and answer.message.content


def test_arguments_arrive_in_pieces(client: openai.OpenAI) -> None:
    chunks = [chunk for chunk in ask(client, ADD, tools=TOOLS, stream=True) if chunk.choices[0].delta.tool_calls]
    assert len(chunks) > 3


def test_conversation_with_a_result(client: openai.OpenAI) -> None:
    call = ask(client, TIME, tools=TOOLS).choices[0].message
    messages = [*TIME, call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "noon"}]
    answer = ask(client, messages, tools=TOOLS).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content and answer.message.tool_calls is None


def test_several_choices(client: openai.OpenAI) -> None:
    answer = ask(client, ADD, tools=TOOLS, n=3)
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1, 1, 1]
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ADD, tools=TOOLS, temperature=0, max_tokens=200
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "add_numbers"


def test_strict_tools(each_client: openai.OpenAI) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    (call,) = ask(each_client, ADD, tools=strict).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 12, "b": 30}


def test_call_that_is_cut_off(client: openai.OpenAI) -> None:
    """As text where it can still be text; a stream has begun the call."""
    answer = ask(client, ADD, tools=TOOLS, max_tokens=16).choices[0]
    assert answer.finish_reason == "length" and answer.message.tool_calls is None
    assert answer.message.content.startswith('<tool_call>\n{"name": "add_numbers"')
    stream = streamed(ask(client, ADD, tools=TOOLS, max_tokens=16, stream=True))
    assert stream["finish"] == "length" and stream["calls"][0][2].startswith("{") and stream["content"] == ""


def test_reasoning(client: openai.OpenAI) -> None:
    answer = ask(client, APPLES)
    message, usage = answer.choices[0].message, answer.usage
    thoughts = message.model_extra["reasoning_content"]
    assert "42 - 5 = 37" in thoughts and message.content == "The answer is 37."
    assert 0 < usage.model_extra["reasoning_tokens"] < usage.completion_tokens
    stream = streamed(ask(client, APPLES, stream=True, stream_options={"include_usage": True}))
    assert (stream["reasoning"], stream["content"]) == (thoughts, message.content)
    assert stream["usage"].model_extra["reasoning_tokens"] == usage.model_extra["reasoning_tokens"]


def test_reasoning_tokens_are_those_up_to_the_end_of_thoughts(client: openai.OpenAI, parsing_server: Any) -> None:
    raw = ask(client, APPLES, extra_body={"separate_reasoning": False}).choices[0].message.content
    thoughts = raw[: raw.index("</think>") + len("</think>")]
    reply = httpx.post(f"{parsing_server.url}/tokenize", json={"prompt": thoughts, "add_special_tokens": False})
    assert ask(client, APPLES).usage.model_extra["reasoning_tokens"] == reply.json()["count"]


def test_reasoning_in_one_piece_or_in_the_text(client: openai.OpenAI) -> None:
    whole = ask(client, APPLES).choices[0].message
    body = {"stream_reasoning": False}
    chunks = list(ask(client, APPLES, stream=True, extra_body=body))
    pieces = [chunk.choices[0].delta.model_extra["reasoning_content"] for chunk in chunks]
    assert [piece for piece in pieces if piece] == [whole.model_extra["reasoning_content"]]
    raw = ask(client, APPLES, extra_body={"separate_reasoning": False}).choices[0].message
    assert raw.model_extra["reasoning_content"] is None
    assert raw.content == f"<think>\n{whole.model_extra['reasoning_content']}\n</think>\n\n{whole.content}"
    quiet = ask(client, APPLES, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
    assert quiet.model_extra["reasoning_content"] is None and quiet.content


def test_response_format_begins_after_thoughts(each_client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    message = ask(each_client, APPLES, response_format=form).choices[0].message
    assert isinstance(json.loads(message.content)["answer"], int)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}  # the embedded model's template says no otherwise
    wanted = {"response_format": {"type": "json_object"}, "extra_body": thinking}
    message = ask(each_client, APPLES, max_tokens=80, **wanted).choices[0].message
    assert message.content.startswith("{") and message.model_extra["reasoning_content"]
    wanted = {"extra_body": {"json_schema": "$$ANY$$", **thinking}}
    message = ask(each_client, APPLES, max_tokens=80, **wanted).choices[0].message
    assert message.content.startswith("{") and message.model_extra["reasoning_content"]
    message = ask(each_client, APPLES, extra_body={"regex": "It is [0-9]{2}"}).choices[0].message
    assert re.fullmatch("It is [0-9]{2}", message.content)


def test_tools_and_a_response_format(each_client: openai.OpenAI) -> None:
    """The model calls, or answers in the format."""
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (call,) = ask(each_client, TIME, tools=TOOLS, response_format=form).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    answer = ask(each_client, APPLES, tools=TOOLS, tool_choice="none", response_format=form).choices[0].message
    assert isinstance(json.loads(answer.content)["answer"], int)


def test_one_call_at_a_time(client: openai.OpenAI) -> None:
    answer = ask(client, ADD, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in answer.message.tool_calls] == ["add_numbers"]


def test_logprobs_of_every_token(client: openai.OpenAI) -> None:
    chunks = list(ask(client, ADD, tools=TOOLS, stream=True, logprobs=True, stream_options={"include_usage": True}))
    entries = [chunk.choices[0].logprobs for chunk in chunks[:-1] if chunk.choices[0].logprobs]
    assert sum(len(entry.content) for entry in entries) == chunks[-1].usage.completion_tokens


def test_refusals(each_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="forces a call"):
        ask(each_client, ADD, tools=TOOLS, tool_choice="required", extra_body={"regex": "a"})
    with pytest.raises(openai.BadRequestError, match="got json_schema and regex"):
        ask(each_client, ADD, response_format={"type": "json_object"}, extra_body={"regex": "a"})
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    with pytest.raises(openai.BadRequestError):
        ask(each_client, ADD, tools=[function("deep", "x", a=schema)], tool_choice="required")


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
@pytest.mark.parametrize("padding", ["x", "x" * 10_000], ids=["short", "long"])
def test_parameters_that_are_no_schema(client: openai.OpenAI, choice: str, padding: str) -> None:
    tools = [function("good", padding, a={"type": "integer"}), function("bad", "x", a={"type": "dict"})]
    with pytest.raises(openai.BadRequestError, match="""'bad' are not a JSON schema: .*"type.*properties/a""") as error:
        ask(client, ADD, tools=tools, tool_choice=choice)
    assert error.value.param == "tools"


@pytest.mark.values
@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"extra_body": {"regex": "(ab"}}, "regex"),
        ({"extra_body": {"json_schema": '{"type": "dict"}'}}, "json_schema"),
        ({"extra_body": {"ebnf": "root ::= foo"}}, "ebnf"),
        ({"tool_choice": "required"}, "tools"),
    ],
)
def test_a_mistake_is_named_as_the_client_knows_it(
    each_client: openai.OpenAI, wanted: dict[str, Any], name: str
) -> None:
    """Also where it was made part of a larger grammar."""
    tools = [function("f", "x", a={"$ref": "#/$defs/missing"})]
    with pytest.raises(openai.BadRequestError, match=f"invalid {name}: "):
        ask(each_client, ADD, tools=tools, **wanted)


def test_the_server_says_what_auto_has_come_to(parsing_server: LiveServer) -> None:
    info = httpx.get(f"{parsing_server.url}/server_info").json()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", "qwen3")


def test_parse_function_call(parsing_server: LiveServer) -> None:
    url = f"{parsing_server.url}/parse_function_call"
    text = "Let me see.<tool_call>get_time<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
    reply = httpx.post(url, json={"text": text, "tool_call_parser": "glm47", "tools": TOOLS})
    assert reply.json() == {
        "normal_text": "Let me see.",
        "calls": [{"tool_index": 0, "name": "get_time", "parameters": '{"city": "Rome"}'}],
    }
    reply = httpx.post(url, json={"text": text, "tool_call_parser": "glm9", "tools": TOOLS})
    assert reply.status_code == 400 and "glm47" in reply.text
    assert httpx.post(url, json={"text": text}).status_code == 400


def test_separate_reasoning(parsing_server: LiveServer) -> None:
    url = f"{parsing_server.url}/separate_reasoning"
    reply = httpx.post(url, json={"text": "well</think>\n\nyes", "reasoning_parser": "deepseek-r1"})
    assert reply.json() == {"reasoning_text": "well", "text": "yes"}
    reply = httpx.post(url, json={"text": "<think>well</think>yes"})
    assert reply.json() == {"reasoning_text": "well", "text": "yes"}


@pytest.fixture(scope="module")
def kimi_server() -> Iterator[LiveServer]:
    flags = ("--tool-call-parser", "kimi_k2", "--reasoning-parser", "kimi")
    with live_server("--served-model-name", MODEL, *flags) as running:
        yield running


def writes_the_format(server: LiveServer, form: str) -> None:
    """The model writes the format that its template is told."""
    with connect(server) as client:
        options = {
            "tools": TOOLS,
            "extra_body": {"chat_template_kwargs": {"tool_format": form, "enable_thinking": False}},
        }
        for choice in ("auto", "required"):
            message = ask(client, TIME, tool_choice=choice, **options).choices[0].message
            (call,) = message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {"city": "Paris"})
            stream = streamed(ask(client, TIME, tool_choice=choice, stream=True, **options))
            assert [entry[1:] for entry in stream["calls"]] == [[call.function.name, call.function.arguments]]
            assert message.content is None and stream["content"] == ""
        if form == "kimi_k2":
            assert call.id == "functions.get_time:0"
            history = [*TIME, message, {"role": "tool", "tool_call_id": call.id, "content": "noon"}, *TIME]
            (call,) = ask(client, history, tool_choice="required", **options).choices[0].message.tool_calls
            assert call.id == f"functions.{call.function.name}:1"


def test_the_format_of_kimi(kimi_server: LiveServer) -> None:
    writes_the_format(kimi_server, "kimi_k2")


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["glm45", "deepseekv31", "deepseekv32"])
def test_formats_of_other_models(form: str) -> None:
    with live_server("--tool-call-parser", form, "--served-model-name", MODEL) as server:
        writes_the_format(server, form)


def test_without_a_parser_a_call_cannot_be_forced(server: LiveServer) -> None:
    with connect(server) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            ask(client, ADD, tools=TOOLS, tool_choice="required")
        answer = ask(client, ADD, tools=TOOLS).choices[0]
        assert answer.message.tool_calls is None and "<tool_call>" in answer.message.content


@pytest.fixture(scope="module")
def special_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """With markers that are special tokens, and thoughts as long as the answer may be."""
    folder = tmp_path_factory.mktemp("special")
    for file in Path(DEFAULT_MODEL_PATH).iterdir():
        (folder / file.name).symlink_to(file)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = True
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = ("--model-path", str(folder), "--served-model-name", MODEL, "--constrained-thinking-share", "1")
    with live_server(*flags, "--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3") as server:
        yield server


def test_markers_that_are_special_tokens(special_server: LiveServer) -> None:
    """They are seen although special tokens are skipped, but not where nothing is parsed."""
    with connect(special_server) as client:
        (call,) = ask(client, TIME, tools=TOOLS).choices[0].message.tool_calls
        assert call.function.name == "get_time"
        message = ask(client, APPLES).choices[0].message
        assert message.content == "The answer is 37." and message.model_extra["reasoning_content"]
    native = httpx.post(
        f"{special_server.url}/generate", json={"text": "<|im_start|>user\nHi<|im_end|>\n", "stream": False}
    )
    assert "<|" not in native.json()["text"]


THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
"""The embedded model's template asks for no thoughts before a constrained answer unless the request does."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
PERSON_FORM = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": {**PERSON, "required": ["name", "age"]}},
}


@pytest.mark.values
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("constrained", [False, True])
def test_a_thinking_budget(each_client: openai.OpenAI, constrained: bool, stream: bool) -> None:
    """Thoughts end there, in every choice, and the grammar of the answer begins behind them."""
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    free = ask(each_client, APPLES).choices[0].message.reasoning_content
    fields = {"thinking_budget": 4, **THINKS}
    options = {"extra_body": fields, **({"response_format": form} if constrained else {})}
    if stream:
        result = streamed(ask(each_client, APPLES, stream=True, **options))
        answers = [(result["reasoning"], result["content"])]
    else:
        choices = ask(each_client, APPLES, n=2, temperature=0.7, **options).choices
        answers = [(choice.message.reasoning_content, choice.message.content) for choice in choices]
    for thoughts, content in answers:
        assert 0 < len(thoughts) < len(free) and content
        if constrained:
            assert set(json.loads(content)) == {"answer"}


@pytest.mark.values
@pytest.mark.parametrize("begun", ["", "<think> Tom "])
def test_thoughts_before_a_constrained_answer_have_half_of_the_output(each_client: openai.OpenAI, begun: str) -> None:
    """Also those that the prompt has begun, and before a call that is forced; free answers have no such limit."""
    messages = [*APPLES, {"role": "assistant", "content": begun}] if begun else APPLES
    fields = {**THINKS, "continue_final_message": bool(begun)}
    for wanted in ({"response_format": PERSON_FORM}, {"tools": TOOLS, "tool_choice": "required"}):
        answer = ask(each_client, messages, max_tokens=60, extra_body=fields, logit_bias=NEVER_ENDS, **wanted)
        (choice,) = answer.choices
        assert 25 <= answer.usage.reasoning_tokens <= 32, wanted
        assert choice.message.content or choice.message.tool_calls
    free = ask(each_client, APPLES, max_tokens=60, logit_bias=NEVER_ENDS, extra_body={"ignore_eos": True})
    assert free.usage.reasoning_tokens > 40


NEVER_ENDS = {str(END_OF_THOUGHTS): -100.0}


def test_a_share_of_1_is_no_limit(special_server: LiveServer) -> None:
    with connect(special_server) as client:
        fields = {"response_format": PERSON_FORM, "extra_body": THINKS, "logit_bias": NEVER_ENDS}
        assert ask(client, APPLES, max_tokens=60, **fields).usage.reasoning_tokens == 60


@pytest.mark.values
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_a_native_request_requires(each_client: openai.OpenAI, stream: bool) -> None:
    """The grammar begins behind the thoughts, which are counted and leave room for the answer."""
    prompt = f"<|im_start|>user\n{APPLES[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    params = {"temperature": 0, "max_new_tokens": 80}
    with httpx.Client(base_url=str(each_client.base_url.join("/")), timeout=300) as http:

        def generate(params: dict[str, Any]) -> dict[str, Any]:
            body = {"text": prompt, "sampling_params": params, "require_reasoning": True, "stream": stream}
            reply = http.post("/generate", json=body)
            events = [json.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]] if stream else [reply.json()]
            result: dict[str, Any] = events[-1]
            return result

        fruit = {"enum": ["apples", "pears"]}
        for fields, schema in (
            ({}, json.dumps(fruit)),
            ({}, fruit),
            ({"logit_bias": NEVER_ENDS}, json.dumps(fruit)),
        ):
            answer = generate({**params, **fields, "json_schema": schema})
            thoughts, _, form = answer["text"].partition("</think>")
            assert thoughts and json.loads(form) in ("apples", "pears")
            ids = answer["output_ids"]
            assert answer["meta_info"]["reasoning_tokens"] == ids.index(END_OF_THOUGHTS) + 1 <= 41
        free = generate(params)
        assert 0 < free["meta_info"]["reasoning_tokens"] < free["meta_info"]["completion_tokens"]
        for grammar in ({"structural_tag": {}}, {"json_schema": fruit, "regex": "a"}):
            body = {"text": "a", "require_reasoning": True, "sampling_params": grammar}
            assert http.post("/generate", json=body).status_code == 400
        wrong = http.post("/generate", json={"text": "a", "require_reasoning": "x"})
        assert wrong.status_code == 400


def test_requiring_reasoning_needs_a_parser(server: LiveServer) -> None:
    reply = httpx.post(f"{server.url}/generate", json={"text": "a", "require_reasoning": True})
    assert reply.status_code == 400 and "--reasoning-parser" in reply.json()["error"]["message"]


def ends_thoughts(server: LiveServer, begin: str) -> None:
    """This tokenizer has no tokens of their own for the marks of these formats."""
    lead = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begin + " Ada is 36"}]
    with connect(server) as client:
        fields = {"continue_final_message": True}
        answer = ask(client, lead, max_tokens=120, response_format=PERSON_FORM, extra_body=fields)
        assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}


def test_marks_of_several_tokens_end_thoughts_too(kimi_server: LiveServer) -> None:
    ends_thoughts(kimi_server, "◁think▷")


@pytest.mark.thorough
def test_so_do_marks_of_gpt_oss() -> None:
    with live_server("--served-model-name", MODEL, "--reasoning-parser", "gpt-oss") as server:
        ends_thoughts(server, "<|channel|>analysis<|message|>")
        continues_the_text(server)


def continues_the_text(server: LiveServer) -> None:
    """A constraint applies to the new text alone, which begins without a header, in both APIs."""
    lead = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is"}]
    with connect(server) as client:
        fields = {"continue_final_message": True}
        answer = ask(client, lead, max_tokens=60, response_format=PERSON_FORM, extra_body=fields)
        assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}
        assert answer.usage.reasoning_tokens == 0
    form = {"format": {"type": "json_schema", "schema": {**PERSON, "additionalProperties": False}}}
    body = {"model": MODEL, "max_tokens": 60, "messages": lead, "output_config": form}
    reply = httpx.post(f"{server.url}/v1/messages", json=body)
    assert reply.status_code == 200
    (block,) = reply.json()["content"]
    assert set(json.loads(block["text"])) == {"name", "age"}


@pytest.mark.parametrize("name", ["max_thinking_tokens", "thinking_token_budget"])
def test_other_names_of_the_thinking_budget(client: openai.OpenAI, name: str) -> None:
    limited = ask(client, APPLES, extra_body={"thinking_budget": 4}).choices[0].message
    assert ask(client, APPLES, extra_body={name: 4}).choices[0].message == limited
    assert ask(client, APPLES, extra_body={name: 4, "thinking_budget": 4}).choices[0].message == limited
    with pytest.raises(openai.BadRequestError, match="several names, with different values"):
        ask(client, APPLES, extra_body={name: 4, "thinking_budget": 5})


def test_a_thinking_budget_needs_a_reasoning_parser(server: LiveServer) -> None:
    with connect(server) as client:
        refused = pytest.raises(openai.BadRequestError, match="thinking_budget needs --reasoning-parser")
        with refused:
            ask(client, APPLES, extra_body={"thinking_budget": 4})
