"""The files under `docker/`: what they name exists, and the dashboard shows what the server exports."""

from __future__ import annotations

import http.server
import json
import platform
import re
import runpy
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.managers.front.metrics import Metrics
from sglang.srt.managers.wire.io_struct import HostCacheStats, StorageStats
from sglang.srt.server_args import ServerArgs

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DASHBOARD = DOCKER / "grafana" / "dashboards" / "sm120-sglang.json"
PANELS: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
METRIC = re.compile(r"sglang:\w+")


SERVERS = ("server", "second")


def words_of(environment: dict[str, str], service: str = "server") -> list[str]:
    """The server's command line, as compose puts the variables in."""
    text: str = SERVICES[service]["command"]
    text = re.sub(
        r"\$\{(\w+):\+([^$]*)\$\{\1\}\}", lambda m: m[2] + environment[m[1]] if m[1] in environment else "", text
    )
    text = re.sub(r"\$\{(\w+):-\}", lambda m: environment.get(m[1], ""), text)
    assert "$" not in text
    return text.split()


def test_the_server_is_started_with_flags_that_it_has() -> None:
    args = ServerArgs.from_cli(words_of({"MODEL": "Qwen/Qwen3-8B", "FLAGS": "--tp 2"}))
    assert (args.model_path, args.tp_size, args.host, args.port) == ("Qwen/Qwen3-8B", 2, "0.0.0.0", 30000)
    assert args.enable_metrics
    assert "--model-path" not in words_of({})
    assert SERVICES["server"]["entrypoint"] == ["sglang", "serve"]
    second = {"SECOND_MODEL": "a/b", "SECOND_FLAGS": "--tp 2"}
    assert words_of(second, "second") == words_of({"MODEL": "a/b", "FLAGS": "--tp 2"})


def test_the_gateway_reaches_every_server() -> None:
    text = (DOCKER / "gateway.conf").read_text()
    assert set(re.findall(r"proxy_pass http://(\w+):30000/;", text)) == set(SERVERS)
    assert "listen 8000;" in text and SERVICES["gateway"]["ports"] == ["127.0.0.1:${GATEWAY_PORT:-8000}:8000"]
    assert SERVICES["second"]["profiles"] == SERVICES["gateway"]["profiles"] == ["models"]


def test_compose_follows_its_schema() -> None:
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*words, str(DOCKER / "compose.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="hadolint comes for x86-64")
def test_the_dockerfile_has_no_lint() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None
    done = subprocess.run([hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_starts_the_server_that_compose_asks() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    entrypoint = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0])
    assert entrypoint[:2] == SERVICES["server"]["entrypoint"]
    assert ServerArgs.from_cli([*entrypoint[2:], "--model-path", "a/b", "--tp", "8"]).host == "0.0.0.0"
    assert re.findall(r"^EXPOSE (\d+)$", text, re.MULTILINE) == ["30000"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--port", "PORT"],
        ["--port", "1", "--tp", "2", "--port=PORT"],
        ["--por", "PORT", "--host", "0.0.0.0"],
        ["--config", "FILE"],
    ],
)
def test_health_is_asked_at_the_port_of_the_server(words: list[str], tmp_path: Path) -> None:
    """A container whose server listens elsewhere than on 30000 must not count as sick."""
    health = runpy.run_path(str(DOCKER / "health.py"))
    config = tmp_path / "serve.yaml"
    config.write_text(f"model-path: {DEFAULT_MODEL_PATH}\nport: 12345\n")
    given = [word.replace("PORT", "12345").replace("FILE", str(config)) for word in words]
    asked = health["url_of"](["python", "sglang", "serve", *given])
    assert asked == f"http://127.0.0.1:{12345 if words else 30000}"


def test_health_is_what_the_server_answers(tmp_path: Path) -> None:
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        port = str(server.server_port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "cmdline").write_bytes("\0".join(["sglang", "serve", "--port", port, ""]).encode())
        command = [sys.executable, str(DOCKER / "health.py"), str(tmp_path / "cmdline")]
        assert subprocess.run(command).returncode == 0
        server.shutdown()
    assert subprocess.run(command, capture_output=True).returncode == 1


def test_the_image_is_made_of_what_the_build_may_see() -> None:
    seen = [line[1:] for line in (DOCKER.parent / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (.*) \S+$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for words in copied for source in words.split()}
    assert sources == set(seen) and all((DOCKER.parent / source).exists() for source in sources)


def test_every_step_of_the_image_is_one_of_the_script() -> None:
    script = (DOCKER / "install.sh").read_text()
    steps = set(re.findall(r"^(\w+)\(\) \{$", script, re.MULTILINE))
    used = set(re.findall(r"/opt/install.sh (\w+)", (DOCKER / "Dockerfile").read_text()))
    assert used == steps - {"smoke"}
    assert subprocess.run(["sh", "-n", str(DOCKER / "install.sh")]).returncode == 0
    unknown = subprocess.run(["sh", str(DOCKER / "install.sh"), "nothing"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "unknown step nothing" in unknown.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_mounts_exists(name: str) -> None:
    for mount in SERVICES[name].get("volumes", ()):
        source = mount.split(":")[0]
        assert (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], mount


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_open_to_this_machine_only(name: str) -> None:
    assert all(str(port).startswith("127.0.0.1:") for port in SERVICES[name].get("ports", ()))


@pytest.mark.parametrize("name", sorted(set(SERVICES) - set(SERVERS)))
def test_foreign_images_have_a_version(name: str) -> None:
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])


def test_prometheus_reads_the_server_and_grafana_reads_prometheus() -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:30000"]}]
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "dashboards.yml").read_text())["providers"]
    mounts = dict(mount.split(":")[:2] for mount in SERVICES["grafana"]["volumes"])
    assert provider["options"]["path"] == mounts["./grafana/dashboards"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"


def exported() -> dict[str, set[str]]:
    """Names of samples and their labels, from the page that Prometheus reads, of a server with prefixes in main memory
    and a store behind it."""
    metrics = Metrics("tiny")
    metrics.stats[0].host_cache = HostCacheStats(storage=StorageStats())
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_shows_what_the_server_exports(panel: dict[str, Any]) -> None:
    samples = exported()
    for target in panel["targets"]:
        names = METRIC.findall(target["expr"])
        assert names and set(names) <= set(samples)
        for name in names:
            used = set(re.findall(r"(\w+)=~", target["expr"])) - {"instance"}  # Prometheus adds that one
            assert used <= samples[name]
        assert ("rate(" in target["expr"]) == any(name.endswith(("_total", "_bucket")) for name in names)


def test_the_dashboard_leaves_out_no_metric() -> None:
    shown = {name for panel in PANELS for target in panel["targets"] for name in METRIC.findall(target["expr"])}
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exported()}
    assert families - {re.sub(r"_bucket$", "", name) for name in shown} == set()


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
