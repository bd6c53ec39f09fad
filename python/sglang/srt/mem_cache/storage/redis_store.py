"""Store in Redis or Valkey, by redis-py: an example of a custom store, and one that several machines can share.

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"module_path": "sglang.srt.mem_cache.storage.redis_store",
        "class_name": "RedisStore", "url": "redis://10.0.0.1:6379/0"}'

Needs `pip install 'sm120-sglang[redis]'`. The server's `maxmemory` and `maxmemory-policy allkeys-lru` decide how much
is kept and what is evicted; without a limit there the store grows as long as prefixes are written, unless `ttl` makes
unused ones expire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.configs.storage_options import FLAG, read_seconds, read_timeout, refuse_unknown
from sglang.srt.errors import UserError

DEFAULT_PREFIX = "sglang:kv:"
MAX_COMMANDS = 512
"""Commands of one pipeline; the Redis server answers other clients between two pipelines."""
MAX_ENTRY_BYTES = 512 << 20
"""Redis's own limit of a value."""


class RedisStore:
    """Prefix store in Redis. Implements PrefixStore."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Options: url (redis://, rediss:// or unix://, with user, password and database); prefix of all keys; ttl in
        seconds after the last use; timeout in seconds of a call; key, a secret of the servers that share entries, where
        others may write them. Raises UserError, also if no server answers."""
        refuse_unknown(options, ("url", "prefix", "ttl", "timeout", "key"), "RedisStore")
        self.prefix = str(options.get("prefix", DEFAULT_PREFIX))
        self.key = str(options.get("key", "")).encode()
        ttl = read_seconds(options, "ttl", 0.0)
        self.ttl = max(1, round(ttl)) if ttl else None
        self._client = _connect(options.get("url"), read_timeout(options))

    def contains(self, names: Sequence[str]) -> list[bool]:
        """Returns which entries exist. Touches them from the last to the first, so that the first ones count as used
        last."""
        there: list[bool] = []
        backwards = list(names)[::-1]
        for first in range(0, len(backwards), MAX_COMMANDS):
            pipeline = self._client.pipeline(transaction=False)
            for name in backwards[first : first + MAX_COMMANDS]:
                if self.ttl is None:
                    pipeline.touch(self.prefix + name)
                else:
                    pipeline.expire(self.prefix + name, self.ttl)
            there += map(bool, pipeline.execute())
        return there[::-1]

    def read(self, name: str) -> bytes | None:
        data: bytes | None = self._client.get(self.prefix + name)
        return data

    def write(self, name: str, data: bytearray) -> None:
        """Writes an entry. Raises ValueError if it is larger than Redis allows, and the client's errors."""
        if len(data) > MAX_ENTRY_BYTES:
            raise ValueError(f"an entry of {len(data):,} bytes: Redis holds values of {MAX_ENTRY_BYTES:,} at most")
        self._client.set(self.prefix + name, memoryview(data), ex=self.ttl)

    def delete(self, name: str) -> None:
        self._client.delete(self.prefix + name)


def _connect(url: Any, timeout: float) -> Any:
    try:
        import redis
    except ImportError:
        raise UserError("RedisStore needs redis-py: pip install 'sm120-sglang[redis]'.") from None
    if not isinstance(url, str):
        raise UserError(f'{FLAG}: RedisStore needs {{"url": "redis://HOST:6379/0"}}.')
    try:
        client = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
    except ValueError as error:
        raise UserError(f"{FLAG}: the url of RedisStore cannot be used: {error}.") from None
    try:
        client.ping()
    except redis.RedisError as error:  # the url may hold a password: it is not named
        raise UserError(
            f"RedisStore: the server does not answer: {error}. Start it, correct the url, or remove the flag."
        ) from None
    return client
