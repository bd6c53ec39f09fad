"""`sglang bench report`: charts and tables of sweeps in one HTML page that opens offline, and as a PDF."""

from __future__ import annotations

import argparse
import html
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.bench.sweep import point_of, read_results
from sglang.srt.errors import UserError

PDF_SECONDS = 120
PDF_WINDOW = (1036, 900)
"""Pixels. Charts keep the size that they have in the window: this one is as wide as what a printed page shows."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
COLOURS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6", "#8c6d31", "#dd4477")


@dataclass(frozen=True, slots=True)
class Value:
    """The value of one point: median and range over its repetitions."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Value:
        """Returns the median and range of repeated measurements."""
        return Value(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        digits = 0 if self.middle >= 100 else 1 if self.middle >= 10 else 2
        text = f"{self.middle:,.{digits}f}"
        return text if self.low == self.high else f"{text} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


@dataclass(frozen=True, slots=True)
class Curve:
    """One server of one file with one pair of lengths, over ascending concurrencies."""

    name: str
    lengths: tuple[int, int]
    concurrency: tuple[int, ...]
    rows: tuple[tuple[dict[str, Any], ...], ...]  # the repetitions of each concurrency

    def values(self, number: str) -> list[Value]:
        """Returns a number at each point of the curve."""
        return [Value.of([row["numbers"][number] for row in rows]) for rows in self.rows]

    def interactivity(self) -> list[Value]:
        """Returns the tokens a second that one user sees, from the median time between tokens."""
        rates = [[1000 / max(row["numbers"]["median_tpot_ms"], 1e-9) for row in rows] for rows in self.rows]
        return [Value.of(values) for values in rates]


def curves(files: Sequence[Path]) -> list[Curve]:
    """Returns the curves of result files. Prefixes servers' names with those of their files if there are several.
    Raises UserError."""
    groups: dict[tuple[str, tuple[int, int]], dict[int, list[dict[str, Any]]]] = {}
    for path in files:
        for row in read_results(path):
            point = point_of(row)
            name = point.server if len(files) == 1 else f"{path.stem}: {point.server}"
            by_concurrency = groups.setdefault((name, (point.input_len, point.output_len)), {})
            by_concurrency.setdefault(point.concurrency, []).append(row)
    if not groups:
        raise UserError(f"no results in {', '.join(map(str, files))}")
    return [
        Curve(name, lengths, tuple(sorted(rows)), tuple(tuple(rows[count]) for count in sorted(rows)))
        for (name, lengths), rows in sorted(groups.items(), key=lambda item: item[0][1])
    ]


CHARTS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Output throughput", "tokens/s", "concurrency", (("output_throughput", ""),)),
    ("Time to first token", "ms", "concurrency", (("median_ttft_ms", ""), ("p99_ttft_ms", "99th percentile"))),
    ("Time between tokens", "ms", "concurrency", (("median_itl_ms", ""), ("p99_itl_ms", "99th percentile"))),
    ("Throughput over interactivity", "tokens/s of all", "tokens/s of one user", (("output_throughput", ""),)),
)
"""Title, unit of y, what x is, and the numbers with the remark of each."""
TABLE = (
    ("output_throughput", "output tok/s"),
    ("median_ttft_ms", "TTFT ms"),
    ("p99_ttft_ms", "TTFT p99"),
    ("median_itl_ms", "ITL ms"),
    ("p99_itl_ms", "ITL p99"),
    ("median_e2e_latency_ms", "request ms"),
)


def _chart(chart: tuple[str, str, str, tuple[tuple[str, str], ...]], selected: Sequence[Curve], script: bool) -> str:
    import plotly.graph_objects as go

    title, unit, across, numbers = chart
    figure = go.Figure()
    for i, curve in enumerate(selected):
        over_users = across != "concurrency"
        x = [value.middle for value in curve.interactivity()] if over_users else list(curve.concurrency)
        for number, remark in numbers:
            values = curve.values(number)
            label = f"{curve.name}, {remark}" if remark else curve.name
            figure.add_scatter(
                x=x,
                y=[value.middle for value in values],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [value.high - value.middle for value in values],
                    "arrayminus": [value.middle - value.low for value in values],
                },
                mode="lines+markers",
                name=label,
                line={"color": COLOURS[i % len(COLOURS)], "dash": "dot" if remark else "solid"},
                text=[f"concurrency {count}" for count in curve.concurrency],
            )
    figure.update_layout(
        title={"text": title, "x": 0.02},
        margin={"l": 60, "r": 12, "t": 44, "b": 48},
        height=380,
        template="plotly_white",
        showlegend=True,
        legend={"orientation": "h", "y": -0.22},
    )
    figure.update_yaxes(title=unit, rangemode="tozero")
    figure.update_xaxes(title=across, type="log" if across == "concurrency" else "linear")
    if across == "concurrency":
        ticks = sorted({count for curve in selected for count in curve.concurrency})
        figure.update_xaxes(tickvals=ticks, ticktext=[str(count) for count in ticks])
    else:
        figure.update_xaxes(rangemode="tozero")
    config = {"responsive": True, "displaylogo": False, "displayModeBar": False}
    text: str = figure.to_html(full_html=False, include_plotlyjs=script, config=config)
    return f'<div class="chart">{text}</div>'


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 76rem; background: #fff }
h1 { font-size: 1.6rem } h2 { margin-top: 2.5rem; font-size: 1.25rem }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem }
.chart { min-width: 0; break-inside: avoid }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; width: 100% }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
td:first-child, td span { white-space: nowrap }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem }
dt { color: #555 } dd { margin: 0; overflow-wrap: anywhere }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .75rem; background: #f6f6f6; padding: .6rem }
@media (max-width: 50rem) { .charts { grid-template-columns: minmax(0, 1fr) } dl { grid-template-columns: 1fr }
  table { min-width: 48rem } }
@page { size: A4; margin: 12mm }
@media print {
  body { max-width: none; padding: 0; zoom: .7 }
  .charts { grid-template-columns: repeat(2, minmax(0, 1fr)) } dl { grid-template-columns: max-content 1fr }
  .scroll { overflow: visible } table { font-size: .75rem; min-width: 0 }
  h2, h3 { break-after: avoid } tr, dl { break-inside: avoid }
}
"""


def page(files: Sequence[Path], title: str) -> str:
    """Returns the HTML page. Raises UserError."""
    try:
        import plotly  # noqa: F401
    except ImportError:
        raise UserError("the report needs plotly: pip install 'sm120-sglang[report]'") from None
    all_curves, parts = curves(files), []
    script = True
    for lengths in dict.fromkeys(curve.lengths for curve in all_curves):
        selected = [curve for curve in all_curves if curve.lengths == lengths]
        parts.append(f"<h2>{lengths[0]:,} tokens in, {lengths[1]:,} out</h2>")
        charts = []
        for chart in CHARTS:
            charts.append(_chart(chart, selected, script))
            script = False
        parts.append(f'<div class="charts">{"".join(charts)}</div>{_table(selected)}')
    parts += ["<h2>What was measured</h2>", *_facts(all_curves), "<h2>Commands</h2>", _commands(all_curves)]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p>Medians over the repetitions; bars, and ranges in brackets, are their least"
        f" and largest.</p>{''.join(parts)}</html>"
    )


def _table(selected: Sequence[Curve]) -> str:
    heads = "".join(f"<th>{name}</th>" for name in ("server", "concurrency", "runs", *(name for _, name in TABLE)))
    lines = []
    for curve in selected:
        columns = [curve.values(number) for number, _ in TABLE]
        for i, count in enumerate(curve.concurrency):
            cells = [curve.name, str(count), str(len(curve.rows[i])), *(str(column[i]) for column in columns)]
            lines.append("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in cells) + "</tr>")
    return f'<div class="scroll"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def _cell(text: str) -> str:
    """Returns a table cell in which a line may break only before a range."""
    value, bracket, spread = html.escape(text).partition(" (")
    return f"{value} <span>({spread}</span>" if bracket else value


def _facts(all_curves: Sequence[Curve]) -> Iterator[str]:
    for name in dict.fromkeys(curve.name for curve in all_curves):
        rows = [row for curve in all_curves if curve.name == name for repetitions in curve.rows for row in repetitions]
        times = [row["time"] for row in rows]
        facts = dict(rows[-1]["facts"]) | {"client": rows[-1]["client"], "measured": f"{min(times)} to {max(times)}"}
        items = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd>" for k, v in facts.items())
        yield f"<h3>{html.escape(name)}</h3><dl>{items}</dl>"


def _commands(all_curves: Sequence[Curve]) -> str:
    commands = [row["command"] for curve in all_curves for repetitions in curve.rows for row in repetitions]
    return f"<pre>{html.escape(chr(10).join(dict.fromkeys(commands)))}</pre>"


def print_pdf(page_path: Path, pdf: Path) -> None:
    """Prints the page with headless Chromium, which $CHROMIUM may name. Raises UserError."""
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        raise UserError("--pdf needs Chromium (Debian: apt install chromium); $CHROMIUM may name it")
    with tempfile.TemporaryDirectory() as profile:
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            f"--window-size={PDF_WINDOW[0]},{PDF_WINDOW[1]}",
            "--no-pdf-header-footer",
        ]
        words = [
            program,
            *flags,
            "--virtual-time-budget=10000",
            f"--print-to-pdf={pdf.resolve()}",
            page_path.resolve().as_uri(),
        ]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=PDF_SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"{program} printed no PDF within {PDF_SECONDS} s") from None
    if done.returncode or not pdf.exists():
        raise UserError(f"{program} printed no PDF: {done.stderr.strip()[-300:]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the charts and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sglang bench report",
        description="Charts of what `sglang bench sweep` measured; several files are compared.",
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--html", type=Path, help="the page; opens offline")
    parser.add_argument("--pdf", type=Path, help="the same, printed by Chromium")
    parser.add_argument("--title", default="Serving benchmark")
    args = parser.parse_args(argv)
    if args.html is None and args.pdf is None:
        parser.error("one of --html and --pdf is needed")
    try:
        text = page(args.results, args.title)
        with tempfile.TemporaryDirectory() as folder:
            path = args.html or Path(folder) / "report.html"
            path.write_text(text, encoding="utf-8")
            if args.pdf is not None:
                print_pdf(path, args.pdf)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
