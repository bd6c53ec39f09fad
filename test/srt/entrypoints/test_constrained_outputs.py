"""Every pair of a format and a constraint, fresh and continued: the grammar takes a right output, which is read into
the right parts, and takes none that would be read into wrong ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.constrained.grammar import GrammarError, GrammarKey
from sglang.srt.constrained.grammar_backends import make_backend
from sglang.srt.constrained.vocabulary import write_vocabulary
from sglang.srt.entrypoints.openai.chat_output import ChatFormats
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, FunctionName, NamedToolChoice
from sglang.srt.function_call.events import ParsedOutput, collect
from sglang.srt.function_call.forcing import FORCED_CALLS
from sglang.srt.function_call.messages import MessageFormat, Start
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.function_call.registry import REASONING_FORMATS
from srt.constrained.byte_tokenizer import EOS, TOKENIZER, VOCAB_SIZE
from srt.function_call.outputs import MESSAGE_FORMATS
from srt.function_call.test_forcing import compiled, is_text_of, written

BEGUN = "It is"
FUNCTION = "get_weather"
ARGUMENTS = {"city": "Paris", "days": 3}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in ((FUNCTION, SCHEMA), ("now", {"type": "object", "properties": {}}))
]
ANSWERS = {"json_schema": (json.dumps({"type": "object", "properties": {"x": {"type": "integer"}}}), '{"x": 5}')}
ANSWERS["regex"] = ("[a-c]+ [0-9]", "abc 7")
REASONING = {
    "qwen25": "qwen3",
    "hermes": None,
    "glm45": "glm45",
    "kimi_k2": "kimi_k2",
    "deepseekv31": "deepseek-v3",
    "deepseekv3": "deepseek-r1",
    "mistral": "mistral",
    "minimax-m2": "minimax",
    "minimax-m3": "minimax-m3",
    "hunyuan": "hunyuan",
    "apertus2509": "apertus2509",
    **{name: name for name in MESSAGE_FORMATS},
}
"""The reasoning formats of the call formats' models; the others think as Qwen3 does."""
PROMPTS = {
    "gpt-oss": ("<|start|>assistant", "<|channel|>final<|message|>"),
    "muse": ("<|start|>assistant", " to=user<|message|>"),
    "inkling": ("<|message_model|>", "<|content_text|>"),
}
"""The end of a prompt, and what a message's text follows in one."""


@dataclass(frozen=True)
class Case:
    calls: str
    constraint: str
    """none, json_schema, regex, required, named, strict, or one: at most one call."""
    start: str
    """fresh, text or thoughts: what the prompt has begun."""
    thinks: bool
    offers: bool
    """Whether tools are offered beside an answer."""

    @property
    def reasoning_name(self) -> str | None:
        return REASONING.get(self.calls, "qwen3")

    @property
    def forces(self) -> bool:
        return self.constraint in ("required", "named")

    def body(self) -> ChatCompletionRequest:
        options: dict[str, Any] = {}
        messages = [{"role": "user", "content": "hi"}]
        if self.start != "fresh":
            begin = around(self.reasoning_name)[0] if self.start == "thoughts" else ""
            messages.append({"role": "assistant", "content": begin + BEGUN})
            options["continue_final_message"] = True
        if self.offers:
            options["tools"] = TOOLS
        if self.constraint == "strict":
            options["tools"] = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
        if self.constraint == "required":
            options["tool_choice"] = "required"
        if self.constraint == "named":
            options["tool_choice"] = NamedToolChoice(FunctionName(FUNCTION))
        if self.constraint == "one":
            options["parallel_tool_calls"] = False
        return ChatCompletionRequest(messages=messages, **options)

    def prompt(self) -> str:
        lead, header = PROMPTS.get(self.calls, ("<assistant>\n", ""))
        begin, end = around(self.reasoning_name)
        if self.start == "text":
            return f"<user>hi{lead}{header}{BEGUN}"
        if self.start == "thoughts":
            return f"<user>hi{lead}{begin}{BEGUN}"
        is_closed = not self.thinks and self.reasoning_name is not None and self.calls not in MESSAGE_FORMATS
        return f"<user>hi{lead}" + (f"{begin}\n\n{end}\n\n" if is_closed else "")

    def thoughts(self) -> str:
        """What the output begins with."""
        begin, end = around(self.reasoning_name)
        if self.start == "thoughts":
            return " well" + self.after_thoughts()
        if self.start == "text" or not self.thinks:
            return ""
        form = REASONING_FORMATS[self.reasoning_name or ""]
        is_inside = not isinstance(form, MessageFormat) and form.starts_inside(self.prompt())
        return ("" if is_inside else begin) + "well" + self.after_thoughts()

    def after_thoughts(self) -> str:
        end = around(self.reasoning_name)[1]
        return end + PROMPTS[self.calls][0] if self.calls in MESSAGE_FORMATS else end + "\n\n"

    def call(self) -> str:
        text = written(self.calls, (FUNCTION, ARGUMENTS))
        if self.start == "text" and self.calls in MESSAGE_FORMATS:
            return self.after_thoughts() + text  # the text's message ends as thoughts do
        return text

    def answer(self) -> str:
        text = ANSWERS[self.constraint][1] if self.constraint in ANSWERS else "Hello 7"
        if self.start != "text" and self.calls in MESSAGE_FORMATS:
            return PROMPTS[self.calls][1] + text
        return text


def around(name: str | None) -> tuple[str, str]:
    return ("", "") if name is None else REASONING_FORMATS[name].thought_marks


def cases(names: tuple[str, ...], constraints: tuple[str, ...]) -> list[Case]:
    chosen = []
    for calls, constraint, start, thinks, offers in itertools.product(
        names, constraints, ("fresh", "text", "thoughts"), (False, True), (False, True)
    ):
        case = Case(calls, constraint, start, thinks, offers)
        if case.constraint not in ("none", *ANSWERS) and not offers:
            continue
        if thinks and start != "fresh":  # what has begun decides
            continue
        if case.reasoning_name is None and (thinks or start == "thoughts"):
            continue
        chosen.append(case)
    return chosen


def parsed(formats: ChatFormats, text: str, size: int) -> ParsedOutput:
    parser = formats.new_parser()
    events = [event for at in range(0, len(text), size) for event in parser.push(text[at : at + size])]
    return collect([*events, *parser.finish()])


def xgrammar_takes(tag: str) -> Callable[[str], bool]:
    grammar = compiled(json.loads(tag))
    return lambda text: is_text_of(grammar, text)


def llguidance_takes(folder: Path) -> Callable[[str], Callable[[str], bool]]:
    write_vocabulary(folder / "vocabulary.json", TOKENIZER, VOCAB_SIZE, {EOS})
    backend = make_backend("llguidance", folder / "vocabulary.json")
    backend.load()

    def compile_tag(tag: str) -> Callable[[str], bool]:
        start = backend.compile(GrammarKey("structural_tag", tag))

        def takes(text: str) -> bool:
            grammar = start.fresh()
            return all(map(grammar.accept, [*TOKENIZER.encode(text), EOS])) and grammar.is_terminated()

        return takes

    return compile_tag


def check(case: Case, compile_tag: Callable[[str], Callable[[str], bool]]) -> None:
    formats = ChatFormats(ModelFormats(case.calls, case.reasoning_name), case.body(), case.prompt())
    params: dict[str, Any] = {case.constraint: ANSWERS[case.constraint][0]} if case.constraint in ANSWERS else {}
    formats.constrain(params)
    grammar = compile_tag(params["structural_tag"]) if "structural_tag" in params else None
    assert (grammar is None) == (case.constraint == "none" or (not formats.parses and case.constraint in ANSWERS))
    thoughts, call, answer = case.thoughts(), case.call(), case.answer()
    may_think = case.start == "thoughts" or (case.start == "fresh" and case.thinks)
    outputs = [(thoughts + call, "", True)] if case.offers else []
    if not case.forces:
        text = answer.removeprefix(PROMPTS.get(case.calls, ("", ""))[1])
        outputs.append((thoughts + answer, text, False))
    for output, text, calls in outputs:
        if grammar is not None:
            assert grammar(output), output
        for size in (len(output), 1, 7):
            read = parsed(formats, output, size)
            assert (read.text, read.reasoning.strip()) == (text, "well" if may_think else ""), output
            assert [(entry.name, json.loads(entry.arguments)) for entry in read.calls] == (
                [(FUNCTION, ARGUMENTS)] if calls else []
            )
    if grammar is not None and (case.forces or case.constraint in ANSWERS):
        for wrong in (thoughts + "Hello", thoughts + BEGUN + call, thoughts):
            assert not grammar(wrong), wrong
        if thoughts and case.calls in MESSAGE_FORMATS:
            begun = thoughts.removesuffix(PROMPTS[case.calls][0])
            assert not grammar(f"{begun}Hello{thoughts}{answer}"), "text between messages"
        if case.calls in MESSAGE_FORMATS and case.start == "text":
            assert not grammar(PROMPTS[case.calls][1] + answer), "a header within a text"
            assert not formats.thinks_first
    assert formats.thinks_first <= (case.forces or case.constraint in ANSWERS)


@pytest.mark.parametrize("name", MESSAGE_FORMATS)
@pytest.mark.parametrize("text", [" to=user is set.", " to=self", "now", "{", "It"])
def test_continued_text_is_no_header(name: str, text: str) -> None:
    """It goes on at once, and a call behind it is one."""
    case = Case(name, "none", "text", thinks=False, offers=True)
    formats = ChatFormats(ModelFormats(name, name), case.body(), case.prompt())
    assert collect(formats.new_parser().push(text)).text == text
    output = text + case.call()
    for size in (len(output), 1, 2, 5):
        read = parsed(formats, output, size)
        assert (read.text, read.reasoning, [call.name for call in read.calls]) == (text, "", [FUNCTION])


@pytest.mark.parametrize(
    ("name", "prompt", "start"),
    [
        ("gpt-oss", "<|channel|>final<|message|>It is", Start.TEXT),
        ("gpt-oss", "It is", Start.TEXT),
        ("gpt-oss", "<|channel|>analysis<|message|>Six", Start.THOUGHTS),
        ("gpt-oss", "<|channel|>analysis<|message|>Six<|end|><|start|>assistant", Start.HEADER),
        ("gpt-oss", "<|channel|>analysis<|message|>Six<|end|>\n", Start.HEADER),
        ("muse", "<|start|>user<|message|> to=self<|message|><|eot|><|start|>assistant<|message|>It is", Start.TEXT),
        ("muse", " to=self<|message|>Six<|eom|><|start|>assistant to=user<|message|>It is", Start.TEXT),
        ("inkling", "<|message_model|><|content_thinking|>Six", Start.THOUGHTS),
    ],
)
def test_where_a_continued_output_begins(name: str, prompt: str, start: Start) -> None:
    form = REASONING_FORMATS[name]
    assert isinstance(form, MessageFormat) and form.start_behind(prompt) is start


class Tokens:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [len(text)]


@pytest.mark.parametrize("start", ["text", "thoughts"])
def test_a_budget_of_thoughts_where_a_constrained_answer_is_continued(start: str) -> None:
    case = Case("gpt-oss", "regex", start, thinks=False, offers=False)
    formats = ChatFormats(ModelFormats("gpt-oss", "gpt-oss"), case.body(), case.prompt())
    formats.constrain({"regex": "x"})
    budget = formats.thinking_budget(Tokens(), 5)  # type: ignore[arg-type]
    assert budget is not None and budget.inside == formats.thinks_first == (start == "thoughts")


def test_thoughts_are_text_for_a_server_that_does_not_tell_them_apart() -> None:
    case = Case("gpt-oss", "regex", "thoughts", thinks=False, offers=False)
    formats = ChatFormats(ModelFormats("gpt-oss"), case.body(), case.prompt())
    params = {"regex": "x"}
    formats.constrain(params)
    assert json.loads(params["structural_tag"])["format"] == {"type": "regex", "pattern": "x"}
    assert parsed(formats, " well", 5).text == " well"


CONSTRAINTS = ("none", "json_schema", "regex", "required", "named", "strict", "one")
FEW = cases((*MESSAGE_FORMATS, "qwen25"), ("none", "json_schema", "required"))


@pytest.mark.parametrize("case", FEW, ids=str)
def test_outputs(case: Case) -> None:
    check(case, xgrammar_takes)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORCED_CALLS)
@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_outputs_of_every_format(name: str, library: str, tmp_path: Path) -> None:
    compile_tag = xgrammar_takes if library == "xgrammar" else llguidance_takes(tmp_path)
    num_checked = 0
    for case in cases((name,), CONSTRAINTS):
        try:
            check(case, compile_tag)
            num_checked += 1
        except GrammarError:
            is_object_or_call = name == "llama3" and case.offers and case.constraint == "json_schema"
            assert library == "llguidance" and (FORCED_CALLS[name].style != "json" or is_object_or_call)
        except AssertionError as error:
            raise AssertionError(case) from error
    assert num_checked >= 6
