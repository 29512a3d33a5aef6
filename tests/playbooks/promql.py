"""What the dashboards and rules ask Prometheus for, taken apart as far as tests need it."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, Final

import jinja2
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROLE: Final = Path(__file__).parents[2] / "playbooks/roles/monitoring"
SAMPLES: Final = Path(__file__).parents[1] / "data/metrics"
STAND_INS: Final = {"$__rate_interval": "1m", "$engine": ".*", "$node": ".*"}
"""What Grafana would put in the place of its variables, with everything chosen."""
TARGET_LABELS: Final = {"instance", "role", "node", "job"}
"""Of the scrape configuration."""
ALERT_LABELS: Final = {"alertstate", "alertname"}

SMI: Final = json.loads((SAMPLES / "nvidia-smi.json").read_text())
SMI_PROGRAM: Final = f"""\
#!/usr/bin/python3
import sys
KNOWN, GPUS = {SMI["fields"]!r}, @GPUS@
asked = sys.argv[1].removeprefix("--query-gpu=").split(",")
for field in asked:
    if field not in KNOWN:
        print(f'Field "{{field}}" is not a valid field to query.\\n')
        sys.exit(2)
for index in range(GPUS):
    print(", ".join(str(index) if f == "index" else KNOWN[f] for f in asked))
"""
"""nvidia-smi with the words of a real one; an H200 that is alone has no fabric to join."""

_WORDS: Final = {"and", "or", "unless", "offset", "bool"}
_CLAUSE: Final = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR: Final = re.compile(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?![\w:]|\s*\()(\{[^}]*\})?")
_MATCHER: Final = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROLE / "files/dashboards/kvdeploy.json").read_text())
    return document


def panel_queries() -> dict[str, str]:
    """'panel, A' -> PromQL as Grafana would send it."""
    found = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"]
            for name, value in STAND_INS.items():
                expr = expr.replace(name, value)
            found[f"{panel['id']} {panel['title']}, {target['refId']}"] = expr
    return found


def render_rules(ttft_p99_s: float = 5.0) -> str:
    """As the role writes them."""
    template = (ROLE / "templates/rules.yml.j2").read_text()
    made = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    return made.from_string(template).render(monitoring_ttft_p99_s=ttft_p99_s)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(render_rules())["groups"] for rule in group["rules"]]


def alerts() -> list[str]:
    return [rule["alert"] for rule in rules() if "alert" in rule]


def selectors(expr: str) -> list[tuple[str, str]]:
    """Every (metric, matchers) of an expression; matchers with their braces, or ''."""
    bare = re.sub(r"\[[^]]*\]", "", _CLAUSE.sub("", expr))
    return [(m[1], m[2] or "") for m in _SELECTOR.finditer(bare) if m[1] not in _WORDS]


def grouped_by(expr: str) -> set[str]:
    """Labels that clauses such as by (...) name."""
    return {w.strip() for m in _CLAUSE.finditer(expr) for w in m[1].split(",") if w.strip()}


@functools.cache
def recorded() -> dict[str, list[dict[str, str]]]:
    """Metric -> the labels of its series, in the recorded samples."""
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted(SAMPLES.glob("*.prom")):
        for family in text_string_to_metric_families(path.read_text()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


def fits(labels: dict[str, str], matchers: str) -> bool:
    """Whether a recorded series has labels that the matchers want; those of targets it cannot."""
    for name, how, value in _MATCHER.findall(matchers):
        if name in TARGET_LABELS and name not in labels:
            continue
        has = labels.get(name, "")
        same = re.fullmatch(value, has) is not None if "~" in how else has == value
        if same is how.startswith("!"):
            return False
    return True


def sample(file_name: str, metric: str) -> float:
    """The value of a metric that has one series."""
    for family in text_string_to_metric_families((SAMPLES / file_name).read_text()):
        for found in family.samples:
            if found.name == metric:
                return found.value
    raise KeyError(metric)


def place_smi(path: Path, gpus: int, text: str = SMI_PROGRAM) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.replace("@GPUS@", str(gpus)))
    path.chmod(0o755)
