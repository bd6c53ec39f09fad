"""`drift`: names read from a source tree that the tests write, the comparison, the allow-list, the report."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from upstream import source
from upstream.drift import AllowListError, Decision, Difference, compare, drift, read_decisions
from upstream.interface import KINDS, Interface, our_interface, upstream_interface

FILES = {
    "server_args.py": """
        import argparse
        from sglang.srt.arg_groups.choices import POLICIES
        raise AssertionError("upstream's code is imported")

        LOADERS = ["auto", "safetensors"]
        BACKENDS = {"triton": 1, "flashinfer": 2}

        class ServerArgs:
            model_path: A[str, Arg(help="...", aliases=["--model"])]
            port: A[int, "The port."] = 30_000
            yes: A[bool, Arg(help="...", action=argparse.BooleanOptionalAction)] = False
            tp_size: int = 1
            timeout: A[float, Arg(help="...", cli_name="--wait-seconds")] = 300
            internal: A[bool, Arg(help="...", no_cli=True)] = False
            mode: A[Optional[Literal["a", "b"]], "A mode."] = None
            plain: int = 3

            @staticmethod
            def add_cli_args(parser: argparse.ArgumentParser):
                parser.add_argument("--tp-size", "--tp", type=int, default=ServerArgs.tp_size)
                parser.add_argument("--load-format", choices=[*LOADERS, "dummy"], default="auto")
                parser.add_argument("--policy", choices=POLICIES + ["extra"], default=compute())
                parser.add_argument("--backend", choices=list(BACKENDS.keys()))
                parser.add_argument("--quantization", choices=["fp8", "awq"])
                parser.add_argument("--trust", action="store_true")
                parser.add_argument("--on-or-off", action=argparse.BooleanOptionalAction)
                parser.add_argument("positional")
        """,
    "arg_groups/choices.py": "POLICIES = ['fcfs', 'lpm']",
    "arg_groups/fields/spec.py": """
        class Spec(msgspec.Struct):
            _NS_PATH = "spec"
            draft_tokens: A[int, "How many."] = -1
        """,
    "entrypoints/http_server.py": """
        app = FastAPI()

        @app.get("/health")
        @app.get("/ready")
        async def health(): ...

        @app.api_route("/flush", methods=["GET", "POST"])
        async def flush(): ...
        """,
    "entrypoints/routes.py": """
        @router.delete("/v1/things/{thing_id:path}")
        async def thing(): ...
        """,
    "entrypoints/another_server.py": """
        app = FastAPI()

        @app.get("/of_another_server")
        async def other(): ...
        """,
    "environ.py": """
        class Envs:
            SGLANG_ONE = EnvBool(False)
            OTHER = EnvBool(False)
        """,
    "utils/common.py": """
        route = Mount("/metrics", app)
        os.getenv("SGLANG_TWO"); os.environ["SGL_THREE"]; get_bool_env_var("SGLANG_FOUR"); print("SGLANG_TEXT")
        Counter(name="sglang:tokens_total"); Gauge("sglang:running")
        """,
    "models/bom.py": "\ufeffEntryClass = OneForCausalLM",
    "models/two.py": "EntryClass = [TwoForCausalLM, ThreeForCausalLM]",
    "models/none.py": "x = 'EntryClass'",
    "layers/quantization/__init__.py": """
        BASE_QUANTIZATION_METHODS: Dict[str, type] = {"fp8": Fp8, "mxfp4": Mxfp4}
        if cuda:
            BASE_QUANTIZATION_METHODS.update({"late": Late})
        """,
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drift")
    for name, text in FILES.items():
        path = root / "sglang" / "srt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return root


EXPECTED = {
    "flag": "--model-path --model --port --wait-seconds --mode --tp-size --tp --load-format --policy --backend "
    "--quantization --trust --draft-tokens --on-or-off --no-on-or-off --yes --no-yes",
    "choice": "--mode=a --mode=b --load-format=auto --load-format=safetensors --load-format=dummy --policy=fcfs "
    "--policy=lpm --policy=extra --backend=triton --backend=flashinfer --quantization=fp8 --quantization=awq",
    "environment": "SGLANG_ONE SGLANG_TWO SGL_THREE SGLANG_FOUR",
    "architecture": "OneForCausalLM TwoForCausalLM ThreeForCausalLM",
    "quantization": "fp8 awq mxfp4 late",
    "metric": "sglang:tokens sglang:running",
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_names_are_read_without_importing(tree: Path, kind: str) -> None:
    assert set(upstream_interface(tree)[kind]) == set(EXPECTED[kind].split())


def test_defaults_are_read_where_the_source_says(tree: Path) -> None:
    assert upstream_interface(tree)["default"] == {
        "--port": "30000",
        "--tp-size": "1",
        "--wait-seconds": "300",
        "--yes": "False",
        "--mode": "None",
        "--load-format": "'auto'",
        "--trust": "False",
        "--draft-tokens": "-1",
    }


def test_endpoints_are_those_of_the_api_server(tree: Path) -> None:
    assert set(upstream_interface(tree)["endpoint"]) == {
        "GET /health",
        "GET /ready",
        "GET /flush",
        "POST /flush",
        "DELETE /v1/things/{}",
        "GET /metrics",
    }


def names(**kinds: str | dict[str, str]) -> Interface:
    return {k: v if isinstance(v, dict) else dict.fromkeys(v.split(), "") for k, v in kinds.items()}


def test_each_side_misses_what_the_other_has() -> None:
    found = compare(names(endpoint="/both /theirs"), names(endpoint="/both /mine"), {})
    assert found == [Difference("endpoint", "/mine", "ours"), Difference("endpoint", "/theirs", "upstream")]


def test_an_answered_name_may_be_there_or_not() -> None:
    answered = names(flag="--old --older")
    assert compare(names(flag="--new --old"), names(flag="--new"), answered) == []


def test_defaults_are_compared_where_both_have_one() -> None:
    found = compare(names(default={"--a": "1", "--b": "2"}), names(default={"--a": "3", "--c": "4"}), {})
    assert found == [Difference("default", "--a", "both", "1", "3")]
    assert found[0].text() == "`--a`: upstream 1, ours 3"


def test_choices_are_compared_for_flags_that_list_them_on_both_sides() -> None:
    found = compare(names(choice="--a=x --free=y"), names(choice="--a=z"), {})
    assert {(d.name, d.side) for d in found} == {("--a=x", "upstream"), ("--a=z", "ours")}


def write(directory: Path, name: str, text: str) -> Path:
    (directory / name).write_text(textwrap.dedent(text))
    return directory


ROW = """
    [[decision]]
    side = "upstream"
    reason = "not here"
    names = ["--of-a-family", "--one"]
    """


def test_a_decision_covers_its_names_its_kind_and_its_side(tmp_path: Path) -> None:
    (decision,) = read_decisions(write(tmp_path, "flag.toml", ROW))
    assert decision == Decision("flag", "upstream", ("--of-a-family", "--one"), "not here")
    assert decision.covers(Difference("flag", "--of-a-family", "upstream"))
    assert not decision.covers(Difference("flag", "--of-a-family-of-tomorrow", "upstream"))
    assert not decision.covers(Difference("flag", "--one-more", "upstream"))
    assert not decision.covers(Difference("flag", "--one", "ours"))
    assert not decision.covers(Difference("choice", "--one", "upstream"))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("flags.toml", ROW, "the name must be one of flag, default"),
        ("flag.toml", ROW.replace('"not here"', '" "'), "decision 1: names and reason must not be empty"),
        ("flag.toml", ROW.replace("reason", "because"), "must have side, names and reason.*because, reason"),
        ("flag.toml", ROW.replace('"upstream"', '"theirs"'), "side is one of upstream, ours, both"),
        ("flag.toml", "[[decision]", "flag.toml"),
        ("flag.toml", ROW.replace("--one", "--one-*"), r"decision 1: a pattern decides .*: --one-\*"),
        ("flag.toml", ROW.replace("--one", "--[no-]one"), "a pattern decides"),
    ],
)
def test_a_bad_allow_list_names_the_row(tmp_path: Path, file: str, text: str, message: str) -> None:
    with pytest.raises(AllowListError, match=message):
        read_decisions(write(tmp_path, file, text))


def test_undecided_differences_fail_and_decided_ones_keep_their_reason(tree: Path) -> None:
    everything = drift(tree, "9.9", [])
    assert everything.exit_code == 1
    assert Difference("architecture", "TwoForCausalLM", "upstream") in everything.undecided

    every = [Decision(each.kind, each.side, (each.name,), "settled") for each in everything.undecided]
    settled = drift(tree, "9.9", every)
    assert settled.exit_code == 0 and len(settled.decided) == len(everything.undecided)

    left = drift(tree, "9.9", [each for each in every if each.names != ("OneForCausalLM",)])
    assert left.exit_code == 1 and [each.name for each in left.undecided] == ["OneForCausalLM"]


def test_the_report_lists_what_is_undecided(tree: Path) -> None:
    found = drift(tree, "9.9", [Decision("architecture", "upstream", ("TwoForCausalLM", "ThreeForCausalLM"), "later")])
    text = found.markdown()
    assert "upstream 9.9" in text and "### Undecided model architectures: upstream only\n\n- `OneForCausalLM`" in text
    assert "| model architectures | " in text and "TwoForCausalLM" not in text
    rows = found.as_json()["decided"]
    assert [row["name"] for row in rows] == ["ThreeForCausalLM", "TwoForCausalLM"] and rows[0]["reason"] == "later"


def test_our_side_is_what_the_server_has() -> None:
    ours, answered = our_interface()
    assert ours["default"]["--page-size"] == "None" and "--tp" in ours["flag"]
    assert "POST /v1/chat/completions" in ours["endpoint"] and "sglang:prompt_tokens" in ours["metric"]
    assert "Qwen3ForCausalLM" in ours["architecture"] and "SGLANG_FORCE_ARCH" in ours["environment"]
    assert "--dtype=half" in answered["choice"] and "--dtype=half" not in ours["choice"]


def test_the_allow_list_is_readable() -> None:
    assert {decision.kind for decision in read_decisions()} <= set(KINDS)


RELEASES = ("0.5.8", "0.5.10", "0.5.12", "0.5.15", "0.5.18", "0.5.20", "0.5.21", "0.5.22", "0.5.23")


@pytest.mark.upstream
@pytest.mark.timeout(1800)
def test_every_difference_from_a_release_is_decided_and_no_decision_is_left_over() -> None:
    found = [drift(source.fetch(version), version) for version in RELEASES]
    assert min(len(each.decided) for each in found) > 500  # that many names were found at all
    assert [difference for each in found for difference in each.undecided] == []
    decided = {(d.kind, d.side, d.name) for each in found for d, _ in each.decided}
    listed = [(row.kind, row.side, name) for row in read_decisions() for name in row.names]
    assert len(set(listed)) == len(listed) and set(listed) == decided
