"""The training record as a picture: losses and held-out scores by task, an SVG without any library."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 220, 40, 50
PALETTE = (
    "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22 #17becf #393b79 #637939 #8c6d31 #843c39"
).split()

FLOOR = 1e-4
"""The least loss in the plot: the record keeps four digits."""

Point = tuple[float, float]


def picture(record: dict[str, Any]) -> str:
    """Two panels: the loss of answer tokens, on a logarithmic scale, and the share of exact answers."""
    history, evaluations = record["history"], record["evaluations"]
    tasks = sorted({task for row in history for task in row["tasks"]})
    losses: dict[str, list[Point]] = {
        task: [(row["step"], max(row["tasks"][task], FLOOR)) for row in history if task in row["tasks"]]
        for task in tasks
    }
    whole = [(row["step"], max(row["loss"], FLOOR)) for row in history]
    exact = {
        task: [(row["step"], 100 * row["scores"][task]) for row in evaluations if task in row["scores"]]
        for task in tasks
    }
    steps = max(row["step"] for row in (*history, *evaluations))
    title = (
        f"{record['parameters'] / 1e6:.1f}M parameters, {steps} steps, {record['seconds']:.0f} s on {record['device']}"
    )
    low = min(value for points in losses.values() for _, value in points)
    high = max(value for points in losses.values() for _, value in points)
    first = 10.0 ** math.floor(math.log10(low))
    ticks = [first * 10**i for i in range(math.ceil(math.log10(high / first)) + 1)]
    panels = [
        _panel(0, f"Loss of answer tokens ({title})", losses, steps, ticks, math.log10, whole),
        _panel(HEIGHT, "Held-out exact match, %", exact, steps, [0, 20, 40, 60, 80, 100], float, None),
    ]
    size = f'width="{WIDTH}" height="{2 * HEIGHT}" viewBox="0 0 {WIDTH} {2 * HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="white"/>\n'
        + ("\n".join(panels) + "\n</svg>\n")
    )


def _panel(
    top: int,
    title: str,
    lines: dict[str, list[Point]],
    steps: int,
    ticks: Sequence[float],
    scale: Callable[[float], float],
    thick: list[Point] | None,
) -> str:
    low, high = scale(ticks[0]), scale(ticks[-1])

    def x(step: float) -> float:
        return LEFT + step / steps * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top + HEIGHT - BOTTOM - (scale(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="{top + 24}" font-size="14">{escape(title)}</text>']
    for tick in ticks:
        parts.append(f'<line x1="{LEFT}" x2="{x(steps):.0f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for step in _round_steps(steps):
        parts.append(f'<text x="{x(step):.0f}" y="{top + HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{x(steps / 2):.0f}" y="{top + HEIGHT - 12}" text-anchor="middle">step</text>')
    spacing = min(15.0, (HEIGHT - 30) / max(len(lines), 1))
    for number, (name, points) in enumerate(lines.items()):
        color, dash = PALETTE[number % len(PALETTE)], ' stroke-dasharray="4 3"' if number >= len(PALETTE) else ""
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.2"{dash}/>')
        height = top + 24 + spacing * number
        start = WIDTH - RIGHT + 20
        parts.append(f'<line x1="{start}" x2="{start + 22}" y1="{height}" y2="{height}" stroke="{color}"{dash}/>')
        last = f" {points[-1][1]:.4g}" if points else ""
        parts.append(f'<text x="{start + 28}" y="{height + 4}">{escape(name)}{last}</text>')
    if thick:
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in thick)
        parts.append(f'<polyline points="{path}" fill="none" stroke="black" stroke-width="2.5"/>')
    return "\n".join(parts)


def _round_steps(steps: int) -> range:
    unit = 10 ** math.floor(math.log10(max(steps, 1)))
    if steps / unit < 3:
        unit = max(unit // 2, 1)
    return range(0, steps + 1, unit)


def plot(record_file: Path, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(picture(json.loads(record_file.read_text(encoding="utf-8"))), encoding="utf-8")
