"""A server of a class of transformers that reads images, and OpenAI's client: answers are those of the class's own
`generate` behind the prompt that transformers' own processor writes."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import torch
from live_server import LiveServer, live_server
from PIL import Image
from srt.transformers_backend.found_facts import find_facts
from srt.transformers_backend.image_classes import CLASSES, IMAGE, picture, save_image_class
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

NEW_TOKENS = 6
PLACES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
SPECIAL = {
    "<image>": IMAGE,
    **{text: 200 + i for i, text in enumerate(("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"))},
    **{place: 210 + i for i, place in enumerate(PLACES)},
}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<end_of_utterance>{% endfor %}"
)


def save_processor(folder: Path) -> Idefics3Processor:
    """Words and marks, in the form of Idefics3's tokenizer."""
    words = {f"w{number}": number for number in range(3, 190)} | {"<unk>": 2, "\n": 190, "\n\n": 191}
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | SPECIAL, unk_token="<unk>"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
    rust.decoder = tokenizers.decoders.Fuse()
    rust.add_special_tokens([*SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    images = Idefics3ImageProcessorPil(**CLASSES["idefics3"].processor[2])
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


class Seen:
    """A server, with the model and the processor as transformers has them."""

    def __init__(self, server: LiveServer, model: Any, processor: Idefics3Processor) -> None:
        self.server, self.model, self.processor = server, model, processor

    @torch.inference_mode()
    def expected(self, text: str, images: list[Image.Image]) -> tuple[str, int]:
        """Returns the answer to a prompt, and the prompt's tokens."""
        made = self.processor(images=[images], text=[text], return_tensors="pt")
        out = self.model.generate(**made, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
        count = made["input_ids"].shape[1]
        answer: str = self.processor.tokenizer.decode(out[0, count:], skip_special_tokens=True)
        return answer, count


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("model")
    model, processor = save_image_class("idefics3", folder), save_processor(folder)
    find_facts(folder)
    with live_server(
        "--model-path", str(folder), "--chunked-prefill-size", "16", "--mm-processor-worker-num", "1"
    ) as up:
        yield Seen(up, model, processor)


def url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_a_conversation_with_pictures(seen: Seen) -> None:
    """One that is cut into tiles, and a small one."""
    images = [picture(1, 60, 40), picture(2, 20, 24)]
    text = "w3 w4 w5<image>w6 w7<image>w8<end_of_utterance>"
    parts: list[Any] = [{"type": "text", "text": "w3 w4 w5"}]
    for image, behind in zip(images, ("w6 w7", "w8"), strict=True):
        parts += [{"type": "image_url", "image_url": {"url": url(image)}}, {"type": "text", "text": behind}]
    with openai.OpenAI(base_url=f"{seen.server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        answer = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": parts}], max_tokens=NEW_TOKENS, temperature=0.0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    assert answer.usage is not None
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == seen.expected(text, images)


def test_a_picture_that_is_none(seen: Seen) -> None:
    with (
        openai.OpenAI(base_url=f"{seen.server.url}/v1", api_key="none", max_retries=0, timeout=300) as client,
        pytest.raises(openai.BadRequestError, match="no format that is read here"),
    ):
        part: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": [part]}])
