"""`sglang.Engine` with the embedded model: everything real, in processes of its own."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_servers import forked_children

import sglang
from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.errors import UserError
from sglang.srt.managers.front.generate_request import RequestError

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def engine() -> Iterator[sglang.Engine]:
    with forked_children():
        engine = sglang.Engine(model_path=DEFAULT_MODEL_PATH, max_total_tokens=8192, reasoning_parser="auto")
    with engine:
        yield engine


def unused(engine: sglang.Engine) -> bool:
    """Whether no request holds memory: all of it is free or in the prefix cache."""
    (state,) = engine.get_server_info()["internal_states"]
    memory = state["memory_usage"]
    return bool(memory["free"] + memory["cached"] == memory["total"])


def one(result: Any) -> dict[str, Any]:
    assert isinstance(result, dict)
    return result


def stream(engine: sglang.Engine, params: dict[str, Any]) -> list[dict[str, Any]]:
    parts = engine.generate(PROMPT, params, stream=True)
    assert isinstance(parts, Iterator)
    return list(parts)


def test_text_and_ids_agree(engine: sglang.Engine) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(PROMPT)
    by_text, by_ids = one(engine.generate(PROMPT, GREEDY)), one(engine.generate(input_ids=ids, sampling_params=GREEDY))
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["text"] == engine.tokenizer.decode(by_text["output_ids"])
    info = by_text["meta_info"]
    assert (info["prompt_tokens"], info["completion_tokens"]) == (len(ids), 12)
    assert info["finish_reason"] == {"type": "length", "length": 12}


def test_streams_add_up(engine: sglang.Engine) -> None:
    whole = one(engine.generate(PROMPT, GREEDY))
    parts = stream(engine, GREEDY)
    assert len(parts) > 1
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(parts))
    assert (parts[-1]["text"], parts[-1]["output_ids"]) == (whole["text"], whole["output_ids"])


def test_batches_and_samples(engine: sglang.Engine) -> None:
    prompts = [PROMPT, "Once upon a time", "1 2 3"]
    batch = engine.generate(prompts, GREEDY)
    assert isinstance(batch, list)
    assert [r["output_ids"] for r in batch] == [one(engine.generate(p, GREEDY))["output_ids"] for p in prompts]
    hot = {"temperature": 5.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8}  # a trained model is sure of its tokens
    samples = engine.generate(PROMPT * 20, {**hot, "n": 3, "sampling_seed": 1})
    assert isinstance(samples, list)
    assert len({tuple(s["output_ids"]) for s in samples}) == 3
    again = one(engine.generate(PROMPT * 20, {**hot, "sampling_seed": 2}))
    assert again["output_ids"] == samples[1]["output_ids"]


def test_stop_string(engine: sglang.Engine) -> None:
    free = one(engine.generate(PROMPT, GREEDY))["text"]
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    stopped = one(engine.generate(PROMPT, {**GREEDY, "stop": stop}))
    assert stopped["text"] == free[: free.index(stop)]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    streamed = stream(engine, {**GREEDY, "stop": stop})
    assert streamed[-1]["text"] == stopped["text"]
    assert all(stopped["text"].startswith(part["text"]) for part in streamed)
    kept = one(engine.generate(PROMPT, {**GREEDY, "stop": stop, "no_stop_trim": True}))
    assert kept["text"].startswith(free[: free.index(stop)] + stop)


def test_reasoning_that_is_required(engine: sglang.Engine) -> None:
    """A grammar begins behind the thoughts, which are counted."""
    prompt = "<|im_start|>user\nHow much is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    params = {"temperature": 0.0, "max_new_tokens": 60, "json_schema": '{"enum": ["five", "six"]}'}
    result = one(engine.generate(prompt, params, require_reasoning=True))
    thoughts, _, answer = result["text"].partition("</think>")
    assert thoughts and answer.strip() in ('"five"', '"six"') and 0 < result["meta_info"]["reasoning_tokens"] <= 31
    parts = engine.generate(prompt, params, require_reasoning=True, stream=True)
    assert isinstance(parts, Iterator) and list(parts)[-1]["text"] == result["text"]
    with pytest.raises(RequestError, match="structural_tag with a format"):
        engine.generate(prompt, {"structural_tag": "{}"}, require_reasoning=True)


def test_logprobs(engine: sglang.Engine) -> None:
    result = one(
        engine.generate(
            PROMPT, GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True
        )
    )
    info = result["meta_info"]
    assert [token for _, token, _ in info["output_token_logprobs"]] == result["output_ids"]
    assert "".join(text for _, _, text in info["input_token_logprobs"]) == PROMPT
    for (logprob, token, _), top in zip(info["output_token_logprobs"], info["output_top_logprobs"], strict=True):
        assert top[0][1] == token  # greedy
        assert top[0][0] == pytest.approx(logprob)
        assert top[0][0] >= top[1][0]


def test_abandoned_streams_free_their_memory(engine: sglang.Engine) -> None:
    for _ in range(3):
        parts = engine.generate(PROMPT, {"max_new_tokens": 2000, "ignore_eos": True}, stream=True)
        assert isinstance(parts, Iterator)
        next(parts)
        parts.close()  # type: ignore[attr-defined]
    engine.generate(PROMPT, GREEDY)
    assert unused(engine)


def test_abort(engine: sglang.Engine) -> None:
    results: list[Any] = []
    long = {"max_new_tokens": 3000, "ignore_eos": True}
    thread = threading.Thread(target=lambda: results.append(engine.generate(PROMPT, long, rid="long")))
    thread.start()
    while not engine._manager.num_unfinished:
        pass
    engine.abort_request("long")
    thread.join(300)
    assert one(results[0])["meta_info"]["finish_reason"]["type"] == "abort"
    assert unused(engine)


def test_refusals(engine: sglang.Engine) -> None:
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 0\."):
        engine.generate(PROMPT, {"top_p": 0})
    with pytest.raises(ValueError, match="context length of 4096 tokens"):
        engine.generate("word " * 5000, GREEDY)
    with pytest.raises(ValueError, match="either text or input_ids"):
        next(iter(engine.generate(stream=True)))
    assert one(engine.generate(PROMPT, GREEDY))["output_ids"]


def test_inside_a_running_loop(engine: sglang.Engine) -> None:
    async def main() -> tuple[Any, Any, list[Any]]:
        first, second = await asyncio.gather(
            engine.async_generate(PROMPT, GREEDY), engine.async_generate("Once upon a time", GREEDY)
        )
        parts = await engine.async_generate(PROMPT, GREEDY, stream=True)
        assert not isinstance(parts, dict | list)
        return first, second, [part async for part in parts]

    first, second, parts = asyncio.run(main())
    assert first["output_ids"] == parts[-1]["output_ids"] == one(engine.generate(PROMPT, GREEDY))["output_ids"]
    assert second["output_ids"] != first["output_ids"]


def test_information_and_cache(engine: sglang.Engine) -> None:
    engine.generate(PROMPT, GREEDY)
    assert one(engine.generate(PROMPT, GREEDY))["meta_info"]["cached_tokens"] > 0
    assert engine.flush_cache()
    assert one(engine.generate(PROMPT, GREEDY))["meta_info"]["cached_tokens"] == 0
    info = engine.get_server_info()
    assert info["model_path"] == DEFAULT_MODEL_PATH
    assert info["internal_states"][0]["memory_usage"]["total"] >= 8192


def test_a_plain_script(tmp_path: Path) -> None:
    """As users write it, without shutdown: it ends by itself, with its children, and prints nothing else."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sglang\n"
        "if __name__ == '__main__':\n"
        f"    engine = sglang.Engine(model_path={DEFAULT_MODEL_PATH!r})\n"
        "    out = engine.generate(['a', 'b'], {'max_new_tokens': 3, 'ignore_eos': True})\n"
        "    print([len(o['output_ids']) for o in out])\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[3, 3]\n"
    assert "Traceback" not in done.stderr
    assert "leaked" not in done.stderr


def test_a_start_that_fails_late_leaves_nothing_behind(tmp_path: Path) -> None:
    threads, children = set(threading.enumerate()), multiprocessing.active_children()
    flags: dict[str, Any] = {
        "speculative_algorithm": "NGRAM",
        "speculative_ngram_external_corpus_path": str(tmp_path / "missing.txt"),
    }
    with forked_children(), pytest.raises(UserError, match=r"missing\.txt"):
        sglang.Engine(model_path=DEFAULT_MODEL_PATH, max_total_tokens=8192, **flags)
    assert set(multiprocessing.active_children()) == set(children)
    assert not any(thread.name == "engine-loop" for thread in set(threading.enumerate()) - threads)


def test_flags_are_checked() -> None:
    with pytest.raises(UserError):
        sglang.Engine(model_path=DEFAULT_MODEL_PATH, no_such_flag=1)
    with pytest.raises(TypeError, match="not both"):
        sglang.Engine(server_args=object(), tp_size=1)  # type: ignore[arg-type]
