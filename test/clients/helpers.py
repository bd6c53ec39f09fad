"""`python helpers.py NAME URL MODEL TEXT` fills in a person from the text with instructor or openai-agents, and prints
it as JSON. They want another version of openai than the tests, so `make clients` gives them an environment."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from pydantic import BaseModel

LIMIT_S = 60


class Person(BaseModel):
    name: str
    age: int


def by_instructor(url: str, model: str, text: str, mode: str) -> Person:
    import instructor

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=LIMIT_S)
    patched: Any = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    asked = [{"role": "user", "content": text}]
    answer: Person = patched.chat.completions.create(model=model, messages=asked, response_model=Person, max_retries=0)
    return answer


def by_agent(url: str, model: str, text: str, model_class: str) -> Person:
    import agents

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=LIMIT_S)
    served = getattr(agents, model_class)(model=model, openai_client=client)
    extractor = agents.Agent(name="extractor", output_type=Person, model=served)
    answer: Person = asyncio.run(agents.Runner.run(extractor, text)).final_output
    return answer


HELPERS = {
    "instructor TOOLS": lambda *asked: by_instructor(*asked, "TOOLS"),
    "instructor JSON_SCHEMA": lambda *asked: by_instructor(*asked, "JSON_SCHEMA"),
    "agents chat": lambda *asked: by_agent(*asked, "OpenAIChatCompletionsModel"),
    "agents responses": lambda *asked: by_agent(*asked, "OpenAIResponsesModel"),
}

if __name__ == "__main__":
    print(HELPERS[sys.argv[1]](*sys.argv[2:]).model_dump_json())
