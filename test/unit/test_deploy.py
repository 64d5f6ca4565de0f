"""Dashboard and alerts in deploy/: what they name exists, and the runbook has a section for every alert."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fluxion_sglang.executor.metrics import described

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus-rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
RUNBOOK = ROOT / "docs" / "operations.md"

_NAME = re.compile(r"\b(?:fluxion|sglang)[_:][a-z0-9_:]+")
_HISTOGRAM = ("_bucket", "_sum", "_count")


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[str]:
    yield from (rule["expr"] for rule in alerts())
    dashboard = json.loads(DASHBOARD.read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", []))
    yield from (
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    )


def named() -> set[str]:
    """Every metric of Fluxion or SGLang that a query names."""
    return {name for query in queries() for name in _NAME.findall(query)}


def base(name: str) -> str:
    """The metric that a series of a histogram belongs to."""
    return next((name.removesuffix(end) for end in _HISTOGRAM if name.endswith(end)), name)


def test_metrics_of_fluxion_are_described() -> None:
    own = {name for name in named() if name.startswith("fluxion_")}
    assert len(own) > 10
    assert {base(name) for name in own} <= described().keys(), "see executor/metrics.py for what there is"


def test_metrics_of_sglang_are_in_its_code() -> None:
    """A server's own page is asked in test/engine/test_deploy_served.py."""
    import sglang

    folder = Path(sglang.__file__).parent / "srt" / "observability"
    there = set(re.findall(r'"(sglang:[a-z_0-9]+)"', "".join(path.read_text() for path in folder.rglob("*.py"))))
    asked = {base(name) for name in named() if name.startswith("sglang:")}
    assert asked and asked <= there


def test_every_alert_says_what_to_do() -> None:
    page = RUNBOOK.read_text()
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert f"\n### {rule['alert']}\n" in page, f"docs/operations.md has no section {rule['alert']}"
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in {"page", "ticket"}
    sections = set(re.findall(r"^### (Fluxion\w+)$", page, re.M))
    assert sections == {rule["alert"] for rule in alerts()}, "a section of an alert that is no more"


def test_panels_can_be_read() -> None:
    """Each has a title, a unit and a query; none lies over another."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert panel["title"] and not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"] and panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_prometheus_takes_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; Debian has it in the package prometheus")
    run = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
