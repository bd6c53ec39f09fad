"""Rules by module names: which modules of a checkpoint are quantized, and how. No torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from sglang.srt.configs.quant_scheme import EXL3, SCHEMES, Scheme
from sglang.srt.configs.trellis import Trellis, Trellises, merged
from sglang.srt.errors import UserError


@dataclass(frozen=True, slots=True)
class ModuleQuant:
    """How the weight of one linear module is stored.

    storage: tensor names, dtypes and packing, a key of `layers/quantization/layout.py`; "mxfp4", "fp8_stacked"
        (`stored_form`) for experts in one tensor, or "online" for 16-bit weights that are quantized while they are
        loaded
    static_input: the checkpoint holds the scale (or the global factor) of activations
    zero_points: each group of int4 has a zero point of its own, instead of 8
    trellises: of EXL3, the form of each module's trellis
    """

    scheme: str
    storage: str
    static_input: bool = False
    zero_points: bool = False
    trellises: tuple[Trellis, ...] = ()

    @property
    def format(self) -> Scheme:
        """Returns the scheme of the module's weights."""
        return EXL3 if self.scheme == EXL3.name else SCHEMES[self.scheme]

    @property
    def alike(self) -> ModuleQuant:
        """Returns what products of modules have in common: trellises may differ."""
        return replace(self, trellises=()) if self.trellises else self


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: modules whose whole name matches one of `patterns` (regular expressions) are stored as `quant` (None: in
    16 bits), and so are those that `modules` names, including what is inside them."""

    patterns: tuple[str, ...]
    quant: ModuleQuant | None
    modules: frozenset[str] = frozenset()

    def covers(self, module: str) -> bool:
        """Returns whether the rule applies to the module of this name."""
        if self.modules and not self.modules.isdisjoint(_enclosing(module)):
            return True
        return bool(self.patterns) and _any_of(self.patterns).fullmatch(module) is not None


EVERY_MODULE = (".*",)


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """The quantization of a checkpoint. The first rule that matches decides; a module that no rule matches is not
    quantized. Norms, embeddings and routers never are: nobody looks them up."""

    method: str
    """Name of the method in the checkpoint, with the algorithm where the method does not say it ("modelopt NVFP4")."""
    source: str
    """File and key that state the quantization."""
    rules: tuple[Rule, ...]
    kv_cache: str | None = None
    """Dtype of the cache that the checkpoint was made for ("fp8_e4m3"), for which it may have scales, or its name for
    one that no server here has."""
    wide: frozenset[str] = frozenset()
    """Modules, as `without_decoder` names them, that are in 16 bits in the checkpoint whatever the rules say."""
    trellises: Trellises | None = field(default=None, hash=False)
    """Of EXL3, the forms of the modules."""
    _known: dict[str, ModuleQuant | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache of `of`: every layout looks the modules up again, and some checkpoints name hundreds of them."""

    def of(self, module: str) -> ModuleQuant | None:
        """Returns the quantization of the module with this name in the checkpoint
        ("model.layers.0.self_attn.q_proj")."""
        if module not in self._known:
            covering = (rule.quant for rule in self.rules if rule.covers(module))
            self._known[module] = None if self.stores_wide(module) else self._filled(module, next(covering, None))
        return self._known[module]

    def _filled(self, module: str, quant: ModuleQuant | None) -> ModuleQuant | None:
        """Returns the quantization with the module's trellis, if it is one."""
        if quant is None or self.trellises is None:
            return quant
        return replace(quant, trellises=(self.trellises.of(without_decoder(module)),))

    def stores_wide(self, module: str) -> bool:
        """Returns whether the checkpoint's tensors show the module, or one that contains it, in 16 bits."""
        return bool(self.wide) and not self.wide.isdisjoint(_enclosing(without_decoder(module)))

    def named(self, module: str) -> ModuleQuant | None:
        """Returns the quantization of a module such as the output head, to which a rule for all modules does not apply:
        most checkpoints leave it in 16 bits without saying so."""
        if self.stores_wide(module):
            return None
        covering = (rule.quant for rule in self.rules if rule.patterns != EVERY_MODULE and rule.covers(module))
        return self._filled(module, next(covering, None))

    def product_quant(self, modules: Sequence[str]) -> ModuleQuant | None:
        """Returns the quantization of a product of modules with one input (q, k and v; gate and up). None: 16 bits,
        also where they differ."""
        return _common([self.of(module) for module in modules])

    def fused_quant(self, modules: Sequence[str]) -> ModuleQuant | None:
        """Returns the quantization of modules that are always stored as one. Raises UserError when they differ."""
        quants = {module: self.of(module) for module in modules}
        if len({quant and quant.alike for quant in quants.values()}) > 1:
            said = ", ".join(
                f"{module} {quant.scheme if quant else 'not quantized'}" for module, quant in quants.items()
            )
            raise UserError(f"{self.source}: modules that are computed as one are quantized differently: {said}.")
        return _common(list(quants.values()))

    def describe(self) -> str:
        """Describes the quantization and its origin for people."""
        cache = f", {self.kv_cache} KV cache" if self.kv_cache else ""
        zeros = " with zero points" if any(rule.quant and rule.quant.zero_points for rule in self.rules) else ""
        schemes = ", ".join(sorted(self.schemes())) or "16 bits"
        return f"{self.method} ({schemes}{zeros}){cache} according to {self.source}"

    def schemes(self) -> frozenset[str]:
        """Returns the names of all schemes that some module may have."""
        return frozenset(rule.quant.scheme for rule in self.rules if rule.quant is not None)


def _common(quants: Sequence[ModuleQuant | None]) -> ModuleQuant | None:
    """Returns the quantization of several modules; None: in 16 bits, or they differ in more than their trellises."""
    known = [quant for quant in quants if quant is not None]
    if len(known) < len(quants) or len({quant.alike for quant in known}) > 1:
        return None
    return replace(known[0], trellises=merged([quant.trellises for quant in known])) if known[0].trellises else known[0]


_DECODER = re.compile(r"(?:(?:model|language_model)\.)*")


def without_decoder(module: str) -> str:
    """Returns the name without the decoder's prefix, which rules and tensors of a checkpoint may spell differently:
    "layers.0.mlp" of "model.language_model.layers.0.mlp"."""
    return _DECODER.sub("", module, count=1)


def exact_or_inside(name: str) -> str:
    """Returns a pattern for the module of this name and those inside it."""
    return rf"{re.escape(name.strip('.'))}(\..*)?"


def from_regex(pattern: str, source: str) -> str:
    """Returns a pattern that matches the beginning of a name, as checkpoints mean theirs. Raises UserError if `pattern`
    is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{source}: {pattern!r} is not a regular expression: {error}.") from None
    return f"(?:{pattern}).*"


def glob(pattern: str) -> str:
    """Returns a pattern in which `*` stands for any characters, dots included. What is inside a matching module
    matches, too."""
    return ".*".join(re.escape(piece) for piece in pattern.strip(".").split("*")) + r"(\..*)?"


def component(pattern: str, source: str) -> str:
    """Returns a pattern for whole dotted components anywhere in a name, with `*` within a component: "gate" matches in
    "mlp.gate", not in "mlp.gate_proj". A name with other special characters is a regular expression for the beginning
    of a name."""
    if re.search(r"[\\^$()\[\]{}|+?]", pattern):
        return from_regex(pattern, source)
    pieces = r"[^.]*".join(re.escape(piece) for piece in pattern.strip(".").split("*"))
    return rf"(?:.*\.)?{pieces}(\..*)?"


def _enclosing(module: str) -> Iterator[str]:
    """Yields the module's name and those of the modules around it: "a.b.c", "a.b", "a"."""
    while module:
        yield module
        module = module.rpartition(".")[0]


@functools.lru_cache(1024)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
