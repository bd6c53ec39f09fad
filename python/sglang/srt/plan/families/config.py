"""The keys of a config.json as a family reads them: typed, and recorded, so that no key is ignored unknowingly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.rope import RopeSpec, rope_spec
from sglang.srt.errors import UserError

if TYPE_CHECKING:
    from typing import Self


class Recorded(Mapping[str, Any]):
    """A mapping that records which keys are looked up. `read`: the names so far, shared with mappings made from it."""

    def __init__(self, values: Mapping[str, Any], read: set[str] | None = None) -> None:
        self._values, self.read = values, set() if read is None else read

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._values[key]

    def peek(self, key: str) -> Any:
        """Returns the value without recording that it was looked up."""
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def with_values(self, changes: Mapping[str, Any]) -> Recorded:
        """Returns a mapping with other values of some keys. These count as read here: they are the family's own."""
        return Recorded({**self._values, **changes}, self.read)


class Config(ConfigReader):
    """The keys of a language model.

    quantized: whether the checkpoint is
    problems: messages about what is described, so that a plan can be made of it, but not computed
    """

    def __init__(
        self, values: Mapping[str, Any], source: str, *, quantized: bool = False, problems: list[str] | None = None
    ) -> None:
        recorded = values if isinstance(values, Recorded) else Recorded(values)
        super().__init__(recorded, source)
        self.recorded, self.quantized = recorded, quantized
        self.problems = [] if problems is None else problems

    def with_values(self, changes: Mapping[str, Any]) -> Self:
        """Returns the config with other values of some keys."""
        values = self.recorded.with_values(changes)
        return type(self)(values, self.source, quantized=self.quantized, problems=self.problems)

    def usual(self, values: Mapping[str, Any]) -> Self:
        """Returns the config with values for those of the keys that it leaves out."""
        return self.with_values({key: value for key, value in values.items() if self.values.get(key) is None})

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Returns the config with the values of this family's own keys under the names that most families use for
        them: {name here: usual name}."""
        stated = {usual: self.values.get(name) for name, usual in names.items()}
        return self.with_values({key: value for key, value in stated.items() if value is not None})

    def only(self, key: str, *computed: object) -> None:
        """Notes a problem if `key` has another value than those which are computed; absent and null always are."""
        value = self.values.get(key)
        if value is not None and value not in computed:
            values = ", ".join(map(repr, computed))
            self.problem(f"{key} = {value!r} is not supported for {self.architecture}; supported: {values}.")

    def ignore(self, *keys: str) -> None:
        """Counts keys as read that change nothing in this family's models."""
        self.recorded.read.update(keys)

    def problem(self, what: str) -> None:
        """Notes what is described but not computed, once."""
        message = f"{self.source}: {what}"
        if message not in self.problems:
            self.problems.append(message)

    @property
    def architecture(self) -> str:
        """The first entry of "architectures", or "unknown"."""
        listed = self.default("architectures", list, [])
        return str(listed[0]) if listed else "unknown"

    @property
    def num_layers(self) -> int:
        return self.positive("num_hidden_layers")

    def by_layer(self, key: str, default: Any) -> list[Any]:
        """Returns a value for each layer. Further entries of the list belong to layers that only drafts use. Raises
        UserError if there are fewer."""
        values = self.default(key, list, [default] * self.num_layers)
        if len(values) < self.num_layers:
            raise UserError(f"{self.source}: {key!r} has {len(values)} entries for {self.num_layers} layers.")
        return values[: self.num_layers]

    def flags(self, key: str) -> list[bool]:
        """Returns whether the list of 0 and 1 under `key` has a 1 for each layer. Raises UserError."""
        values = self.by_layer(key, 0)
        if any(type(value) is not int or value not in (0, 1) for value in values):
            raise UserError(f"{self.source}: {key!r} must be a list of 0 and 1; got {values!r}.")
        return [value == 1 for value in values]

    def rope(self, head_dim: int, layer_type: str = "", **changes: Any) -> RopeSpec:
        """Returns the rotary embedding of heads of `head_dim`, for layers of `layer_type` where they differ.
        `changes`: keys with other values than the config's. A form that is not computed is noted as a problem."""
        values = self.recorded.with_values(changes) if changes else self.recorded
        try:
            return rope_spec(values, head_dim, layer_type)
        except UserError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return RopeSpec(head_dim, 0.0, 0)
