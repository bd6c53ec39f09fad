"""What people do with the page, in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from live_server import LiveServer
from media.pictures import encoded
from PIL import Image, ImageDraw

from .conftest import API_KEY, Watched, picture, until

pytestmark = pytest.mark.browser

Watch = Callable[..., Watched]
APPLES = "Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(page: Any, text: str) -> None:
    """Types a message and waits for the end of its answer."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    finished(page)


def finished(page: Any) -> None:
    until(page, "document.querySelector('.message.assistant') && !document.querySelector('.growing')")


def focused(page: Any) -> str:
    """The accessible name of what has the focus, as far as the page gives it itself."""
    return page.evaluate(
        "(e => e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent)(document.activeElement)"
    )


def tab_to(page: Any, name: str, *, back: bool = False, limit: int = 60) -> None:
    """`name` may end in `...`."""
    for _ in range(limit):
        text = focused(page).strip()
        if text == name or (name.endswith("...") and text.startswith(name[:-3])):
            return
        page.keyboard.press("Shift+Tab" if back else "Tab")
    raise AssertionError(f"no way to {name!r} by Tab; the focus is on {focused(page)!r}")


def set_parameter(page: Any, label: str, text: str) -> None:
    if page.locator("#panel").is_hidden():
        page.get_by_role("button", name="Parameters and server").click()
    page.get_by_label(label, exact=True).fill(text)


def test_a_conversation_is_answered_and_kept(served: LiveServer, watched: Watch) -> None:
    window = watched()
    page = window.open(served.url)
    ask(page, "What is 15+27?")
    assert page.locator(".assistant > .text").last.inner_text() == "15 + 27 = 42"
    assert "tokens/s" in page.locator(".message.assistant footer").inner_text()
    ask(page, "What is the capital of France?")
    assert page.locator(".message").count() == 4
    assert "of 4,096 tokens" in page.locator("#context-use").inner_text()
    picture(page, "conversation")
    page.reload()
    page.locator("#conversations .title").click()
    assert page.locator(".message.user .text").all_inner_texts() == ["What is 15+27?", "What is the capital of France?"]
    assert page.locator(".assistant > .text").first.inner_text() == "15 + 27 = 42"


def test_thoughts_are_folded(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    ask(page, APPLES)
    thoughts = page.locator("details.thoughts")
    assert "37" in page.locator(".assistant > .text").inner_text()
    assert not thoughts.evaluate("e => e.open")
    assert thoughts.locator("summary").inner_text().startswith("Thought for ")
    thoughts.locator("summary").click()
    assert "12 + 30 = 42" in thoughts.inner_text()
    picture(page, "thinking")


def test_thinking_can_be_switched_off(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    page.get_by_role("button", name="Parameters and server").click()
    page.get_by_label("Thinking", exact=True).select_option("off")
    ask(page, APPLES)
    assert page.locator("details.thoughts").is_hidden()


def test_a_tool_call_is_shown_and_its_result_goes_back(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    set_parameter(page, "Tools", json.dumps([WEATHER]))
    set_parameter(page, "Temperature", "0")
    ask(page, "What is the weather in Oslo?")
    call = page.locator(".call")
    assert call.locator(".name").inner_text().split()[-1] == "get_weather"
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Oslo"}
    picture(page, "tool-call")
    page.get_by_label("Result", exact=True).fill('{"temperature": 7, "sky": "rainy"}')
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send the result").click()
    messages = sent.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    finished(page)
    assert page.locator(".assistant > .text").last.inner_text()
    assert page.locator(".call textarea").count() == 0
    picture(page, "tool-result")


def test_an_error_says_what_to_do_and_can_be_tried_again(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    set_parameter(page, "Temperature", "2000000")
    ask(page, "What is 15+27?")
    assert "temperature must be in [0," in page.get_by_role("alert").filter(has_text="No answer").inner_text()
    picture(page, "error")
    set_parameter(page, "Temperature", "0")
    page.get_by_role("button", name="Try again").click()
    finished(page)
    assert page.locator(".assistant > .text").inner_text() == "15 + 27 = 42"


def test_wrong_parameters_are_not_sent(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    set_parameter(page, "Tools", "[{")
    page.get_by_label("Message", exact=True).fill("hello")
    page.keyboard.press("Enter")
    assert page.locator("#composer-problem").inner_text() == "Parameters, Tools: This is not JSON."
    assert page.locator(".message").count() == 0
    assert page.get_by_label("Message", exact=True).input_value() == "hello"


def test_parameters_reach_the_server(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    set_parameter(page, "System prompt", "Be brief.")
    set_parameter(page, "Temperature", "0")
    set_parameter(page, "Top k", "5")
    set_parameter(page, "Stop texts", "END\n\n")
    picture(page, "parameters")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "hello")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_k"], body["stop"]) == (0, 5, ["END"])
    assert not {"top_p", "seed", "max_tokens", "tools", "chat_template_kwargs"} & set(body)


def test_an_answer_can_be_stopped(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=endless(route.request.post_data_json)))
    page.get_by_label("Message", exact=True).fill("hello")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.assistant > .text')?.textContent.length > 20")
    page.keyboard.press("Escape")
    finished(page)
    assert "Stopped." in page.locator(".message.assistant").inner_text()
    assert page.get_by_role("button", name="Send", exact=True).is_visible()


def endless(body: dict[str, Any]) -> str:
    return json.dumps({**body, "ignore_eos": True, "max_tokens": 3000})


def test_a_message_can_be_edited(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    ask(page, "What is 2+2?")
    ask(page, "What is 3+3?")
    page.locator(".message.user").first.hover()
    page.get_by_role("button", name="Edit the message").first.click()
    assert page.get_by_label("Message", exact=True).input_value() == "What is 2+2?"
    ask(page, "What is 4+5?")
    assert page.locator(".assistant > .text").all_inner_texts() == ["4 + 5 = 9"]


def test_a_conversation_by_keyboard_alone(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    page.keyboard.type("What is 15+27?")
    page.keyboard.press("Enter")
    finished(page)
    page.keyboard.type(APPLES)
    page.keyboard.press("Enter")
    finished(page)
    tab_to(page, "Thought for ...", back=True)
    page.keyboard.press("Enter")
    assert page.locator("details.thoughts[open]").count() == 1
    tab_to(page, "Parameters and server", back=True)
    page.keyboard.press("Enter")
    tab_to(page, "Parameters")
    page.keyboard.press("ArrowRight")
    assert focused(page) == "Server"
    page.get_by_text("Chosen once, at the start").wait_for()
    page.keyboard.press("ArrowLeft")
    tab_to(page, "Temperature")
    page.keyboard.type("0")
    tab_to(page, "Close the panel", back=True)
    page.keyboard.press("Enter")
    assert focused(page) == "Parameters and server"
    tab_to(page, "New conversation", back=True)
    page.keyboard.press("Enter")
    assert focused(page) == "Message"
    page.keyboard.type("What is")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("2+2?")
    page.keyboard.press("Enter")
    finished(page)
    assert page.locator(".message.user .text").inner_text() == "What is\n2+2?"
    tab_to(page, "Delete What is 2+2?", back=True)
    page.keyboard.press("Enter")
    assert focused(page) == "Delete"
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#conversations li').length === 1")
    assert focused(page) == "New conversation"


def test_rename_and_delete_all(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    ask(page, "What is 2+2?")
    page.locator("#conversations li").hover()
    page.get_by_role("button", name="Rename What is 2+2?").click()
    page.get_by_label("Title").fill("Sums")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Sums", exact=True).wait_for()
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete all").click()
    until(page, "document.querySelectorAll('#conversations li').length === 0")
    assert page.locator("#welcome").is_visible()


def test_the_server_says_what_it_does_and_why(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    page.locator("#open-server").click()
    kernel = page.locator("details.kernel").filter(has_text="decode attention")
    kernel.locator("summary").click()
    assert "torch_native" in kernel.locator("summary").inner_text()
    assert "needs cp_async, which cpu does not have" in kernel.inner_text()
    kernel.scroll_into_view_if_needed()
    picture(page, "kernels")
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=endless(route.request.post_data_json)))
    page.get_by_label("Message", exact=True).fill("hello")
    page.keyboard.press("Enter")
    until(page, "!document.getElementById('live-throughput').textContent.startsWith('0')")
    assert page.locator("#live-running").inner_text() == "1"
    assert float(page.locator("#live-cache").inner_text().rstrip("%")) > 0
    page.locator("#server").evaluate("e => e.scrollTop = 0")
    picture(page, "live")
    assert "tok/s · 1 running · 0 waiting · KV" in page.locator("#live-text").inner_text()
    page.keyboard.press("Escape")


def test_the_key_is_asked_for_and_kept_in_the_tab(guarded: LiveServer, watched: Watch) -> None:
    window = watched()
    page = window.page
    page.goto(guarded.url)
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Key", exact=True).fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("does not accept this key").wait_for()
    picture(page, "key")
    dialog.get_by_label("Key", exact=True).fill(API_KEY)
    page.keyboard.press("Enter")
    page.get_by_text("Ask tiny").wait_for()
    ask(page, "What is 15+27?")
    assert page.locator(".assistant > .text").inner_text() == "15 + 27 = 42"
    page.reload()
    page.get_by_text("Ask tiny").wait_for()
    assert dialog.count() == 0
    assert page.evaluate("Object.values(sessionStorage)") == [API_KEY]
    assert API_KEY not in page.evaluate("JSON.stringify(localStorage)")


def test_images_only_where_the_model_takes_them(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    page.get_by_text("Ask tiny").wait_for()
    assert page.get_by_role("button", name="Attach images").count() == 0
    seeing = watched()
    bodies: list[dict[str, Any]] = []

    def say_it_sees(route: Any) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "has_image_understanding": True})

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(body=stream("A red square."), content_type="text/event-stream")

    seeing.page.route("**/model_info", say_it_sees)
    seeing.page.route("**/v1/chat/completions", answer)
    page = seeing.open(served.url)
    page.get_by_role("button", name="Attach images").wait_for()
    page.set_input_files("#image-files", {"name": "red.png", "mimeType": "image/png", "buffer": RED_PNG})
    page.get_by_role("button", name="Remove image 1").wait_for()
    picture(page, "attached")
    ask(page, "What is this?")
    image, text = bodies[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert page.locator(".message.user img").evaluate("e => e.naturalWidth") == 1
    assert page.locator("#attachments li").count() == 0
    picture(page, "image")


GIVEN = """([name, target, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], "picture.png", {type: "image/png"}));
  const Kind = name === "paste" ? ClipboardEvent : DragEvent;
  const options = {bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data};
  return document.getElementById(target).dispatchEvent(new Kind(name, options));
}"""
"""Dispatches what a browser does when a picture is pasted or dropped; true if the page leaves it to the browser."""


def test_pictures_are_pasted_and_dropped(seeing: LiveServer, watched: Watch) -> None:
    """To the embedded model, which sees. Each picture has a preview; the answer is about the one that stays."""
    page = watched().open(seeing.url)
    page.get_by_role("button", name="Attach images").wait_for()
    circle = Image.new("RGB", (128, 128), "white")
    ImageDraw.Draw(circle).ellipse((24, 24, 104, 104), fill=(25, 60, 220))
    assert not page.evaluate(GIVEN, ["paste", "prompt", list(RED_PNG)])
    page.get_by_role("button", name="Remove image 1").wait_for()
    assert not page.evaluate(GIVEN, ["dragover", "workspace", []])
    assert not page.evaluate(GIVEN, ["drop", "workspace", list(encoded(circle))])
    page.get_by_role("button", name="Remove image 2").wait_for()
    until(page, "[...document.querySelectorAll('#attachments img')].every(e => e.complete)")
    assert page.locator("#attachments img").evaluate_all("all => all.map(e => e.naturalWidth)") == [1, 128]
    picture(page, "dropped")
    page.get_by_role("button", name="Remove image 1").click()
    until(page, "document.querySelectorAll('#attachments li').length === 1")
    ask(page, "What color is this?")
    assert page.locator(".assistant > .text").inner_text() == "blue"
    assert page.locator(".message.user img").evaluate("e => e.naturalWidth") == 128
    picture(page, "seen")


def test_text_that_is_dropped_is_left_to_the_browser(seeing: LiveServer, watched: Watch) -> None:
    page = watched().open(seeing.url)
    page.get_by_role("button", name="Attach images").wait_for()
    assert page.evaluate(GIVEN.replace("image/png", "text/plain"), ["drop", "workspace", [104, 105]])
    assert page.locator("#attachments li").count() == 0


RED_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)


def stream(text: str) -> str:
    """A chat completion as events, a character each."""
    chunks: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": ""}}]
    chunks += [{"delta": {"content": character}} for character in text]
    chunks += [{"delta": {}, "finish_reason": "stop"}]
    events = [json.dumps({"choices": [{"index": 0, **chunk}]}) for chunk in chunks]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])


MARKDOWN = """# Sorting

Two ways, **both** *stable*, see [Python](https://docs.python.org/3/howto/sorting.html) and `list.sort`:

1. in place
   - `a.sort()`
2. as a copy

| call | result |
|---|---|
| `sorted(a)` | a list |
| `a.sort()` | nothing |

```python
def order(a: list[int]) -> list[int]:
    return sorted(a, key=lambda x: -x)  # <b>not HTML</b>
```

> Sorting twice sorts once.

<img src="http://example.com/x.png" onerror="alert(1)"> ![x](http://example.com/y.png) [bad](javascript:alert(1))
snake_case_name, 2 * 3 * 4, **open
"""


def answer_with(page: Any, text: str) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=stream(text), content_type="text/event-stream"),
    )


def test_markdown_becomes_elements_and_nothing_runs(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    answer_with(page, MARKDOWN)
    ask(page, "How do I sort?")
    text = page.locator(".assistant > .text")
    assert text.locator("h3").inner_text() == "Sorting"
    assert text.locator("strong").inner_text() == "both"
    assert text.locator("ol > li").count() == 2
    assert text.locator("ol ul code").inner_text() == "a.sort()"
    assert text.locator("td").all_inner_texts() == ["sorted(a)", "a list", "a.sort()", "nothing"]
    assert "# <b>not HTML</b>" in text.locator("pre").inner_text()
    assert text.locator("img, script, b").count() == 0
    hrefs = text.locator("a").evaluate_all("links => links.map(link => link.href)")
    assert [href for href in hrefs if not href.startswith(("https://docs.python.org/", "http://example.com/"))] == []
    assert "snake_case_name, 2 * 3 * 4, **open" in text.inner_text()
    picture(page, "markdown")


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 40_000, "*a " * 20_000, "`" * 40_000, "> " * 20_000, "- " * 20_000, "|-" * 20_000),
        *("# " + " " * 40_000 + "x", "http://a" + "." * 40_000 + "b", "a\n" * 70_000),
    ],
)
def test_hostile_markdown_does_not_stop_the_page(text: str, served: LiveServer, watched: Watch) -> None:
    """Each is shown within the time that a page has for one message, and the box still takes text."""
    page = watched().open(served.url)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=whole(text), content_type="text/event-stream"),
    )
    ask(page, "hello")
    page.keyboard.type("still there")
    assert page.get_by_label("Message", exact=True).input_value() == "still there"


def whole(text: str) -> str:
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]
    return f"data: {json.dumps({'choices': choices})}\n\ndata: [DONE]\n\n"


def test_an_error_in_the_middle_keeps_what_came(served: LiveServer, watched: Watch) -> None:
    page = watched().open(served.url)
    events = stream("The answer").removesuffix("data: [DONE]\n\n").rpartition("data: ")[0]
    events += 'data: {"error": {"message": "The engine has died.", "code": 500}}\n\ndata: [DONE]\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events, content_type="text/event-stream"))
    ask(page, "hello")
    assert page.locator(".assistant > .text").inner_text() == "The answer"
    assert "The engine has died." in page.get_by_role("alert").filter(has_text="No answer").inner_text()


def test_a_phone(served: LiveServer, watched: Watch) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "device_scale_factor": 2}
    page = watched(**phone).open(served.url)
    answer_with(page, MARKDOWN)
    ask(page, "How do I sort?")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    picture(page, "phone")
    page.get_by_role("button", name="Conversations", exact=True).click()
    assert focused(page) == "Close conversations"
    assert page.locator("#workspace").evaluate("e => e.inert")
    picture(page, "phone-conversations")
    page.keyboard.press("Escape")
    assert page.locator("#sidebar").is_hidden()
    assert focused(page) == "Conversations"
    page.locator("#open-server").click()
    page.get_by_text("Chosen once, at the start").wait_for()
    picture(page, "phone-server")


def test_no_script_from_elsewhere_and_no_request_leaves(served: LiveServer, watched: Watch) -> None:
    """The policy itself is tried: what the page may not do fails in the browser."""
    window = watched()
    page = window.open(served.url)
    refused = page.evaluate("fetch('https://example.com/').then(() => false, () => true)")
    assert refused
    page.evaluate("""() => {
        const script = document.createElement("script");
        try { script.textContent = "window.ran = true"; document.head.append(script); } catch {}
        try { document.body.insertAdjacentHTML("beforeend", "<i onclick='1'>x</i>"); } catch { window.guarded = true; }
    }""")
    assert page.evaluate("[window.ran, window.guarded]") == [None, True]
    assert window.problems  # the browser has reported the violations
    window.problems.clear()
    window.requests = [url for url in window.requests if not url.startswith("https://example.com/")]


VIEWS = ("welcome", "conversation", "parameters", "server", "dark", "phone")


@pytest.mark.parametrize("view", VIEWS)
def test_accessible(view: str, served: LiveServer, watched: Watch) -> None:
    """axe finds nothing, whatever its weight."""
    from axe_playwright_python.sync_playwright import Axe

    options: dict[str, Any] = {"color_scheme": "dark"} if view == "dark" else {}
    if view == "phone":
        options["viewport"] = {"width": 360, "height": 740}
    page = watched(**options).open(served.url)
    page.get_by_text("Ask tiny").wait_for()
    if view != "welcome":
        set_parameter(page, "Tools", json.dumps([WEATHER]))
        set_parameter(page, "Temperature", "0")
        if view in ("phone", "conversation"):
            page.get_by_role("button", name="Close the panel").click()
        ask(page, "What is the weather in Oslo?")
    if view in ("conversation", "dark", "phone"):
        page.get_by_label("Result", exact=True).fill("7 degrees")
        page.get_by_role("button", name="Send the result").click()
        finished(page)
        ask(page, APPLES)
        page.locator("details.thoughts summary").last.click()
        answer_with(page, MARKDOWN)
        ask(page, "How do I sort?")
    if view in ("server", "dark"):
        page.locator("#open-server").click()
        page.locator("details.kernel summary").first.click()
    if view == "dark":
        picture(page, "dark")
    violations = Axe().run(page).response["violations"]
    assert [(each["id"], each["impact"], [node["html"] for node in each["nodes"]]) for each in violations] == []
