"""What the dashboard and the rules ask for, and what a node's hardware says, without hosts.

The recorded samples are of real engines (data/metrics/README.md).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.playbooks import promql
from tests.playbooks.promql import SMI, SMI_PROGRAM, place_smi

TREE: Final = Path(__file__).parents[2]


# --- the questions, against the recorded samples ---------------------------------------------


def _expressions() -> dict[str, str]:
    named = {rule.get("alert") or rule["record"]: rule["expr"] for rule in promql.rules()}
    return {**promql.panel_queries(), **named}


@pytest.mark.parametrize(("where", "expr"), _expressions().items())
def test_engines_and_router_have_every_metric_and_label_that_is_asked_for(
    where: str, expr: str
) -> None:
    known = promql.recorded()
    labels = set(promql.TARGET_LABELS) | promql.ALERT_LABELS | {"le"}
    for metric, matchers in promql.selectors(expr):
        if metric.startswith(("vllm:", "kvdeploy_router_")):
            assert metric in known, f"no sample has {metric}"
            assert any(promql.fits(has, matchers) for has in known[metric]), f"{metric}{matchers}"
            labels |= {label for has in known[metric] for label in has}
        else:  # the hosts below have these
            assert metric.startswith(("kvdeploy_", "node_", "node:kvdeploy_", "up", "ALERTS"))
            labels |= {"device", "kind", "gpu", "name", "mountpoint"}
    assert promql.grouped_by(expr) <= labels


def test_panels_do_not_overlap_and_ask_the_provisioned_data_source() -> None:
    board = promql.dashboard()
    source = (promql.ROLE / "templates/grafana-datasources.yml.j2").read_text()
    uid = yaml.safe_load(source.replace("{{", "").replace("}}", ""))["datasources"][0]["uid"]
    variables = {f"${v['name']}" for v in board["templating"]["list"]}
    seen: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & seen, panel["title"]
        seen |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == uid
            used = {w for w in ("$engine", "$node", "$cluster") if w in target["expr"]}
            assert used <= variables
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert set(promql.STAND_INS) == variables | {"$__rate_interval"}


def test_every_alert_says_what_to_do_and_is_explained_and_tested() -> None:
    documented = (TREE / "docs/monitoring.md").read_text()
    tested = (promql.SAMPLES / "rules-test.yml").read_text()
    for rule in promql.rules():
        if "alert" in rule:
            assert set(rule["annotations"]) == {"summary", "do"}
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert f"| {rule['alert']} |" in documented
            assert f'"{rule["alert"]}"' in tested


# --- what the hardware says --------------------------------------------------------------------


def _hardware(tmp_path: Path, *words: str) -> tuple[dict[tuple[str, ...], float], str]:
    """(metric, label values...) -> value, and what it said on stderr."""
    out = tmp_path / "out.prom"
    program = promql.ROLE / "files/hardware_metrics.py"
    done = subprocess.run(
        [sys.executable, "-I", program, "--output", out, "--sys", tmp_path / "sys", *words],
        env={"PATH": str(tmp_path / "bin")},
        check=True,
        capture_output=True,
        text=True,
    )
    families = text_string_to_metric_families(out.read_text())
    samples = [s for f in families for s in f.samples]
    return {(s.name, *s.labels.values()): s.value for s in samples}, done.stderr


def _device(tmp_path: Path, name: str, vendor: str, state: str, **counters: str) -> None:
    device = tmp_path / "sys/class/infiniband" / name
    (device / "ports/1/hw_counters").mkdir(parents=True)
    (device / "device").mkdir()
    (device / "device/vendor").write_text(f"{vendor}\n")
    (device / "ports/1/state").write_text(f"{state}\n")
    for counter, value in counters.items():
        (device / "ports/1/hw_counters" / counter).write_text(f"{value}\n")


def test_every_counter_of_every_efa_device_is_told_and_of_no_other_device(tmp_path: Path) -> None:
    many = str(2**53 - 1)
    _device(tmp_path, "rdmap85s0", "0x1d0f", "4: ACTIVE", tx_bytes=many, rx_drops="3", lifespan="9")
    _device(tmp_path, "rdmap86s0", "0x1d0f", "1: DOWN", rdma_write_bytes="5", new_thing="N/A")
    _device(tmp_path, "mlx5_0", "0x15b3", "4: ACTIVE", tx_bytes="7")
    (tmp_path / "sys/class/infiniband/rdmap85s0/hw_counters").mkdir()
    (tmp_path / "sys/class/infiniband/rdmap85s0/hw_counters/cmds_err").write_text("2\n")
    (tmp_path / "sys/module/efa").mkdir(parents=True)
    (tmp_path / "sys/module/efa/version").write_text("3.3.1\n")
    told, said = _hardware(tmp_path, "--efa-devices", "16")
    assert told.pop(("kvdeploy_hardware_seconds",)) > 0
    assert told == {
        ("kvdeploy_efa_devices",): 2,
        ("kvdeploy_efa_devices_expected",): 16,
        ("kvdeploy_efa_driver_info", "3.3.1"): 1,
        ("kvdeploy_efa_port_active", "rdmap85s0", "1"): 1,
        ("kvdeploy_efa_port_active", "rdmap86s0", "1"): 0,
        ("kvdeploy_efa_bytes_total", "rdmap85s0", "1", "tx"): 2**53 - 1,
        ("kvdeploy_efa_bytes_total", "rdmap86s0", "1", "rdma_write"): 5,
        ("kvdeploy_efa_events_total", "rdmap85s0", "1", "rx_drops"): 3,
        ("kvdeploy_efa_events_total", "rdmap85s0", "cmds_err"): 2,
    }
    assert said == ""


def test_gpus_tell_what_nvidia_smi_says_and_nothing_that_it_does_not(tmp_path: Path) -> None:
    place_smi(tmp_path / "bin/nvidia-smi", 1)
    told, said = _hardware(tmp_path, "--gpus", "8")
    gpu = {k: v for k, v in told.items() if k[0].startswith("kvdeploy_gpu")}
    about = (SMI["fields"]["uuid"], "NVIDIA H200", SMI["fields"]["driver_version"])
    assert gpu == {
        ("kvdeploy_gpus",): 1,
        ("kvdeploy_gpus_expected",): 8,
        ("kvdeploy_gpu_info", "0", *about): 1,
        ("kvdeploy_gpu_utilization_ratio", "0"): 0,
        ("kvdeploy_gpu_memory_used_bytes", "0"): 0,
        ("kvdeploy_gpu_memory_bytes", "0"): 143771 * 2**20,
        ("kvdeploy_gpu_temperature_celsius", "0"): 39,
        ("kvdeploy_gpu_power_watts", "0"): 108.08,
        ("kvdeploy_gpu_uncorrected_errors_total", "0"): 0,
        ("kvdeploy_gpu_remap_failed", "0"): 0,
        ("kvdeploy_gpu_healthy", "0"): 1,
    }
    assert said == ""


def test_a_driver_that_is_older_than_a_field_tells_the_others(tmp_path: Path) -> None:
    older = SMI_PROGRAM.replace("'gpu_recovery_action'", "'x'").replace("'fabric.state'", "'y'")
    place_smi(tmp_path / "bin/nvidia-smi", 1, older)
    told, said = _hardware(tmp_path, "--gpus", "1")
    assert ("kvdeploy_gpu_healthy", "0") not in told
    assert told["kvdeploy_gpu_temperature_celsius", "0"] == 39
    assert said == ""


def test_a_driver_that_does_not_answer_is_no_gpus_and_a_line_in_the_log(tmp_path: Path) -> None:
    place_smi(tmp_path / "bin/nvidia-smi", 0, "#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    told, said = _hardware(tmp_path, "--gpus", "8")
    assert told["kvdeploy_gpus",] == 0
    assert said == "nvidia-smi: NVIDIA-SMI has failed\n"


def test_a_node_without_gpus_says_nothing_of_them(tmp_path: Path) -> None:
    told, said = _hardware(tmp_path)
    assert not [name for name, *_ in told if "gpu" in name]
    assert said == ""
