"""PUBLISHED API (implementation follows in minutes).

class ServerStatus(enum.Enum): STARTING, UP, UNHEALTHY, SHUTTING_DOWN

class TokenizerManager:
    args: ServerArgs; model_config: ModelConfig; tokenizer: Tokenizer | None   # srt/utils/hf_tokenizer.py; None with --skip-tokenizer-init
    status: ServerStatus                 # STARTING until mark_up() (the HTTP server calls it after its warm-up)
    status_message: str
    last_receive_time: float             # time.monotonic() of the last message from the engine
    scheduler_info: dict                 # SchedulerReady.info: what /server_info shows of the plan
    stats: SchedulerStats                # latest gauges
    metrics: Metrics | None              # .render() -> bytes (prometheus text); None without --enable-metrics

    def attach(self) -> None                                   # once, inside the running event loop
    async def submit(self, req: GenerateRequest) -> GenerationStream   # validates, tokenizes, sends; RequestError(message, status_code)
    def abort(self, rid: str) -> bool                           # public rid, all its samples; False: unknown
    def abort_all(self) -> None
    async def control(self, kind: str, args: dict | None = None, timeout: float = 60.0) -> ControlReply
    def mark_up(self) / mark_unhealthy(self, message)
    def begin_shutdown(self) -> None                            # new requests get RequestError 503
    async def drain(self, limit_s: float) -> bool               # True: nothing runs any more
    async def encode(self, text: str, add_special_tokens=True) -> list[int]
    num_unfinished: int
    def close(self) -> None

class Tokenizer:  (srt/utils/hf_tokenizer.py; no transformers/torch import unless .hf is touched or the format needs it)
    encode(text, add_special_tokens=True) -> list[int];  decode(ids, skip_special_tokens=True) -> str
    token_text(id) -> str; token_bytes(id) -> bytes
    vocab_size: int; eos_token_id: int | None; special_tokens: dict[str, str]  # bos_token, eos_token, pad_token, unk_token ...
    chat_template: str | dict[str, str] | None                  # render with jinja2 (importing transformers costs ~5 s with torch)
    hf                                                          # transformers tokenizer, loaded on first use (slow)

srt/managers/native_output.py: the /generate form
    async def native_results(tm, req) -> dict | list[dict]                      # stream=False
    async def native_stream(tm, req, incremental: bool) -> AsyncIterator[dict]  # the dicts carry "index" for batches or n > 1
"""
