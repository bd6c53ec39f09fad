"""The corpus of raw connections, by what is wrong with them."""

from __future__ import annotations

import random

from fuzz.raw_http import RawCase, chunked, generate_body, request

OK, BAD, ANY_REFUSAL = (200,), (400,), (400, 403, 404, 405, 408, 411, 413, 414, 415, 422, 431)
NOTHING = (0,)
BODY = generate_body()
STREAM = generate_body(stream=True, sampling_params={"max_new_tokens": 200, "ignore_eos": True})
WHOLE = generate_body(sampling_params={"max_new_tokens": 200, "ignore_eos": True})
HEAD = request(BODY)[: -len(BODY)]


def no_http() -> list[RawCase]:
    rng = random.Random(1)
    noise = [RawCase(f"noise {i}", [rng.randbytes(rng.choice([1, 20, 3000])) + b"\r\n\r\n"], [BAD]) for i in range(10)]
    lines: dict[str, bytes] = {
        "empty line": b"\r\n\r\n",
        "no version": b"GET /health\r\n\r\n",
        "no target": b"GET HTTP/1.1\r\n\r\n",
        "version 9": b"GET /health HTTP/9.9\r\n\r\n",
        "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200) + b"\r\n\r\n",
        "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "an unknown method": b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
        "spaces": b"GET   /health   HTTP/1.1\r\nHost: x\r\n\r\n",
        "NUL in the target": b"GET /he\0alth HTTP/1.1\r\nHost: x\r\n\r\n",
        "line feeds only": b"GET /health HTTP/1.1\nHost: x\n\n",
        "a websocket": b"GET /generate HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        "an unknown upgrade": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
        "TRACE": b"TRACE /health HTTP/1.1\r\nHost: x\r\n\r\n",
    }
    return noise + [RawCase(name, [line], [OK + ANY_REFUSAL + NOTHING], "half-close") for name, line in lines.items()]


def targets() -> list[RawCase]:
    paths: dict[str, bytes] = {
        "long": b"/" + b"x" * 30_000,
        "very long": b"/" + b"x" * 1_000_000,
        "many segments": b"/v1" * 2_000,
        "long query": b"/health?" + b"a=b&" * 7_000,
        "parents": b"/../../../../etc/passwd",
        "encoded parents": b"/%2e%2e/%2e%2e/etc/passwd",
        "broken escapes": b"/v1/models/%zz%f",
        "encoded NUL": b"/v1/models/%00",
        "invalid UTF-8": b"/v1/models/%ff%fe%c0%80",
        "raw bytes": b"/v1/models/\xff\xfe",
        "surrogates": b"/v1/models/%ed%a0%80",
        "with a host": b"http://example.org/health",
        "asterisk": b"*",
        "line breaks": b"/v1/models/a%0d%0aSet-Cookie:%20x=1",
        "no slash": b"health",
        "fragment": b"/health#x",
        "unknown model": b"/v1/models/" + b"%F0%9F%98%80" * 300,
    }
    return [
        RawCase(f"target: {name}", [request(target=path, method=b"GET")], [OK + ANY_REFUSAL])
        for name, path in paths.items()
    ]


def headers() -> list[RawCase]:
    def case(name: str, *lines: bytes, accepted: bool = True) -> RawCase:
        return RawCase(f"header: {name}", [request(BODY, lines)], [OK + ANY_REFUSAL if accepted else ANY_REFUSAL])

    return [
        case("30 kB", b"X-A: " + b"a" * 30_000),
        case("1 MB", b"X-A: " + b"a" * 1_000_000),
        case("10,000 lines", *(b"X-%d: a" % i for i in range(10_000))),
        case("the same 5,000 times", *[b"X-A: a"] * 5_000),
        case("a name of 60 kB", b"X" * 60_000 + b": a"),
        case("no name", b": a"),
        case("no colon", b"nothing"),
        case("space before the colon", b"X-A : a"),
        case("folded", b"X-A: a\r\n b"),
        case("NUL", b"X-A: a\0b"),
        case("Latin-1", b"X-A: \xe4\xf6\xff"),
        case("invalid UTF-8 key", b"Authorization: Bearer \xff\xfe\xc0"),
        case("name in UTF-8", "Ä: b".encode()),
        case("no content type", b"Content-Type:"),
        case("content type of bytes", b"Content-Type: \xff\xfe/\x80"),
        case("two content types", b"Content-Type: text/plain"),
        case("unknown charset", b"Content-Type: application/json; charset=klingon"),
        case("no encoding that we read", b"Content-Encoding: gzip"),
        case("unknown expectation", b"Expect: a miracle"),
        case("two hosts", b"Host: other", accepted=False),
        case("a huge range", b"Range: bytes=0-99999999999999999999,5-1"),
        case("a long origin", b"Origin: https://" + b"a" * 20_000),
        case("conditions", b"If-None-Match: *", b"If-Modified-Since: never"),
    ]


def origins() -> list[RawCase]:
    """A server without a key answers pages of this machine only, whatever they ask."""

    def case(origin: bytes, status: int, method: bytes = b"POST") -> RawCase:
        lines = [b"Origin: " + origin, b"Access-Control-Request-Method: POST"]
        target, body = (b"/generate", BODY) if method == b"POST" else (b"/v1/models", b"")
        if method == b"POST":
            return RawCase(f"origin: {origin[:40]!r}", [request(body, lines, target=target)], [(status,)])
        name = f"origin: {method.decode()} of {origin[:40]!r}"
        return RawCase(name, [request(headers=lines, target=target, method=method, length=None)], [(status,)])

    foreign = [b"https://evil.example", b"null", b"http://localhost.evil.example", b"http://[::1", b"\xff", b"x" * 9000]
    local = [b"http://localhost:3000", b"https://127.0.0.1", b"http://[::1]:80"]
    methods = (b"POST", b"GET", b"OPTIONS")
    return [
        *(case(origin, 403, method) for origin in foreign for method in methods),
        *(case(origin, 200, method) for origin in local for method in methods),
        RawCase(
            "origins: two", [request(BODY, [b"Origin: http://localhost", b"Origin: https://evil.example"])], [(403,)]
        ),
    ]


def lengths() -> list[RawCase]:
    def case(name: str, length: bytes | None, statuses: tuple[int, ...] = ANY_REFUSAL, *more: bytes) -> RawCase:
        return RawCase(f"length: {name}", [request(BODY, more, length=length)], [statuses], "half-close")

    return [
        case("negative", b"-1"),
        case("not a number", b"many"),
        case("a sum", b"10+10"),
        case("hexadecimal", b"0x10"),
        case("with a sign", b"+%d" % len(BODY), OK + ANY_REFUSAL),
        case("of digits that are not ASCII", "٣".encode()),
        case("2^64", str(1 << 64).encode()),
        case("of 5,000 digits", b"9" * 5_000),
        case("1 TB", str(1 << 40).encode()),
        case("over the limit", str((64 << 20) + 1).encode(), (413,)),
        case("twice, the same", b"%d" % len(BODY), OK + ANY_REFUSAL, b"Content-Length: %d" % len(BODY)),
        case("twice, different", b"5", ANY_REFUSAL, b"Content-Length: %d" % len(BODY)),
        case("a list", b"%d, %d" % (len(BODY), len(BODY)), OK + ANY_REFUSAL),
        case("too short", b"7", ANY_REFUSAL),
        case("zero", b"0"),
        case("missing", None),
        case("and chunked", b"%d" % len(BODY), ANY_REFUSAL, b"Transfer-Encoding: chunked"),
    ]


def truncated() -> list[RawCase]:
    """The client goes before its request is complete: there is nobody to answer."""
    cuts = [1, 10, len(HEAD) - 1, len(HEAD), len(HEAD) + 1, len(HEAD) + len(BODY) - 1]
    cases = []
    for ending in ("half-close", "close", "reset"):
        for cut in cuts:
            statuses = [NOTHING] if ending == "half-close" else []
            cases.append(RawCase(f"cut at {cut}, {ending}", [request(BODY)[:cut]], statuses, ending))
        large = request(b'{"text": "' + b"a" * 1_000_000, length=b"60000000")
        cases.append(RawCase(f"1 of 60 MB, {ending}", [large], [], "close" if ending == "half-close" else ending))
        half_chunk = chunked(BODY, end=b"ff\r\nhalf")
        cases.append(
            RawCase(f"half a chunk, {ending}", [half_chunk], [], "close" if ending == "half-close" else ending)
        )
    return cases


def chunks() -> list[RawCase]:
    head = request(headers=[b"Transfer-Encoding: chunked"], length=None)

    def broken(name: str, body: bytes, statuses: tuple[int, ...] = ANY_REFUSAL) -> RawCase:
        return RawCase(f"chunks: {name}", [head + body], [statuses])

    split = [BODY[i : i + 1] for i in range(len(BODY))]
    return [
        RawCase("chunks: one", [chunked(BODY)], [OK]),
        RawCase("chunks: a byte each", [chunked(*split)], [OK]),
        RawCase("chunks: none", [chunked()], [BAD]),
        RawCase("chunks: with a trailer", [chunked(BODY, end=b"0\r\nX-A: b\r\n\r\n")], [OK + BAD]),
        RawCase(
            "chunks: a trailer of 1 MB",
            [chunked(BODY, end=b"0\r\nX-A: " + b"b" * 1_000_000 + b"\r\n\r\n")],
            [OK + ANY_REFUSAL],
        ),
        RawCase("chunks: 40,000 of one byte", [chunked(*[b" "] * 40_000, BODY)], [OK]),
        RawCase("chunks: 66 MB", [chunked(*[b" " * (1 << 20)] * 66)], [(413,)]),
        broken("size is no number", b"zz\r\n" + BODY + b"\r\n0\r\n\r\n"),
        broken("negative size", b"-5\r\n" + BODY + b"\r\n0\r\n\r\n"),
        broken("size of 2^64", b"1" + b"0" * 16 + b"\r\n" + BODY),
        broken("size of 1,000 digits", b"f" * 1_000 + b"\r\n" + BODY),
        broken("size too small", b"3\r\n" + BODY + b"\r\n0\r\n\r\n"),
        broken("no size", BODY + b"\r\n0\r\n\r\n"),
        broken(
            "an extension of 100 kB",
            b"%x;a=" % len(BODY) + b"b" * 100_000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
            OK + ANY_REFUSAL,
        ),
        RawCase(
            "an unknown transfer encoding",
            [request(BODY, [b"Transfer-Encoding: cow"], length=None)],
            [OK + ANY_REFUSAL],
            "half-close",
        ),
        RawCase(
            "chunked twice",
            [request(BODY, [b"Transfer-Encoding: chunked, chunked"], length=None)],
            [ANY_REFUSAL],
            "half-close",
        ),
    ]


def bodies() -> list[RawCase]:
    def case(name: str, body: bytes, statuses: tuple[int, ...] = BAD) -> RawCase:
        return RawCase(f"body: {name}", [request(body)], [statuses])

    return [
        case("invalid UTF-8", b'{"text": "\xff\xfe\x80"}'),
        case("overlong UTF-8", b'{"text": "\xc0\xaf"}'),
        case("UTF-8 surrogates", b'{"text": "\xed\xa0\x80"}'),
        case("UTF-16", '{"text": "a"}'.encode("utf-16")),
        case("a byte order mark", b"\xef\xbb\xbf" + BODY, OK + BAD),
        case("NUL", b"\0" * 1000),
        case("two objects", BODY + BODY),
        case("a lone surrogate", b'{"text": "\\ud800", "sampling_params": {"max_new_tokens": 1}}', OK + BAD),
        case("NUL in a string", b'{"text": "a\\u0000b", "sampling_params": {"max_new_tokens": 1}}', OK),
        case(
            "a key many times", b"{" + b'"text": "a", ' * 5_000 + b'"sampling_params": {"max_new_tokens": 1}}', OK + BAD
        ),
        case("many keys", b"{" + b",".join(b'"k%d": 1' % i for i in range(50_000)) + b"}"),
        case("a key of 1 MB", b'{"' + b"k" * 1_000_000 + b'": 1}'),
        case("nested lists", b'{"text": ' + b"[" * 200_000 + b"}"),
        case("nested objects", b'{"text": ' + b'{"a":' * 200_000),
        case("a number of 1,000,000 digits", b'{"text": "a", "logprob_start_len": ' + b"9" * 1_000_000 + b"}"),
        case("an exponent of 20 digits", b'{"text": "a", "sampling_params": {"temperature": 1e' + b"9" * 20 + b"}}"),
        case("an unclosed string of 5 MB", b'{"text": "' + b"a" * 5_000_000),
        case("white space of 5 MB", b" " * 5_000_000),
    ]


def pipelines() -> list[RawCase]:
    health = request(target=b"/health", method=b"GET", length=None)
    return [
        RawCase("20 at once", [health * 20], [OK] * 20),
        RawCase("20 generations at once", [request(BODY) * 20], [OK] * 20),
        RawCase("good, bad, good", [health, b"nonsense\r\n\r\n", health], [OK + BAD, BAD + NOTHING]),
        RawCase("good, bad body, good", [health + request(b"{") + health], [OK, BAD, OK]),
        RawCase("a stream and one more", [request(STREAM) + health], [OK, OK]),
        RawCase("1,000 and gone", [health * 1_000], [], "reset"),
        RawCase("20 generations and gone", [request(WHOLE) * 20], [], "reset"),
        RawCase("20 streams and gone", [request(STREAM) * 20], [], "close"),
        RawCase("after a body that is too long", [request(length=b"99999999999") + health], [(413,)]),
        RawCase("a request in the body of another", [request(health) + health], [BAD, OK]),
    ]


def slow() -> list[RawCase]:
    whole = request(BODY)
    bytewise: list[bytes | float] = []
    for i in range(40):
        bytewise += [whole[i : i + 1], 0.02]
    expecting = request(BODY, [b"Expect: 100-continue"])
    expecting_head, expecting_body = expecting[: -len(BODY)], expecting[-len(BODY) :]
    return [
        RawCase("a byte at a time", [*bytewise, whole[40:]], [OK]),
        RawCase("a pause in the headers", [whole[:30], 1.5, whole[30:]], [OK]),
        RawCase("a pause before the body", [HEAD, 1.5, BODY], [OK]),
        RawCase("a pause in the body", [whole[:-5], 1.5, whole[-5:]], [OK]),
        RawCase("expecting to be asked", [expecting_head, 0.5, expecting_body], [(100,), OK]),
        RawCase("expecting, and gone", [expecting_head, 0.3], [], "close"),
        RawCase("a stream that is not read", [request(STREAM), 1.5], [], "close"),
        *(RawCase(f"connected only, {i}", [1.0], [], "close") for i in range(30)),
        *(RawCase(f"headers never end, {i}", [request(BODY, [b"X-A: b"])[:-60], 1.0], [], "reset") for i in range(30)),
    ]


def half_closed() -> list[RawCase]:
    """The client has sent all and still reads, or has left, which looks the same at first."""
    return [
        RawCase("a whole request", [request(BODY)], [OK], "half-close"),
        RawCase("a whole answer", [request(WHOLE)], [OK], "half-close"),
        RawCase("a whole stream", [request(STREAM)], [OK], "half-close"),
        RawCase("three requests", [request(BODY) * 3], [OK] * 3, "half-close"),
        RawCase("health", [request(target=b"/health", method=b"GET", length=None)], [OK], "half-close"),
        RawCase("left before the answer", [request(WHOLE)], [], "close"),
        RawCase("reset before the answer", [request(WHOLE)], [], "reset"),
        RawCase("left in the stream", [request(STREAM), 0.2], [], "close"),
        RawCase("reset in the stream", [request(STREAM), 0.2], [], "reset"),
        *(RawCase(f"reset at once, {i}", [request(WHOLE)], [], "reset") for i in range(20)),
    ]


GROUPS = {
    group.__name__: group
    for group in (no_http, targets, headers, origins, lengths, truncated, chunks, bodies, pipelines, slow, half_closed)
}
