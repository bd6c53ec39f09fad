"""Questions about drawn pictures for the embedded model that sees, to servers whose ranks do not share the front's
memory."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
from live_server import LiveServer
from media.pictures import data_url, encoded
from PIL import Image, ImageDraw

from sglang.embedded import SEEING_PATH

COLORS = {"red": (225, 20, 25), "green": (20, 140, 45), "blue": (25, 60, 220)}
RIGHT = [("red", "circle"), ("green", "square"), ("blue", "circle")]
SMALL_PARTS = str(Path(__file__).parent / "e2e" / "launch_small_parts.py")


def drawn(color: str, shape: str, width: int, height: int) -> str:
    """A data URL."""
    picture, rng = Image.new("RGB", (width, height), "white"), random.Random(width)
    x, y, r = width * rng.uniform(0.45, 0.55), height * rng.uniform(0.45, 0.55), min(width, height) * 0.3
    draw = ImageDraw.Draw(picture)
    (draw.ellipse if shape == "circle" else draw.rectangle)((x - r, y - r, x + r, y + r), fill=COLORS[color])
    return data_url(encoded(picture))


PICTURES = [drawn(*seen, 160, 128) for seen in RIGHT]


def seeing_server(*flags: str, port: int | None = None) -> LiveServer:
    """With pictures that travel in many parts, where they travel."""
    return LiveServer("--model-path", SEEING_PATH, *flags, port=port, launch=(SMALL_PARTS,))


def body(question: str, *urls: str) -> dict[str, object]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, "model": "m"}


def answer(server_url: str, question: str, *urls: str) -> str:
    reply = httpx.post(f"{server_url}/v1/chat/completions", json=body(question, *urls), timeout=300)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"]).strip()


def seen(server_url: str) -> list[tuple[str, str]]:
    """What the server says of the colour and the shape of each picture."""
    return [
        (answer(server_url, "What color is this?", url), answer(server_url, "What shape is this?", url))
        for url in PICTURES
    ]
