"""Dashboard and alerts against a real server, a real Prometheus that scrapes it, and a real Grafana if there is one."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import cases
import pytest
import requests
import tiny_model
import yaml
from places import ROOT
from server import PATIENCE_S, Server, free_port

pytestmark = pytest.mark.full

_spec = importlib.util.spec_from_file_location("deploy_queries", ROOT / "test" / "unit" / "house" / "test_deploy.py")
assert _spec is not None and _spec.loader is not None
queries = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(queries)


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[Server]:
    model = tiny_model.build(logs / "tiny-model-deploy")
    options = json.dumps({"policy": "fixed:16:0.10", "host_tokens": 2400})
    env = {"SGLANG_TEST_RETRACT": "1"}
    with Server(
        "--chunked-prefill-size", "512", model=model, fluxion=options, env=env, log=logs / "deploy.log"
    ) as started:
        yield started


def load(server: Server) -> None:
    """Requests of three policies, one with an unknown policy, and a long one that is retracted and evicted for
    others."""
    server.generate_many([(cases.filler(600, i), 60) for i in range(6)])
    for spec in ("full", "anchor", "nosuch"):
        params = {"temperature": 0, "max_new_tokens": 40, "custom_params": {"fluxion_policy": spec}}
        body = {"input_ids": cases.filler(700, 9), "sampling_params": params}
        requests.post(server.url + "/generate", json=body, timeout=PATIENCE_S)
    server.generate(cases.filler(700, 10), 20)  # a pass after the unknown policy, which publishes its count
    endless = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    body = {"rid": "gone", "input_ids": cases.filler(100, 11), "sampling_params": endless}
    client = Thread(target=requests.post, args=(server.url + "/generate",), kwargs={"json": body})
    client.start()
    while client.is_alive():  # before it has arrived, there is nothing to abort
        requests.post(server.url + "/abort_request", json={"rid": body["rid"]}, timeout=PATIENCE_S)
        client.join(0.2)


def test_every_metric_of_a_query_is_there(server: Server) -> None:
    load(server)
    text = requests.get(server.url + "/metrics", timeout=PATIENCE_S).text
    server.assert_clean()
    # Events that happened have samples; others (a device) at least have the family.
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    samples = {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line and line[0] != "#"}
    there = samples | families | {f"{name}_total" for name in families}
    missing = {name for name in queries.named() if name not in there and queries.base(name) not in there}
    assert not missing, f"not on /metrics: {sorted(missing)}"
    values = server_values(text)
    assert values["fluxion_refused_specs_total"] == 1 and values["fluxion_failed_passes_total"] == 0
    assert values["fluxion_worker_seconds_total"] > 0
    policies = {line.partition('policy="')[2].partition('"')[0] for line in text.splitlines() if "read_share_c" in line}
    assert policies - {""} == {"fixed", "full", "anchor"}


@pytest.fixture(scope="module")
def prometheus(server: Server, logs: Path) -> Iterator[str]:
    """Address of a Prometheus that scrapes the server every second and evaluates the alerts."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed; Debian has it in the package prometheus")
    scrape = {"job_name": "fluxion", "static_configs": [{"targets": [server.url.removeprefix("http://")]}]}
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [scrape],
        "rule_files": [str(queries.RULES)],
    }
    config = logs / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings))
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={logs / 'prometheus'}"]
    with served([*command, f"--web.listen-address=127.0.0.1:{port}"], url + "/-/ready", logs / "prometheus.log"):
        yield url


@contextmanager
def served(command: list[str], ready: str, log: Path) -> Iterator[None]:
    """Run a listening program until the end of the block; enter when it is ready."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        until(lambda: process.poll() is not None or answers(ready), f"{command[0]} is not ready")
        assert process.poll() is None, log.read_text()[-3000:]
        yield
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).status_code == 200
    except requests.RequestException:
        return False


def until(holds: Callable[[], bool], wrong: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, wrong
        time.sleep(0.2)


def ask(url: str, path: str, **parameters: str) -> Any:
    found = requests.get(f"{url}/api/v1/{path}", params=parameters, timeout=PATIENCE_S).json()
    assert found["status"] == "success", f"{parameters}: {found}"
    return found["data"]


def states(url: str) -> dict[str, str]:
    """States of the alerts by name; every rule has been evaluated without an error."""
    rules = [rule for group in ask(url, "rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}, rules
    return {rule["name"]: rule["state"] for rule in rules if rule["health"] == "ok"}


def test_prometheus_fills_the_dashboard(server: Server, prometheus: str) -> None:
    """Each query of a panel, with variables set as in Grafana, finds something, except those of a device."""
    until(lambda: bool(ask(prometheus, "query", query="fluxion_host_pool_tokens")["result"]), "nothing was scraped")
    load(server)
    dashboard = json.loads(queries.DASHBOARD.read_text())
    (variable,) = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable).groups()  # type: ignore[union-attr]
    (instance,) = ask(prometheus, f"label/{label}/values", **{"match[]": metric})
    assert server.url.endswith(instance)

    def empty() -> set[str]:
        """Panels with a query that finds nothing."""
        return {
            panel["title"]
            for panel in dashboard["panels"]
            for target in panel.get("targets", [])
            if not ask(prometheus, "query", query=set_as_grafana_does(target["expr"], instance))["result"]
        }

    until(lambda: empty() <= {"Device"}, f"empty: {empty()}")
    server.assert_clean()


def set_as_grafana_does(query: str, instance: str) -> str:
    return query.replace("$__rate_interval", "1m").replace("$instance", re.escape(instance).replace("\\", "\\\\"))


def test_grafana_takes_the_dashboard(server: Server, prometheus: str, logs: Path) -> None:
    """Grafana keeps every panel, and its proxy to Prometheus answers the query of the variable."""
    home = Path("/usr/share/grafana")
    if shutil.which("grafana") is None or not home.is_dir():
        pytest.skip("Grafana is not installed: Debian and PyPI do not have it; its own packages bring `grafana`")
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = ["grafana", "server", f"--homepath={home}", f"cfg:server.http_port={port}"]
    command += ["cfg:server.http_addr=127.0.0.1", f"cfg:paths.data={logs / 'grafana'}"]
    login = {"Authorization": f"Basic {base64.b64encode(b'admin:admin').decode()}"}
    with served(command, url + "/api/health", logs / "grafana.log"):
        source = {"name": "Prometheus", "type": "prometheus", "access": "proxy", "url": prometheus, "uid": "metrics"}
        made = requests.post(f"{url}/api/datasources", json=source, headers=login, timeout=PATIENCE_S)
        assert made.status_code == 200, made.text
        dashboard = json.loads(queries.DASHBOARD.read_text())
        body = {"dashboard": dashboard | {"id": None}, "overwrite": True}
        kept = requests.post(f"{url}/api/dashboards/db", json=body, headers=login, timeout=PATIENCE_S)
        assert kept.status_code == 200, kept.text
        found = requests.get(f"{url}/api/dashboards/uid/{dashboard['uid']}", headers=login, timeout=PATIENCE_S).json()
        assert len(found["dashboard"]["panels"]) == len(dashboard["panels"])
        proxy = f"{url}/api/datasources/proxy/uid/metrics/api/v1/query"
        reply = requests.get(proxy, params={"query": "fluxion_host_pool_tokens"}, headers=login, timeout=PATIENCE_S)
        assert reply.json()["data"]["result"], reply.text


def test_prometheus_sees_the_server_end(server: Server, prometheus: str) -> None:
    """Every alert is evaluated; FluxionDown is pending once the server ends, and fires a minute later."""
    until(lambda: len(states(prometheus)) == len(queries.alerts()), "not every alert was evaluated")
    assert states(prometheus)["FluxionDown"] == "inactive"
    server.stop()
    until(lambda: states(prometheus)["FluxionDown"] == "pending", "nobody saw the server end")


def server_values(text: str) -> dict[str, float]:
    """Values of samples, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            key = name.partition("{")[0]
            found[key] = found.get(key, 0.0) + float(value)
    return found
