"""What one tuning run is about, and how far it has come: kept beside the result until it is complete."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.errors import UserError
from sglang.srt.layers.moe.fused_moe_triton.config_format import Content, TilePair
from sglang.tuning.tile_files import to_entry, write_content


@dataclass(slots=True)
class TuningState:
    """`about` identifies the run: shape, GPU, Triton, the search space. `done`: tokens -> (tiles, seconds)."""

    path: Path  # of the result
    about: dict[str, Any]
    done: dict[int, tuple[TilePair, float]] = field(default_factory=dict)

    @property
    def partial(self) -> Path:
        return self.path.with_name(self.path.name + ".partial")

    def resume(self) -> None:
        """Take over what an earlier, interrupted run has done. Raises UserError if it was another run."""
        if not self.partial.exists():
            return
        try:
            kept = json.loads(self.partial.read_text())
            about, entries = kept["about"], kept["done"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.partial} cannot be resumed ({error}). Delete it, or run without --resume."
            ) from None
        differing = sorted(key for key in {*about, *self.about} if about.get(key) != self.about.get(key))
        if differing:
            changes = ", ".join(f"{key} {about.get(key)!r} then, {self.about.get(key)!r} now" for key in differing)
            raise UserError(f"{self.partial} is of another run: {changes}. Delete it, or run without --resume.")
        for tokens, entry in entries.items():
            pair = TilePair(entry["gate_up"], entry["down"])
            self.done[int(tokens)] = (pair, entry["seconds"])

    def add(self, tokens: int, pair: TilePair, seconds: float) -> None:
        """Remembered at once, so that an interruption costs the batch sizes in progress only."""
        self.done[tokens] = (pair, seconds)
        done = {t: {"gate_up": p.gate_up, "down": p.down, "seconds": s} for t, (p, s) in sorted(self.done.items())}
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        replacement = self.partial.with_suffix(".tmp")
        replacement.write_text(json.dumps({"about": self.about, "done": done}, indent=1))
        replacement.replace(self.partial)

    def finish(self) -> None:
        """Write the result in place."""
        microseconds = {str(tokens): round(seconds * 1e6, 2) for tokens, (_, seconds) in sorted(self.done.items())}
        about = {"source": "measured", **self.about, "microseconds": microseconds}
        write_content(self.path, Content(about, {tokens: pair for tokens, (pair, _) in self.done.items()}))
        self.partial.unlink(missing_ok=True)

    def lines(self) -> list[str]:
        """A short table of what was found."""
        rows = [f"{'tokens':>6}  {'us':>9}  tiles"]
        for tokens, (pair, seconds) in sorted(self.done.items()):
            rows.append(f"{tokens:>6}  {seconds * 1e6:>9.1f}  {json.dumps(to_entry(pair))}")
        return rows
