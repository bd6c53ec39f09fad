"""A server of several models behind one port: each request goes to the model that it names, which is woken for it.

Every model has an application, an engine and a state of its own, as if it were served alone. In front of them are one
check of keys and bodies, the choice of the model, and routes that say which models there are.
"""

from __future__ import annotations

import logging
import socket
from asyncio import to_thread
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.http_app import create_api
from sglang.srt.entrypoints.http_errors import ApiError, error_response, json_response
from sglang.srt.entrypoints.http_middleware import HeadGate, RequestGate, TraceHeaders, with_sessions
from sglang.srt.entrypoints.http_origins import refuse_other_pages, with_origins_checked
from sglang.srt.entrypoints.http_request_id import RequestIds
from sglang.srt.entrypoints.http_server import Server, run_server
from sglang.srt.entrypoints.http_state import ServerState
from sglang.srt.entrypoints.model_switch import AWAKE, FAILED, ModelSwitch, Switched
from sglang.srt.entrypoints.models_file import ModelsFile, NamedModel
from sglang.srt.entrypoints.ollama.serving_ollama import running, tags
from sglang.srt.entrypoints.openai.adapter_names import LATEST
from sglang.srt.entrypoints.openai.routes import adapter_cards, model_card
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.sleeper import WAIT
from sglang.srt.managers.launch import EngineHandle
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

SWITCHED = frozenset({"/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"})
"""Routes of a single model's sleep, which would contradict the switch."""
UPSTREAM, NAMED = "/upstream/", "sglang.model"
"""The beginning of paths that name a model, and where the scope has the name of the model afterwards."""
UNLOAD = "/api/models/unload"
TAGS = "/api/tags"
OLLAMA_LISTS = (TAGS, "/api/ps")
WITHOUT_WORK = frozenset({"/abort_request", "/flush_cache"})
"""Routes that a sleeping model answers as it is: nothing runs there, and its caches are empty."""
RESPONSES = "/v1/responses/"
LONG = 1 << 18
"""Bytes from which a body is not decoded on the event loop."""
DRAIN_LIMIT_S = 600.0
"""Seconds that requests without an open connection, such as responses in the background, get before a swap."""


class _Named(msgspec.Struct):
    """The part of a body that names the model."""

    model: Any = None


class ServedModel:
    """A model with its application."""

    def __init__(self, named: NamedModel) -> None:
        """Raises UserError."""
        self.named, self.state = named, ServerState(named.args, named.aliases)
        self.api = create_api(self.state)
        self.app = with_sessions(self.api, named.args)
        """Its application with the middleware that the model's own flags ask for."""
        self.handle: EngineHandle | None = None

    async def sleep(self) -> None:
        """Gives its memory back, with a copy of the weights in main memory."""
        assert self.handle is not None
        assert self.handle.manager.sleeper is not None
        await self.handle.manager.sleeper.sleep(None, True, WAIT, DRAIN_LIMIT_S)

    async def wake(self) -> None:
        """Takes its memory again."""
        assert self.handle is not None
        assert self.handle.manager.sleeper is not None
        await self.handle.manager.sleeper.wake()

    def has_work_for(self, scope: Scope) -> bool:
        """Returns whether a request may compute something, for which the model must be awake: not those of unknown
        routes, and of those that only look or end something."""
        if scope["method"] not in ("POST", "PUT") or scope["path"] in WITHOUT_WORK:
            return False
        return any(route.matches(scope)[0] is Match.FULL for route in self.api.routes)

    def of_ollama(self, path: str) -> list[dict[str, Any]]:
        """Returns its entries in a list of Ollama's API."""
        service = self.state.engine
        assert service is not None
        said = tags(service, self.api.state.created) if path == TAGS else running(service)
        entries: list[dict[str, Any]] = said["models"]
        return entries

    def cards(self, state: str) -> dict[str, dict[str, Any]]:
        """Returns its entry of /v1/models under "", and those of its adapters, which requests name behind its own name,
        under theirs; none before it has started."""
        if self.state.engine is None:
            return {}
        engine, created, name = self.state.engine, int(self.api.state.created), self.named.name
        model = model_card(engine, created) | {"state": state, "aliases": list(self.named.aliases)}
        of_adapters = {
            adapter: card | {"id": f"{name}:{adapter}", "display_name": f"{name}:{adapter}", "state": state}
            for adapter, card in adapter_cards(engine, created).items()
        }
        return {"": model, **of_adapters}


class SwitchingApp:
    """Passes each request to the application of its model."""

    def __init__(self, models: Sequence[ServedModel], switch: ModelSwitch) -> None:
        self._models = {each.named.name: each for each in models}
        self._names = {alias: each.named.name for each in models for alias in each.named.aliases}
        self._default, self._switch = models[0].named.name, switch
        self.ready = False
        """Whether all models have been started."""

    @property
    def names(self) -> list[str]:
        """Returns the names of all models and their aliases."""
        return [*self._models, *self._names]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        try:
            if not self.ready:
                raise ApiError(503, "the server is starting")
            if path == "/unload":
                refuse_other_pages(Request(scope))
            if (name := scope.get(NAMED)) is not None:
                await self._pass_on(self._named(name), scope, receive, send)
            elif (answer := await self._own_answer(scope["method"], path)) is not None:
                await answer(scope, receive, send)
            elif scope["method"] in ("POST", "PUT"):
                body = await _whole_body(receive)
                name = self._model_of(path, body) if len(body) < LONG else await to_thread(self._model_of, path, body)
                await self._pass_on(name, scope, _replayed(body, receive), send)
            else:
                await self._pass_on(self._model_of(path, b""), scope, receive, send)
        except ApiError as error:
            await error_response(path, error)(scope, receive, send)
        except RequestError as error:
            response = error_response(path, ApiError(error.status_code, error.message))
            if error.retry_after is not None:
                response.headers["retry-after"] = str(error.retry_after)
            await response(scope, receive, send)

    async def _pass_on(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._models[name]
        if scope["path"] in SWITCHED:
            raise ApiError(400, f"models sleep and wake by themselves here; {UNLOAD}/NAME puts one to sleep")
        if not model.has_work_for(scope) or model.state.unavailable() is not None:
            await model.app(scope, receive, send)
            return
        async with self._switch.use(name):
            await model.app(scope, receive, send)

    def _named(self, name: str) -> str:
        """Returns the name of a model, given that, an alias, or either with a colon and behind it an adapter, where the
        model takes adapters, or Ollama's `latest`. Raises ApiError 404."""
        base, _, adapter = name.rpartition(":")
        if (known := self._names.get(name, name)) in self._models:
            return known
        if adapter and (known := self._names.get(base, base)) in self._models:
            if adapter == LATEST or self._models[known].named.args.enable_lora:
                return known
        raise _unknown(name)

    def _model_of(self, path: str, body: bytes) -> str:
        """Returns the model of a request; the first one of the file where it names none."""
        if path.startswith(RESPONSES):
            stored = path.removeprefix(RESPONSES).partition("/")[0]
            return next((n for n, m in self._models.items() if m.state.responses.get(stored)), self._default)
        try:
            named = msgspec.json.decode(body, type=_Named).model if body else None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return self._default  # whose application says what is wrong
        return self._named(named) if isinstance(named, str) and named else self._default

    async def _own_answer(self, method: str, path: str) -> ASGIApp | None:
        """Returns the answer of a route about all models; None for others."""
        states = {name: each.state for name, each in self._switch.models.items()}
        if path in ("/health", "/ready", "/ping") and method in ("GET", "HEAD"):
            reasons = [why for each in self._models.values() if (why := each.state.unavailable()) is not None]
            return error_response(path, ApiError(503, reasons[0])) if len(reasons) == len(self._models) else _said({})
        if path == "/v1/models" and method == "GET":
            cards = [card for name, each in self._models.items() for card in each.cards(states[name]).values()]
            return _said({"object": "list", "data": cards})
        if path in OLLAMA_LISTS and method == "GET":
            listed = [
                entry
                for name, each in self._models.items()
                if each.state.engine is not None and (path == TAGS or states[name] == AWAKE)
                for entry in each.of_ollama(path)
            ]
            return _said({"models": listed})
        if path.startswith("/v1/models/") and method == "GET":
            asked = path.removeprefix("/v1/models/")
            name = self._named(asked)
            of_model = self._models[name].cards(states[name])
            adapter = "" if asked in self._names or asked in self._models else asked.rpartition(":")[2]
            card = of_model.get(adapter) or (of_model.get("") if adapter == LATEST else None)
            if card is None:
                raise _unknown(asked)
            return _said(card)
        if path == "/running" and method == "GET":
            return _said(
                {"running": [{"model": name, "state": state} for name, state in states.items() if state == AWAKE]}
            )
        if path in ("/unload", UNLOAD) or path.startswith(f"{UNLOAD}/"):
            allowed = ("POST", "GET") if path == "/unload" else ("POST",)
            if method not in allowed:
                raise ApiError(405, f"{method} is not allowed on {path}; it takes {' or '.join(allowed)}")
            name = path.removeprefix(UNLOAD).strip("/") if path.startswith(UNLOAD) else ""
            await self._switch.unload(self._named(name) if name else None)
            return _said({"msg": "ok"})
        return None


class UpstreamPaths:
    """Takes the model's name out of the paths of `/upstream/NAME/...`, before anything looks at them: keys are those of
    the route behind it."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """names: of all models, and their aliases. They may contain slashes."""
        self._app, self._names = app, sorted(names, key=len, reverse=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(UPSTREAM):
            name, path = self._split(scope["path"].removeprefix(UPSTREAM))
            scope = {**scope, NAMED: name, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)

    def _split(self, rest: str) -> tuple[str, str]:
        """Returns the name, with an adapter if one is behind it, and the path of the route."""
        known = next((name for name in self._names if rest.startswith(name) and rest[len(name) :][:1] in "/:"), "")
        behind, _, path = rest[len(known) :].partition("/")
        return known + behind, f"/{path}"


def _unknown(name: str) -> ApiError:
    text = f"The model '{name[:256]}' does not exist; /v1/models lists those that do"
    return ApiError(404, text, code="model_not_found", param="model")


def _said(content: dict[str, Any]) -> ASGIApp:
    return json_response(content)


async def _whole_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client has left")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that begins with a body which was read already."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class SeveralModelsServer(Server):
    """One run of a server of several models."""

    def __init__(self, file: ModelsFile, args: ServerArgs, listener: socket.socket) -> None:
        self._models = [ServedModel(each) for each in file.models]
        switched = [Switched(each.named.name, each, each.named.ttl_s) for each in self._models]
        self.switch = ModelSwitch(switched, file.max_awake, file.min_stay_s, file.max_waiting)
        self._switching = SwitchingApp(self._models, self.switch)
        super().__init__(args, listener)

    def _app(self) -> ASGIApp:
        args, app = self.args, self._switching
        gate = RequestGate(TraceHeaders(app) if args.enable_trace else app, args.api_key, args.admin_api_key)
        own_names = (args.host, socket.gethostname())
        named = UpstreamPaths(gate, self._switching.names)
        return RequestIds(HeadGate(with_origins_checked(named, args.api_key, args.allowed_origins or (), own_names)))

    def _states(self) -> Sequence[ServerState]:
        return [self.state, *(each.state for each in self._models)]

    async def _start(self) -> None:
        """Starts one model after the other; each sleeps before the next one starts, and the first wakes at the end."""
        for model in self._models:
            named = model.named
            logger.info("Starting the model %s", named.name)
            on_failure = partial(self._on_model_failure, model)
            model.handle = await self._start_engine(named.args, model.state, on_failure)
            if self._died.is_set():
                return
            await self._warm_up(named.args, model.handle)
            await model.sleep()
        async with self.switch.use(self._models[0].named.name):
            self._switching.ready = True
            self._say_ready()

    def _on_model_failure(self, model: ServedModel, handle: EngineHandle, replica: int, message: str) -> None:
        """Takes a model out whose processes have ended; the others serve on."""
        if handle.manager.lose_replica(replica, message):
            return
        model.state.failure = message
        self.switch.lost(model.named.name)
        if all(each.state == FAILED for each in self.switch.models.values()):
            self._died.set()


def launch_several(file: ModelsFile) -> None:
    """Serves the models of a file until told to stop. Raises UserError, or SystemExit if all engines died."""
    run_server(file.models[0].args, partial(SeveralModelsServer, file))
