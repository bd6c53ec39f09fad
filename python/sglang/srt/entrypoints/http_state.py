"""What the HTTP routes share: the engine, stored responses and sessions of a server."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.openai.built_in_templates import model_template
from sglang.srt.entrypoints.openai.chat_template import read_template_file
from sglang.srt.entrypoints.openai.serving import OpenAIService
from sglang.srt.entrypoints.openai.template_pool import TemplatePool, template_limits
from sglang.srt.entrypoints.output_formats import model_formats
from sglang.srt.entrypoints.responses.response_store import ResponseStore
from sglang.srt.managers.front.sessions import SessionStore
from sglang.srt.managers.front.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.managers.front.worker_threads import num_long_threads
from sglang.srt.server_args import ServerArgs


class ServerState:
    """State of one server. `engine` is None until `connect` has ended. Requests are refused while `unavailable` returns
    a reason."""

    def __init__(self, args: ServerArgs, aliases: Sequence[str] = ()) -> None:
        """Reads the --chat-template file. aliases: other names of the model. Raises UserError if that fails."""
        self.args, self._aliases = args, frozenset(aliases)
        self.engine: OpenAIService | None = None
        self.failure: str | None = None
        """Reason why the server is about to exit; None while it runs."""
        self.responses = ResponseStore()
        self.sessions = SessionStore()
        self._templates: TemplatePool | None = None
        self._template_source = None if args.chat_template is None else read_template_file(args.chat_template)

    @property
    def model_name(self) -> str:
        """Returns the model's name in the API."""
        return self.args.served_model_name or self.args.model_path

    def connect(self, manager: TokenizerManager) -> None:
        """Starts the processes that render chat templates, and sets `engine`. Blocks until they are ready; the engine's
        own processes may still be starting. Raises UserError for a broken chat template."""
        tokenizer = manager.tokenizer
        if manager.media is not None:
            self.sessions.media_files = manager.media.files
        source = model_template(self.args, tokenizer, manager.model_config.architecture, self._template_source)
        limits = template_limits(self.args, manager.model_config.context_len)
        template = self._templates = TemplatePool(source, limits, num_long_threads(self.args.dp_size))
        template.wait_ready()
        self.engine = OpenAIService(
            manager=manager,
            chat_template=template,
            formats=model_formats(self.args, manager, template),
            model_name=self.model_name,
            aliases=self._aliases,
            report_cached_tokens=self.args.enable_cache_report,
        )

    def close(self) -> None:
        """Ends the processes that render chat templates, if `connect` has started them."""
        if self._templates is not None:
            self._templates.close()

    def unavailable(self) -> str | None:
        """Returns why requests are refused now, or None."""
        if self.failure is not None:
            return self.failure
        if self.engine is None or self.engine.manager.status is ServerStatus.STARTING:
            return "the server is starting"
        if self.engine.manager.status is ServerStatus.UP:
            return None
        return self.engine.manager.status_message or "the server is shutting down"

    def require_engine(self) -> OpenAIService:
        """Returns the engine. Raises ApiError 503 while it cannot answer."""
        reason = self.unavailable()
        if reason is not None or self.engine is None:
            raise ApiError(503, reason or "the server is starting")
        return self.engine


def state_of(request: Request) -> ServerState:
    """Returns the state of the server that got a request."""
    state: ServerState = request.app.state.server
    return state


def engine_of(request: Request) -> OpenAIService:
    """Returns the engine of the server that got a request. Raises ApiError 503 while it cannot answer."""
    return state_of(request).require_engine()
