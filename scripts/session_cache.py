"""The share of a session's prompt tokens that a server finds in its prefix cache.

    python scripts/session_cache.py http://127.0.0.1:30000 [--turns 30] [--no-reminders]

plays an agent over `/v1/messages`: each turn has a question and, among the messages, a system message with a reminder.
The server needs --enable-cache-report.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

INSTRUCTIONS = "You help with a program in this folder. Answer in few words. " * 8


def ask(url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "any", "max_tokens": 8, "temperature": 0, "system": INSTRUCTIONS, "messages": messages}
    data = json.dumps(body | {"thinking": {"type": "disabled"}}).encode()
    request = urllib.request.Request(f"{url}/v1/messages", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        result: dict[str, Any] = json.load(answer)
        return result


def cached_share(url: str, num_turns: int, reminders: bool) -> tuple[int, int]:
    """Prompt tokens of the whole session that were cached, and all of them."""
    messages: list[dict[str, Any]] = []
    cached = total = 0
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"Question {turn}: what does the file part_{turn}.py contain?"})
        if reminders:
            messages.append({"role": "system", "content": f"The file part_{turn}.py was changed by the user."})
        answer = ask(url, messages)
        usage = answer["usage"]
        cached += usage["cache_read_input_tokens"]
        total += usage["cache_read_input_tokens"] + usage["input_tokens"]
        text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        messages.append({"role": "assistant", "content": text or "Nothing."})
    return cached, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("url")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--no-reminders", action="store_true")
    asked = parser.parse_args()
    cached, total = cached_share(asked.url.rstrip("/"), asked.turns, not asked.no_reminders)
    print(f"{asked.turns} turns: {cached} of {total} prompt tokens were cached, {cached / total:.1%}")


if __name__ == "__main__":
    main()
