from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.cli_args import Option, flag, parse_size
from sglang.srt.cli_parser import build_parser
from sglang.srt.compat import RENAMED_FLAGS
from sglang.srt.errors import UserError
from sglang.srt.kernels.attention_table import EXTEND_ATTENTION
from sglang.srt.kernels.tables import FP8_GEMM_BACKENDS, FUSED_MOE, LINEAR
from sglang.srt.server_args import TABLE, ServerArgs
from sglang.srt.upstream_interface import ACCEPTED, REFUSED


def cli(*words: str) -> ServerArgs:
    return ServerArgs.from_cli(["--model-path", "m", *words])


def test_defaults() -> None:
    args = cli()
    assert (args.host, args.port, args.tp_size, args.schedule_policy) == ("127.0.0.1", 30000, 1, "fcfs")
    assert args.max_prefill_tokens == 16384
    for planned in (
        "mem_fraction_static",
        "max_running_requests",
        "chunked_prefill_size",
        "page_size",
        "cuda_graph_bs",
    ):
        assert dataclasses.asdict(args)[planned] is None
    assert args.tokenizer_path == args.served_model_name == "m"
    assert args.random_seed is not None


def test_three_sources_agree(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "model-path: m\ntp-size: 2\nchunked_prefill_size: 8Ki\nenable-metrics: true\ncuda-graph-bs: [1, 2]\n"
        "random-seed: 3\njson-model-override-args: {rope_theta: 5}\nmem-fraction-static: 0.5\n"
    )
    from_file = ServerArgs.from_cli(["--config", str(config)])
    from_words = ServerArgs.from_cli(
        "--model m --tp 2 --chunked-prefill-size 8Ki --enable-metrics --cuda-graph-bs 1 2 --random-seed 3 "
        "--mem-fraction-static=0.5".split()
        + ["--json-model-override-args", '{"rope_theta": 5}']
    )
    from_python = ServerArgs.from_kwargs(
        model="m",
        tp=2,
        chunked_prefill_size=8192,
        enable_metrics=True,
        cuda_graph_bs=[1, 2],
        random_seed=3,
        mem_fraction_static=0.5,
        json_model_override_args={"rope_theta": 5},
    )
    assert from_file == from_words == from_python
    assert from_python.model_overrides() == {"rope_theta": 5}


def test_other_names_of_values_in_python() -> None:
    """Trainers make arguments themselves, and check them later."""
    args = ServerArgs(model_path="m", dtype="half", load_balance_method="follow_bootstrap_room")
    args.check()
    assert (args.dtype, args.load_balance_method) == ("float16", "auto")
    assert dataclasses.replace(args, dtype="bf16").dtype == "bfloat16"


def test_command_line_beats_file(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model-path: m\nport: 1111\ntp: 4\n")
    args = ServerArgs.from_cli(["--config", str(config), "--port", "2222"])
    assert (args.port, args.tp_size) == (2222, 4)


def test_shared_experts_fusion_can_be_switched_off() -> None:
    assert not ServerArgs.from_cli(["--model", "m"]).disable_shared_experts_fusion
    assert ServerArgs.from_cli(["--model", "m", "--disable-shared-experts-fusion"]).disable_shared_experts_fusion


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "must hold a mapping"),
        ("a: [", "not valid YAML"),
        ("model: m\nnot-a-flag: 1\n", "Unknown option --not-a-flag"),
        ("model: m\nport: x\n", "--port: expected an integer"),
        ("model: m\nmodel-path: n\n", "a second time"),
        ("model: m\nenable-metrics: 1\n", "expected true or false"),
    ],
)
def test_bad_config_files(tmp_path: Path, content: str, message: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        ServerArgs.from_cli(["--config", str(config)])
    assert str(config) in str(caught.value)


def test_missing_config_file() -> None:
    with pytest.raises(UserError, match=r"no\.yaml: No such file"):
        ServerArgs.from_cli(["--config", "/no/such/no.yaml"])


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--tp 4", "tp_size", 4),
        ("--tensor-parallel-size 4", "tp_size", 4),
        ("--tensor-par 4", "tp_size", 4),
        ("--mem-fraction 0.8", "mem_fraction_static", 0.8),
        ("--chunked-prefill -1", "chunked_prefill_size", -1),
        ("--chunked-prefill-size=16Ki", "chunked_prefill_size", 16384),
        ("--max-total-tokens 1.5M", "max_total_tokens", 1_500_000),
        ("--context-len 32k", "context_length", 32000),
        ("--cuda-graph-max-bs 8", "cuda_graph_max_bs", 8),
        ("--cuda-graph-max 8", "cuda_graph_max_bs", 8),
        ("--cuda-graph-bs 1 2 4", "cuda_graph_bs", [1, 2, 4]),
        ("--dtype half", "dtype", "float16"),
        ("--kv-cache-dtype bfloat16", "kv_cache_dtype", "bf16"),
        ("--disable-radix", "disable_radix_cache", True),
    ],
)
def test_spellings(words: str, field: str, value: Any) -> None:
    assert getattr(cli(*words.split()), field) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max 3", "--max is ambiguous: it could be .*--max-queued-requests.*--max-running-requests"),
        ("--page-sise 3", "Unknown option --page-sise. Did you mean --page-size"),
        ("--page-size", "--page-size: expected a value"),
        ("--page-size --port 1", "--page-size: expected a value"),
        ("--cuda-graph-bs", "--cuda-graph-bs: expected values"),
        ("--enable-metrics=true", "--enable-metrics takes no value; got 'true'"),
        ("--enable-metrics true", "Unrecognized arguments: true"),
        ("--config", "--config: expected the name of a file"),
        ("--page-size 0", "--page-size: must be at least 1; got '0'"),
        ("--page-size 1.5", "--page-size: expected an integer; got '1.5'"),
        ("--page-size 16k", "--page-size: expected an integer"),
        ("--port 70000", "--port: must be at most 65535"),
        ("--mem-fraction-static 1.0", "--mem-fraction-static must be above 0 and below 1; got 1.0"),
        ("--mem-fraction-static nan", "--mem-fraction-static: expected a number"),
        ("--schedule-conservativeness abc", "--schedule-conservativeness: expected a number"),
        ("--chunked-prefill-size 0", "must be positive, or -1"),
        ("--chunked-prefill-size -2", "must be at least -1"),
        ("--chunked-prefill-size 100 --page-size 16", "is not a multiple of --page-size 16"),
        ("--max-total-tokens 8 --page-size 16", "less than one page"),
        ("--dtype int8", "--dtype: must be one of auto, bfloat16"),
        ("--attention-backend ns", "--attention-backend: must be one of triton, flashinfer, torch_native; got 'ns'"),
        ("--decode-attention-backend trition", "--decode-attention-backend: must be one of triton, flashinfer"),
        ("--moe-runner-backend trition", "--moe-runner-backend: must be one of auto, sgl_kernel, triton, torch_native"),
        ("--retraction-policy priority", "needs --enable-priority-scheduling"),
        ("--grammar-backend outlines", "--grammar-backend: must be one of xgrammar"),
        ("--quantization fp4", "--quantization: must be one of fp8, w8a8_fp8"),
        ("--schedule-policy best", "--schedule-policy: must be one of fcfs"),
        ("--json-model-override-args [1]", "--json-model-override-args: expected a JSON object"),
        ("--json-model-override-args {a}", "--json-model-override-args: expected a JSON object"),
        ("--cuda-graph-bs 1 0", "--cuda-graph-bs: must be at least 1"),
        ("--cuda-graph-bs 1 --disable-cuda-graph", "contradict"),
        ("stray", "Unrecognized arguments: stray"),
        ("--dp 2 --nnodes 2 --tp 2 --dist-init-addr h:1", "--dp-size 2 does not go with --nnodes 2: start a server"),
        ("--enable-lora --tp 2 --dp 2 --enable-dp-attention", "--enable-lora does not go with --attn-dp-size here"),
        ("--enable-lora --use-ray --tp 2", "--enable-lora does not go with --use-ray here"),
        ("--load-balance-method best", "--load-balance-method: must be one of auto, prefix_affinity"),
        ("--prefix-affinity-fallback auto", "--prefix-affinity-fallback: must be one of round_robin, total_requests"),
        ("--nnodes 2 --tp 2", "--nnodes 2 needs --dist-init-addr HOST:PORT of machine 0"),
        ("--nnodes 2 --tp 2 --dist-init-addr host", "--dist-init-addr must be HOST:PORT; got 'host'"),
        ("--nnodes 2 --tp 3 --dist-init-addr h:1", "--nnodes 2 does not divide the 3 ranks"),
        ("--tool-call-parser qwen9", "--tool-call-parser: must be one of"),
        ("--reasoning-parser qwen9", "--reasoning-parser: must be one of"),
        ("--node-rank 1", "--node-rank must be below --nnodes 1"),
    ],
)
def test_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cli(*words.split())


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("port: x\nnot-a-flag: 1\nenable-flexkv: true\n")
    words = (
        f"--config {config} --page-sise 3 --dtype int8 --page-size 0 --chunked-prefill-size 100 --speculative-algo "
        "STANDALONE --dp 0 --uno-lora-path x --mem-fraction-static 2 --tool-call-parser glm9 --enable-metrics 1 "
        "--attention-backend trition --node-rank 3"
    )
    with pytest.raises(UserError) as caught:
        ServerArgs.from_cli(words.split())
    first, *texts = str(caught.value).splitlines()
    assert first == f"{len(texts)} problems:"
    expected = [
        "--config .*: --port: expected an integer",
        "--config .*: Unknown option --not-a-flag",
        "--config .*: --enable-flexkv is not implemented",
        "Unknown option --page-sise. Did you mean --page-size",
        "Unrecognized arguments: 1",
        "--dtype: must be one of",
        "--page-size: must be at least 1",
        "--attention-backend: must be one of",
        "--model-path is required",
        "--mem-fraction-static must be above 0 and below 1",
        "--node-rank must be below",
        "--speculative-algorithm STANDALONE needs --speculative-draft-model-path",
        "--uno-lora-path is not implemented",
        "--dp-size: must be at least 1",
        "--tool-call-parser: must be one of",
    ]
    for pattern in expected:
        assert sum(re.match(f"- {pattern}", text) is not None for text in texts) == 1, pattern
    assert len(texts) == len(expected)


def test_what_depends_on_a_bad_value_is_not_judged() -> None:
    with pytest.raises(UserError) as caught:
        cli("--nnodes", "x", "--node-rank", "1")
    assert str(caught.value) == "--nnodes: expected an integer; got 'x'."


@pytest.mark.parametrize(
    ("spelling", "hint"),
    [
        ("--mxfp4", " "),
        ("--gpu-memory-utilization", " Here that is --mem-fraction-static, which counts weights and KV cache only. "),
        ("--x", " "),
        ("--page-sise", " Did you mean --page-size? "),
        ("--tpsize", " Did you mean --tp-size? "),
        ("--cuda-graph-maxbs", " Did you mean --cuda-graph-max-bs or --cuda-graph-bs? "),
        ("--uno-lora-pth", " Did you mean --uno-lora-path, which is not implemented? "),
        ("--schedule-heuristics", " Did you mean --schedule-heuristic? "),
        ("--sleep-on-idel", " Did you mean --sleep-on-idle, which has no effect? "),
    ],
)
def test_only_near_spellings_are_suggested(spelling: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        cli(spelling)
    assert str(caught.value) == f"Unknown option {spelling}.{hint}`--help` lists all options."


def test_every_kernel_name_of_the_tables_is_understood() -> None:
    """What cannot run is the plan's to refuse, with its reasons."""
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        for kernel in EXTEND_ATTENTION:
            assert getattr(ServerArgs.from_kwargs(model_path="m", **{field: kernel.name}), field) == kernel.name
    for kernel in FUSED_MOE:
        args = ServerArgs.from_kwargs(model_path="m", moe_runner_backend=kernel.name)
        assert args.moe_runner_backend == kernel.name or kernel.not_here is not None
    for name in FP8_GEMM_BACKENDS:
        assert cli("--fp8-gemm-runner-backend", name).fp8_gemm_backend == name
        assert [spec for spec in LINEAR if name in (spec.name, spec.asked_as)]


def test_model_is_required() -> None:
    with pytest.raises(UserError, match="--model-path is required"):
        ServerArgs.from_cli([])
    with pytest.raises(UserError, match="--model-path is required"):
        ServerArgs.from_kwargs(model_path="")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp_size": "many"}, "--tp-size: expected an integer"),
        ({"tp_size": 1.0}, "--tp-size: expected an integer"),
        ({"tp_size": True}, "--tp-size: expected a number"),
        ({"enable_metrics": "perhaps"}, "--enable-metrics: expected true or false"),
        ({"host": 5}, "--host: expected a string"),
        ({"dtype": None}, "--dtype: expected a string"),
        ({"speculative_algorithm": "UNO"}, "--speculative-algorithm: drafts of the kind UNO are not supported"),
        ({"tpsize": 2}, "Unknown option --tpsize"),
    ],
)
def test_refused_keywords(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServerArgs.from_kwargs(model_path="m", **values)


def test_check_after_manual_change() -> None:
    args = cli()
    args.check()
    args.port = 0
    with pytest.raises(UserError, match="--port"):
        args.check()


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ServerArgs.from_cli(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(ServerArgs):
        assert flag(field.name) in text
        spec = field.metadata["option"]
        assert isinstance(spec, Option)
        assert spec.help.endswith("."), field.name
    assert build_parser(TABLE, "x").prog == "x"


@pytest.mark.parametrize("seed", [str(1 << 63), str(1 << 64), "9" * 30, "-1"])
def test_a_seed_has_64_bits(seed: str) -> None:
    with pytest.raises(UserError, match="--random-seed: must be at (most 9223372036854775807|least 0)"):
        cli("--random-seed", seed)
    assert cli("--random-seed", str((1 << 63) - 1)).random_seed == (1 << 63) - 1


@pytest.mark.parametrize("key", ["", " ", "\t ", " secret", "secret ", "two\nlines", "nul\0"])
def test_an_api_key_that_no_client_could_send_is_refused(key: str) -> None:
    with pytest.raises(UserError, match="--api-key"):
        ServerArgs.from_kwargs(model_path="m", api_key=key)
    with pytest.raises(UserError, match="--admin-api-key"):
        ServerArgs.from_kwargs(model_path="m", admin_api_key=key)


def test_passwords_are_not_public() -> None:
    extra = '{"url": "redis://user:hush@10.0.0.1", "module_path": "m", "class_name": "C"}'
    args = cli(
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", extra),
        *("--admin-api-key", "hush"),
        *("--otlp-traces-endpoint", "https://user:hush@collector:4318/v1/traces"),
    )
    shown = args.public_dict()
    assert "hush" not in str(shown) and shown["hicache_storage_backend_extra_config"] == "set"
    assert shown["otlp_traces_endpoint"] == "https://...@collector:4318/v1/traces"


def test_api_key_is_not_public() -> None:
    args = cli("--api-key", "secret")
    assert "secret" not in str(args.public_dict())
    assert cli().public_dict()["api_key"] is None


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:30000"), ("0.0.0.0", "http://127.0.0.1:30000"), ("::", "http://[::1]:30000")],
)
def test_url(host: str, url: str) -> None:
    assert cli("--host", host).url() == url


def test_tables_do_not_overlap() -> None:
    names = [name.removeprefix("--") for name in TABLE.names]
    names += [*RENAMED_FLAGS, *(w.partition("=")[0] for group in (*ACCEPTED, *REFUSED) for w in group.names)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("16k", 16_000),
        ("16K", 16_000),
        ("16Ki", 16_384),
        ("1M", 1_000_000),
        ("1Mi", 1 << 20),
        ("25.6k", 25_600),
        ("1.5Ki", 1536),
        ("0.007M", 7000),
        ("2G", 2_000_000_000),
        ("2Gi", 2 << 30),
        ("1T", 10**12),
        ("-1", -1),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "1kk", "1.3", "0.0001k", "0.1Ki", "1i", "1q", "0x10", "1 k"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.one_of(st.sampled_from(sorted(TABLE.names)), st.text(max_size=8), st.just("--"), st.just("1")), max_size=6
    )
)
def test_no_words_crash_the_parser(words: list[str]) -> None:
    """Whatever is typed, the answer is arguments or a UserError."""
    try:
        args = ServerArgs.from_cli(
            ["--model", "m", *[word for word in words if word not in ("--help", "-h", "--config")]]
        )
    except UserError as error:
        assert str(error)
    except SystemExit as stop:
        assert stop.code == 0
    else:
        args.check()
