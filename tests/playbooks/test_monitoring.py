"""The role monitoring: what it measures, judges and shows.

The recorded samples are of real engines (data/metrics/README.md). On the hosts Prometheus, its
exporter and promtool are the distribution's; Grafana is a stand-in that asks the real Prometheus.
"""

from __future__ import annotations

import json
import math
import shutil
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from kvdeploy.adapters.ansible.client import Ansible, Play
from kvdeploy.errors import PlaybookError
from kvdeploy.model.inventory import Inventory
from kvdeploy.polling import wait_for
from tests.certificates import write_certificate
from tests.playbooks import promql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.adapters.ansible.report import PlayReport
    from tests.hostlab.guest import Host
    from tests.playbooks.conftest import Labs, Served

TREE: Final = Path(__file__).parents[2]
PASSWORD: Final = "the-first-secret-of-grafana"
PROMETHEUS: Final = "http://127.0.0.1:9090"
GRAFANA: Final = "http://127.0.0.1:3000"
EFA_COUNTERS: Final = (
    *("rdma_read_bytes", "rdma_read_resp_bytes", "rdma_read_wr_err", "rdma_read_wrs"),
    *("rdma_write_bytes", "rdma_write_recv_bytes", "rdma_write_wr_err", "rdma_write_wrs"),
    *("recv_bytes", "recv_wrs", "rx_bytes", "rx_drops", "rx_pkts", "send_bytes", "send_wrs"),
    *("tx_bytes", "tx_pkts", "retrans_bytes", "retrans_pkts", "retrans_timeout_events"),
    *("impaired_remote_conn_events", "unresponsive_remote_events"),
)
"""Of a port, as the driver of EFA installer 1.51.0 has them (efa_verbs.c)."""


# --- on hosts ------------------------------------------------------------------------------------


class Fleet:
    """Serves the recorded samples as engines and a router with a certificate of its own would:
    first the earlier ones.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.turn = 1
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(*write_certificate(folder))
        self.servers = {
            name: self._server(address, name) for name in ("prefill", "decode", "router")
        }

    def _server(self, address: str, name: str) -> ThreadingHTTPServer:
        fleet = self

        class Metrics(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = (promql.SAMPLES / f"{name}-{fleet.turn}.prom").read_bytes()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words: Any) -> None:
                """Says nothing."""

        server = ThreadingHTTPServer((address, 0), Metrics)
        server.daemon_threads = True
        if name == "router":
            server.socket = self._tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def where(self, name: str) -> str:
        host, port = self.servers[name].server_address[:2]
        return f"{host!s}:{port}"

    def end(self) -> None:
        for server in self.servers.values():
            server.shutdown()
            server.server_close()


@dataclass
class Bench:
    """One GPU node and the router's node, both with the role; engines are recordings."""

    served: Served
    fleet: Fleet
    folder: Path
    variables: dict[str, Any] = field(default_factory=dict)
    password: str = PASSWORD

    @property
    def gpu(self) -> Host:
        return self.served["prefill-0"]

    @property
    def router(self) -> Host:
        return self.served["router-0"]

    def converge(self, *only: str, **more: Any) -> PlayReport:
        """Run the role on both, or on some; `more` are variables that go before all others."""
        own: dict[str, dict[str, Any]] = {
            "prefill-0": {"monitoring_gpus": 8, "monitoring_efa_devices": 16},
            "router-0": {"monitoring_server": True},
        }
        inventory = self.served.inventory({"prefill-0": "prefill", "router-0": "router"})
        hosts = tuple(
            h.model_copy(update={"vars": {"monitoring_address": h.address, **own[h.name]}})
            for h in inventory.hosts
        )
        play = Play(
            playbook="monitoring.yml",
            inventory=Inventory(**{**dict(inventory), "hosts": hosts}),
            variables=self.variables | more,
            limit=only,
            secrets={"monitoring_grafana_password": self.password},
            timeout_s=600,
        )
        return Ansible(self.folder / "log.jsonl", self.folder / "playbooks").run(play)

    def ask(self, *queries: str) -> list[list[dict[str, Any]]]:
        """What the Prometheus on the router's node answers to each."""
        program = f"""\
import json, sys, urllib.parse, urllib.request
for query in json.load(sys.stdin):
    url = "{PROMETHEUS}/api/v1/query?" + urllib.parse.urlencode({{"query": query}})
    try:
        print(urllib.request.urlopen(url, timeout=10).read().decode())
    except OSError as e:
        print(json.dumps({{"data": {{"result": []}}, "error": f"{{query}}: {{e}}"}}))
"""
        done = self.router.run("python3", "-c", program, input_text=json.dumps(queries))
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert not [a["error"] for a in answers if "400" in a.get("error", "")]
        return [a["data"]["result"] for a in answers]

    def wait(self, query: str, within_s: float = 60) -> None:
        """Until it answers something."""
        found = wait_for(lambda: self.ask(query)[0] or None, timeout_s=within_s, interval_s=0.5)
        assert found, f"{query} stays empty"

    def grafana(self, path: str, password: str) -> str:
        """HTTP status."""
        words = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{GRAFANA}{path}")
        return self.router.must(*words, "-u", f"admin:{password}")

    def pid(self, host: Host, unit: str) -> str:
        return host.must("systemctl", "show", "--property=MainPID", "--value", unit).strip()


@pytest.fixture(scope="module")
def bench(labs: Labs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    served = labs("prefill-0", "router-0", hardware={"prefill-0": "p5en", "router-0": "none"})
    folder = tmp_path_factory.mktemp("monitoring")
    fleet = Fleet(served.lab.gateway, folder)
    playbooks = folder / "playbooks"
    playbooks.mkdir()
    for name in ("ansible.cfg", "roles"):
        (playbooks / name).symlink_to(TREE / "playbooks" / name)
    play = {"name": "Measure", "hosts": "all", "become": True, "gather_facts": False}
    (playbooks / "monitoring.yml").write_text(yaml.safe_dump([{**play, "roles": ["monitoring"]}]))
    made = Bench(served, fleet, folder)
    made.variables = {
        "monitoring_cluster": "demo",
        "monitoring_scrape_interval_s": 1,
        "monitoring_ends": {"ttl": 4e9, "capacity-block": 4e9},
        "monitoring_router": f"https://{fleet.where('router')}",
        "monitoring_engines": [
            {"name": f"{r}-0", "role": r, "node": f"{r}-0", "address": fleet.where(r)}
            for r in ("prefill", "decode")
        ],
        "monitoring_nodes": [
            {"name": name, "role": name.partition("-")[0], "address": served[name].address}
            for name in ("prefill-0", "router-0")
        ],
    }
    promql.place_smi(
        made.gpu.root / "usr/local/bin/nvidia-smi",
        8,
        promql.SMI_PROGRAM.replace("'N/A'", "'Completed'"),
    )
    for device in (made.gpu.hardware / "class/infiniband").iterdir():
        for counter in EFA_COUNTERS:
            (device / "ports/1/hw_counters" / counter).write_text("0\n")
    # The lab's own file systems are none of a disk.
    made.gpu.must("mkfs.ext4", "-q", "/dev/nvme1n1")
    made.gpu.must("mount", "--mkdir", "/dev/nvme1n1", "/opt/kvdeploy/data")
    try:
        made.converge()
        yield made
    finally:
        fleet.end()


def test_a_second_run_changes_nothing(bench: Bench) -> None:
    assert bench.converge().changed == 0


def test_only_the_exporter_listens_beyond_the_node(bench: Bench) -> None:
    listening = bench.router.must("ss", "-Hltn").split()[3::5]
    ours = {at for at in listening if not at.endswith(":22")}
    assert ours == {f"{bench.router.address}:9100", "127.0.0.1:9090", "127.0.0.1:3000"}
    assert bench.grafana("/api/datasources", "admin") == "401"
    assert "GF_AUTH_ANONYMOUS_ENABLED=false" in bench.router.must(
        "systemctl", "show", "--property=Environment", "grafana-server"
    )


def test_every_panel_and_every_rule_finds_its_data(bench: Bench) -> None:
    """Between the first samples and the second, as between two looks at a fleet that serves."""
    bench.wait('vllm:nixl_bytes_transferred_count{instance="prefill-0"}')
    first = promql.sample("prefill-1.prom", "vllm:nixl_bytes_transferred_count")
    bench.wait(f'vllm:nixl_bytes_transferred_count{{instance="prefill-0"}} == {first}')
    bench.fleet.turn = 2
    for device in (bench.gpu.hardware / "class/infiniband").iterdir():
        for counter in EFA_COUNTERS:
            (device / "ports/1/hw_counters" / counter).write_text("123456\n")
    second = promql.sample("prefill-2.prom", "vllm:nixl_bytes_transferred_count")
    bench.wait(f'vllm:nixl_bytes_transferred_count{{instance="prefill-0"}} == {second}')
    bench.wait("rate(kvdeploy_efa_bytes_total[1m]) > 0")
    bench.wait('ALERTS{alertname="RouterLosesWrites", alertstate="firing"}')
    bench.wait("node:kvdeploy_efa_bytes:rate5m > 0")

    queries = promql.panel_queries()
    for where, found in zip(queries, bench.ask(*queries.values()), strict=True):
        assert [s for s in found if math.isfinite(float(s["value"][1]))], where
    wanted = {n + m: None for r in promql.rules() for n, m in promql.selectors(r["expr"])}
    for selector, found in zip(wanted, bench.ask(*wanted), strict=True):
        assert found, selector


def test_rules_judge_as_they_are_meant_to(bench: Bench) -> None:
    """With the promtool of the host, on the rules as the role wrote them."""
    folder = bench.router.root / "root/rules"
    folder.mkdir()
    shutil.copy(promql.SAMPLES / "rules-test.yml", folder)
    shutil.copy(bench.router.root / "etc/prometheus/kvdeploy/rules.yml", folder)
    assert (folder / "rules.yml").read_text() == promql.render_rules()
    done = bench.router.run("promtool", "test", "rules", "/root/rules/rules-test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_targets_change_without_a_restart_and_what_a_killed_run_left_is_made_good(
    bench: Bench,
) -> None:
    prometheus = bench.pid(bench.router, "prometheus")
    exporter = bench.pid(bench.gpu, "prometheus-node-exporter")
    read = "prometheus_config_last_reload_success_timestamp_seconds"
    before = float(bench.ask(read)[0][0]["value"][1])
    # As after a run that was killed when it had written, and had not yet restarted or reloaded.
    bench.gpu.must("touch", "/etc/systemd/system/prometheus-node-exporter.service.d/kvdeploy.conf")
    bench.gpu.must("systemctl", "daemon-reload")
    bench.router.must("touch", "/etc/prometheus/kvdeploy/rules.yml")
    bench.variables["monitoring_engines"] = bench.variables["monitoring_engines"][:1]
    bench.password = "another-secret-of-grafana"
    report = bench.converge()

    assert {host.name for host in report.hosts if host.changed} == {"prefill-0", "router-0"}
    assert [s["metric"]["instance"] for s in bench.ask('up{job="engine"}')[0]] == ["prefill-0"]
    bench.wait(f"{read} > {before}")
    assert bench.pid(bench.router, "prometheus") == prometheus
    assert bench.pid(bench.gpu, "prometheus-node-exporter") != exporter
    assert bench.grafana("/api/datasources", PASSWORD) == "401"
    assert bench.grafana("/api/dashboards/uid/kvdeploy", bench.password) == "200"
    said = (bench.folder / "log.jsonl").read_text()
    assert PASSWORD not in said
    assert bench.password not in said


def test_after_a_power_loss_everything_is_there_again(bench: Bench) -> None:
    bench.router.kill()
    bench.router.boot()
    bench.wait('count(up{job="node"} == 1) == 2')
    bench.wait("kvdeploy_cluster_ends_timestamp_seconds")
    assert bench.grafana("/api/datasources", bench.password) == "200"
    assert bench.router.must("systemctl", "--failed", "--no-legend") == ""


def test_what_cannot_work_is_refused_with_a_sentence(bench: Bench) -> None:
    """A key that is not Grafana's, a configuration that is none, and no good password."""
    wrong = {"monitoring_server": True, "monitoring_grafana_fingerprint": "0" * 40}
    with pytest.raises(PlaybookError) as e:
        bench.converge("prefill-0", **wrong)
    key = bench.served.variables["monitoring_grafana_fingerprint"]
    assert f"/gpg.key is not a key with the fingerprint {'0' * 40}: it has {key}. " in str(e.value)
    for path in ("apt/keyrings/kvdeploy-grafana.asc", "apt/sources.list.d/kvdeploy-grafana.list"):
        assert not (bench.gpu.root / "etc" / path).exists()
    installed = bench.gpu.run("dpkg-query", "--show", "prometheus", "grafana").stdout
    assert installed == ""

    config = bench.router.read("/etc/prometheus/kvdeploy/prometheus.yml")
    with pytest.raises(PlaybookError, match="'promtool check config %s' does not accept") as e:
        bench.converge("router-0", monitoring_alertmanagers=["http://10.0.0.9:9093"])
    assert '"http://10.0.0.9:9093" is not a valid hostname' in str(e.value)
    assert bench.router.read("/etc/prometheus/kvdeploy/prometheus.yml") == config

    bench.password = "short"
    with pytest.raises(PlaybookError, match="must be one line of 12 characters or more"):
        bench.converge("router-0")
