"""Dashboard and alerts in deploy/: all names in them exist, and the runbook has a section for every alert."""

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
from places import ROOT

from fluxion_sglang.executor.metrics import RINGS, described

RULES = ROOT / "deploy" / "prometheus-rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
RUNBOOK = ROOT / "docs" / "operations.md"

_NAME = re.compile(r"\b(?:fluxion|sglang)[_:][a-z0-9_:]+")
EITHER = "sglang[:_]"
"""Prefix of SGLang's metrics in queries: an OpenMetrics client may replace the colon."""
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
    """Every metric of Fluxion or SGLang in a query, by its name on a server's page."""
    return {name for query in queries() for name in _NAME.findall(query.replace(EITHER, "sglang:"))}


def base(name: str) -> str:
    """The metric to which a series of a histogram belongs."""
    return next((name.removesuffix(end) for end in _HISTOGRAM if name.endswith(end)), name)


def test_metrics_of_fluxion_are_described() -> None:
    own = {name for name in named() if name.startswith("fluxion_")}
    assert len(own) > 10
    assert {base(name) for name in own} <= described().keys(), "see executor/metrics.py for what there is"


def test_metrics_of_sglang_are_in_its_code() -> None:
    """test/engine/test_deploy_served.py checks the page of a real server."""
    import sglang

    folder = Path(sglang.__file__).parent / "srt" / "observability"
    there = set(re.findall(r'"(sglang:[a-z_0-9]+)"', "".join(path.read_text() for path in folder.rglob("*.py"))))
    asked = {base(name) for name in named() if name.startswith("sglang:")}
    assert asked and asked <= there


def test_metrics_of_sglang_are_found_under_both_names() -> None:
    asked = [query for query in queries() if "sglang" in query]
    assert asked and not [query for query in asked if "sglang:" in query or "sglang_" in query]


def test_no_query_is_of_what_stands_still_during_a_long_answer() -> None:
    assert not named() & {"sglang:generation_tokens_total", "sglang:prompt_tokens_total"}


def test_every_alert_says_what_to_do() -> None:
    page = RUNBOOK.read_text()
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert f"\n### {rule['alert']}\n" in page, f"docs/operations.md has no section {rule['alert']}"
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in {"page", "ticket"}
    sections = set(re.findall(r"^### (Fluxion\w+)$", page, re.M))
    assert sections == {rule["alert"] for rule in alerts()}, "a section of an alert that is no more"


def test_panels_can_be_read() -> None:
    """Each has a title, a unit and a query; panels do not overlap."""
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


# Two hours of a server's series at one-minute steps, in promtool's notation. No alert may fire: most requests read
# everything, and the only finished one took half an hour.
WELL = {
    'up{job="fluxion"}': "1x120",
    "sglang:num_running_reqs": "4x120",
    "sglang:num_queue_reqs": "0x120",
    "sglang:token_usage": "0.97x120",
    "sglang:generation_tokens_total": "0x29 18000x90",
    'sglang:realtime_tokens_total{mode="prefill_compute"}': "4000x120",
    'sglang:realtime_tokens_total{mode="decode"}': "0+600x120",
    "sglang:num_retracted_requests_total": "0+1x120",
    "fluxion_failed_passes_total": "2x120",
    "fluxion_refused_specs_total": "0+1x120",
    'fluxion_contained_failures_total{ring="door"}': "0+5x120",
    'fluxion_contained_failures_total{ring="loop"}': "1x120",
    "fluxion_rebuilt_pools_total": "1x120",
    "fluxion_middle_tokens_total": "0+100x120",
    "fluxion_read_tokens_total": "0+92x120",
    'fluxion_read_share_count{policy="full"}': "0+9x120",
    'fluxion_read_share_sum{policy="full"}': "0+9x120",
    'fluxion_read_share_count{policy="fluxion"}': "0+1x120",
    'fluxion_read_share_sum{policy="fluxion"}': "0+0.2x120",
    "fluxion_tasks_total": "0+100x120",
    "fluxion_widened_tasks_total": "0+5x120",
    "fluxion_device_step_seconds_total": "0+50x120",
    "fluxion_device_wait_seconds_total": "0+5x120",
}
ILL = {
    "FluxionDown": {'up{job="fluxion"}': "0x120"},
    "FluxionStandsStill": {'sglang:realtime_tokens_total{mode="decode"}': "600x120"},
    "FluxionFailedPasses": {"fluxion_failed_passes_total": "2x110 3x10"},
    "FluxionPoolFull": {"sglang:num_queue_reqs": "3x120"},
    "FluxionRetracts": {"sglang:num_retracted_requests_total": "0+6x120"},
    "FluxionReadsTooMuch": {'fluxion_read_share_sum{policy="fluxion"}': "0+0.7x120"},
    "FluxionGuardWorks": {"fluxion_widened_tasks_total": "0+40x120"},
    "FluxionRefusesSpecs": {"fluxion_refused_specs_total": "0+12x120"},
    "FluxionContains": {'fluxion_contained_failures_total{ring="loop"}': "1x115 2x5"},
    "FluxionRebuilds": {"fluxion_rebuilt_pools_total": "1x100 2x20"},
    "FluxionDeviceWaits": {"fluxion_device_wait_seconds_total": "0+40x120"},
}
"""Changes to WELL that must trigger an alert."""


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed; Debian has it in the package prometheus")
    return found


def test_prometheus_takes_the_rules(promtool: str) -> None:
    run = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def evaluation(alert: str | None, colon: str) -> dict[str, Any]:
    """Input of promtool: two hours of a server with a fault, or none, beside a healthy server; and the expected
    alerts."""
    series = [{"series": instance(name, "well"), "values": values} for name, values in WELL.items()]
    if alert:
        series += [{"series": instance(name, "ill"), "values": v} for name, v in (WELL | ILL[alert]).items()]
    series = [{**one, "series": one["series"].replace("sglang:", f"sglang{colon}")} for one in series]
    firing = [{"labels": f'{{alertname="{alert}", instance="ill"}}', "value": 1}] if alert else []
    query = 'count by (alertname, instance) (ALERTS{alertstate="firing"})'
    return {
        "name": f"{alert} {colon}",
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [{"expr": query, "eval_time": "2h", "exp_samples": firing}],
    }


def test_an_alert_comes_when_it_should_and_no_other_does(promtool: str, tmp_path: Path) -> None:
    named = [None, *(rule["alert"] for rule in alerts())]
    tests = [evaluation(alert, colon) for alert in named for colon in ":_"]
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    run = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def instance(series: str, name: str) -> str:
    """The series with the label that Prometheus adds for one server."""
    metric, _, labels = series.rstrip("}").partition("{")
    return f'{metric}{{{labels}{"," * bool(labels)}instance="{name}"}}'


def test_every_ring_that_counts_has_a_sample_from_the_start() -> None:
    sources = (ROOT / "python" / "fluxion_sglang" / "sglang" / "containment").glob("*.py")
    named = {ring for source in sources for ring in re.findall(r'contained\("(\w+)"\)', source.read_text())}
    assert named == set(RINGS)
