"""The names that users of a server see: of an upstream tree read from its source without importing it, and ours.

upstream_interface(tree)["flag"]      # {"--tp-size", ...}
upstream_interface(tree)["default"]   # {"--tp-size": "1", ...}
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Interface = dict[str, dict[str, str]]
"""Kind -> name -> value; kinds without values have empty ones. KINDS lists the kinds."""

KINDS: Mapping[str, str] = {
    "flag": "command-line flags",
    "default": "defaults of flags",
    "choice": "choices of flags",
    "endpoint": "HTTP endpoints",
    "environment": "environment variables",
    "architecture": "model architectures",
    "quantization": "quantization names",
    "metric": "metrics",
}

_METHODS = ("get", "post", "put", "delete", "patch", "head", "options", "websocket")
_READS_ENVIRONMENT = re.compile(r"""(?:getenv|environ(?:\.\w+)?|get_\w*env\w*)\s*[(\[]\s*["'](SGL(?:ANG)?_\w+)["']""")
_METRIC = re.compile(r"""["'](sglang:\w+)["']""")
_MOUNT = re.compile(r"""\bMount\(\s*["'](/\w+)["']""")
_PATH_PARAMETER = re.compile(r"{\w+(:path)?}")


class _Unknown(Exception):
    """The expression's value is not in the source."""


def upstream_interface(tree: Path) -> Interface:
    """The interface of the package `sglang/` in the directory `tree`."""
    srt = tree / "sglang" / "srt"
    flags, defaults, choices = _Flags(srt).read()
    found = {
        "flag": flags,
        "default": defaults,
        "choice": choices,
        "endpoint": _endpoints(srt),
        "environment": _environment(srt),
        "architecture": _architectures(srt),
        "quantization": _quantizations(srt),
        "metric": {_metric(name) for text in _texts(srt) for name in _METRIC.findall(text)},
    }
    return _interface(found)


def argument_defaults(tree: Path) -> dict[str, Any]:
    """Field of the server's arguments -> its default, of the package `sglang/` in `tree`, where the source says."""
    return _Flags(tree / "sglang" / "srt").field_defaults()


# --- upstream: flags --------------------------------------------------------------------------------------------------


class _Flags:
    """They come from `parser.add_argument("--x", ...)` or, newer, from fields `x: A[type, Arg(...)] = 1`."""

    def __init__(self, srt: Path) -> None:
        paths = [srt / "server_args.py", *sorted((srt / "arg_groups").rglob("*.py"))]
        self.modules = [ast.parse(path.read_text(encoding="utf-8-sig")) for path in paths if path.is_file()]
        self.constants: dict[str, ast.expr] = {}
        self.fields: dict[str, ast.AnnAssign] = {}
        for module in self.modules:
            for node in module.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.constants[node.targets[0].id] = node.value
                elif isinstance(node, ast.ClassDef) and _holds_arguments(node):
                    fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
                    self.fields |= {child.target.id: child for child in fields if isinstance(child.target, ast.Name)}

    def read(self) -> tuple[set[str], dict[str, str], set[str]]:
        """Flags, their defaults where the source says, and `--flag=choice` for each choice."""
        flags: set[str] = set()
        defaults: dict[str, str] = {}
        choices: set[str] = set()
        for names, default, allowed in (*self._declared(), *self._added()):
            flags |= set(names)
            try:
                defaults[names[0]] = _shown(self._value(default))
            except _Unknown:
                pass
            try:
                choices |= {f"{names[0]}={choice}" for choice in self._value(allowed) or ()}
            except _Unknown:
                pass
        return flags, defaults, choices

    def field_defaults(self) -> dict[str, Any]:
        """By the name of the field, also of those that are no flag."""
        found = {}
        for name, field in self.fields.items():
            try:
                found[name] = self._value(field.value)
            except _Unknown:
                pass
        return found

    def _declared(self) -> Iterator[tuple[list[str], ast.expr | None, ast.expr | None]]:
        for name, field in self.fields.items():
            if not (isinstance(field.annotation, ast.Subscript) and ast.unparse(field.annotation.value) in _ANNOTATED):
                continue
            assert isinstance(field.annotation.slice, ast.Tuple)
            kind, *extra = field.annotation.slice.elts
            call = next((e for e in extra if isinstance(e, ast.Call) and ast.unparse(e.func) == "Arg"), None)
            if call is None and not any(isinstance(e, (ast.Constant, ast.JoinedStr)) for e in extra):
                continue  # neither a help text nor an Arg: not a flag
            keywords = {k.arg: k.value for k in call.keywords} if call else {}
            if "no_cli" in keywords:
                continue
            cli_name = self._value(keywords["cli_name"]) if "cli_name" in keywords else "--" + name.replace("_", "-")
            aliases = self._value(keywords["aliases"]) if "aliases" in keywords else []
            aliases += _negation(cli_name, keywords.get("action"))
            yield [cli_name, *aliases], field.value, keywords.get("choices") or _literal_of(kind)

    def _added(self) -> Iterator[tuple[list[str], ast.expr | None, ast.expr | None]]:
        for module in self.modules:
            for call in ast.walk(module):
                if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument")):
                    continue
                names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                names = [name for name in names if name.startswith("--")]
                if not names:
                    continue
                keywords = {k.arg: k.value for k in call.keywords}
                action = keywords.get("action")
                names += _negation(names[0], action)
                default = keywords.get("default")
                if default is None and isinstance(action, ast.Constant) and action.value == "store_true":
                    default = ast.Constant(False)
                yield names, default, keywords.get("choices")

    def _value(self, node: ast.expr | None) -> Any:
        """The value of the expression; raises _Unknown."""
        match node:
            case None:
                raise _Unknown
            case ast.Constant(value):
                return value
            case ast.List(elts) | ast.Tuple(elts) | ast.Set(elts):
                return [
                    x for e in elts for x in (self._value(e.value) if isinstance(e, ast.Starred) else [self._value(e)])
                ]
            case ast.Dict(keys):
                return [self._value(key) for key in keys]
            case ast.BinOp(left, ast.Add(), right):
                return self._value(left) + self._value(right)
            case ast.BinOp(left, ast.Mult(), right):
                return self._value(left) * self._value(right)
            case ast.UnaryOp(ast.USub(), operand):
                return -self._value(operand)
            case ast.Call(ast.Name("list" | "sorted" | "tuple"), [inner]):
                return list(self._value(inner))
            case ast.Call(ast.Attribute(inner, "keys" | "copy"), []):
                return self._value(inner)
            case ast.Call(ast.Name("_declared_default"), [ast.Constant(str(name))]) if name in self.fields:
                return self._value(self.fields[name].value)
            case ast.Attribute(ast.Name("ServerArgs" | "cls"), name) if name in self.fields:
                return self._value(self.fields[name].value)
            case ast.Name(name) if name in self.constants:
                return self._value(self.constants[name])
        raise _Unknown


def _negation(name: str, action: ast.expr | None) -> list[str]:
    """argparse makes a second option of one that is on or off."""
    both = action is not None and ast.unparse(action).endswith("BooleanOptionalAction")
    return [name.replace("--", "--no-", 1)] if both else []


def _shown(value: Any) -> str:
    """300 and 300.0 are the same default."""
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else repr(value)


_ANNOTATED = ("A", "Annotated")


def _holds_arguments(node: ast.ClassDef) -> bool:
    return node.name == "ServerArgs" or any(
        isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "_NS_PATH" for child in node.body
    )


def _literal_of(annotation: ast.expr) -> ast.expr | None:
    """The values of `Literal[...]`, also inside `Optional[...]`."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            return node.slice if isinstance(node.slice, ast.Tuple) else ast.Tuple([node.slice], ast.Load())
    return None


# --- upstream: the rest -----------------------------------------------------------------------------------------------


def _texts(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*.py")):
        yield path.read_text(encoding="utf-8-sig")


def _endpoints(srt: Path) -> set[str]:
    """`GET /path`, from decorators of the API server and its routers; other servers of the package are left out."""
    found = {f"GET {path}" for text in _texts(srt / "utils") for path in _MOUNT.findall(text)}
    for path in sorted((srt / "entrypoints").rglob("*.py")):
        text = path.read_text(encoding="utf-8-sig")
        if "FastAPI(" in text and path.name != "http_server.py":
            continue
        for node in ast.walk(ast.parse(text)):
            for decorator in getattr(node, "decorator_list", []):
                found |= set(_routes(decorator))
    return {_endpoint(name) for name in found}


def _endpoint(name: str) -> str:
    """The endpoint without the names of its path parameters, which do not matter."""
    return _PATH_PARAMETER.sub("{}", name)


def _routes(decorator: ast.expr) -> Iterator[str]:
    match decorator:
        case ast.Call(ast.Attribute(ast.Name(), verb), [ast.Constant(str(route)), *_], keywords) if route[:1] == "/":
            if verb == "api_route":
                listed = next((k.value for k in keywords if k.arg == "methods"), None)
                yield from (f"{method} {route}" for method in (ast.literal_eval(listed) if listed else ["GET"]))
            elif verb in _METHODS:
                yield f"{verb.upper()} {route}"


def _environment(srt: Path) -> set[str]:
    found = {name for text in _texts(srt) for name in _READS_ENVIRONMENT.findall(text)}
    declared = srt / "environ.py"
    for node in ast.walk(ast.parse(declared.read_text(encoding="utf-8-sig") if declared.is_file() else "")):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and ast.unparse(node.value.func).startswith("Env"):
                found.add(target.id)
    return {name for name in found if name.startswith(("SGLANG_", "SGL_"))}


def _architectures(srt: Path) -> set[str]:
    found: set[str] = set()
    for text in _texts(srt / "models"):
        if "EntryClass" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                found |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    return found


def _quantizations(srt: Path) -> set[str]:
    """The names that `--quantization` takes and those that a checkpoint's config can have."""
    found = {choice.partition("=")[2] for choice in _Flags(srt).read()[2] if choice.startswith("--quantization=")}
    for node in ast.walk(ast.parse((srt / "layers" / "quantization" / "__init__.py").read_text(encoding="utf-8-sig"))):
        match node:
            case ast.Assign([ast.Name("BASE_QUANTIZATION_METHODS")], ast.Dict() as methods):
                pass
            case ast.AnnAssign(ast.Name("BASE_QUANTIZATION_METHODS"), value=ast.Dict() as methods):
                pass
            case ast.Call(ast.Attribute(ast.Name("BASE_QUANTIZATION_METHODS"), "update"), [ast.Dict() as methods]):
                pass
            case _:
                continue
        found |= {key.value for key in methods.keys if isinstance(key, ast.Constant)}
    return found


def _metric(name: str) -> str:
    """Without the suffix that counters get on the page."""
    return name.removesuffix("_total")


# --- ours -------------------------------------------------------------------------------------------------------------


def our_interface() -> tuple[Interface, Interface]:
    """Our names, and those that we only answer: old spellings, and names that are refused or ignored with a reason."""
    from sglang.srt import compat
    from sglang.srt.cli_args import flag
    from sglang.srt.entrypoints import http_native
    from sglang.srt.entrypoints.anthropic import routes as anthropic_routes
    from sglang.srt.entrypoints.openai import routes as openai_routes
    from sglang.srt.environ import IGNORED, KNOWN
    from sglang.srt.managers.front.metrics import Metrics
    from sglang.srt.plan.families import SERVED_ARCHITECTURES
    from sglang.srt.server_args import TABLE

    routers = (http_native.router, openai_routes.router, anthropic_routes.router)
    routes = [route for router in routers for route in router.routes]
    have: dict[str, Any] = {
        "flag": {*TABLE.names, "--config"},
        "default": {flag(name): _shown(field.default) for name, (_, field) in TABLE.fields.items()},
        "choice": {f"{flag(name)}={choice}" for name in TABLE.fields for choice in TABLE.spec(name).choices},
        "endpoint": {_endpoint(f"{method} {route.path}") for route in routes for method in route.methods},  # type: ignore[attr-defined]
        "environment": KNOWN,
        "architecture": SERVED_ARCHITECTURES,
        "quantization": TABLE.spec("quantization").choices,
        "metric": {_metric(family.name) for family in Metrics("any").collect()},
    }
    answer: dict[str, Any] = {
        "flag": [f"--{name}" for name in (*compat.RENAMED_FLAGS, *compat.NO_EFFECT, *compat.UNIMPLEMENTED)],
        "choice": [
            *(f"{flag(name)}={value}" for name, value in compat.VALUE_ALIASES),
            *(f"{flag(name)}={value}" for name, row in compat.TUNING_VALUES.items() for value in row.values),
            *(f"{flag(name)}={value}" for name in TABLE.fields for value in TABLE.spec(name).explained),
        ],
        "environment": IGNORED,
    }
    return _interface(have), _interface(answer)


def _interface(found: Mapping[str, Any]) -> Interface:
    return {kind: dict(names) if kind == "default" else dict.fromkeys(names, "") for kind, names in found.items()}
