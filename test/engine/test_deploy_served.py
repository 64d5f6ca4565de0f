"""Dashboard and alerts against a real server: every metric that they name is on its /metrics."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from threading import Thread

import cases
import pytest
import requests
import tiny_model
from server import PATIENCE_S, ROOT, Server

pytestmark = pytest.mark.full

_spec = importlib.util.spec_from_file_location("deploy_queries", ROOT / "test" / "unit" / "test_deploy.py")
assert _spec is not None and _spec.loader is not None
queries = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(queries)


def test_every_metric_of_a_query_is_there(logs: Path) -> None:
    """After requests of two policies, one wrong one, and a long one that is retracted and evicted for others."""
    model = tiny_model.build(logs / "tiny-model-deploy")
    options = json.dumps({"policy": "fixed:16:0.10", "host_tokens": 2400})
    env = {"SGLANG_TEST_RETRACT": "1"}
    with Server(
        "--chunked-prefill-size", "512", model=model, fluxion=options, env=env, log=logs / "deploy.log"
    ) as server:
        server.generate_many([(cases.filler(600, i), 60) for i in range(6)])
        for spec in ("full", "nosuch"):
            params = {"temperature": 0, "max_new_tokens": 40, "custom_params": {"fluxion_policy": spec}}
            body = {"input_ids": cases.filler(700, 9), "sampling_params": params}
            requests.post(server.url + "/generate", json=body, timeout=PATIENCE_S)
        server.generate(cases.filler(700, 10), 20)  # a pass after the wrong one: it brings the count
        endless = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
        body = {"rid": "gone", "input_ids": cases.filler(100, 11), "sampling_params": endless}
        client = Thread(target=requests.post, args=(server.url + "/generate",), kwargs={"json": body})
        client.start()
        while client.is_alive():  # until it has come, there is nothing to abort
            requests.post(server.url + "/abort_request", json={"rid": body["rid"]}, timeout=PATIENCE_S)
            client.join(0.2)
        text = requests.get(server.url + "/metrics", timeout=PATIENCE_S).text
        server.assert_clean()
    # Of what has happened there are samples; of what has not (a device), at least the family.
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    samples = {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line and line[0] != "#"}
    there = samples | families | {f"{name}_total" for name in families}
    missing = {name for name in queries.named() if name not in there and queries.base(name) not in there}
    assert not missing, f"not on /metrics: {sorted(missing)}"
    values = server_values(text)
    assert values["fluxion_refused_specs_total"] == 1 and values["fluxion_failed_passes_total"] == 0
    assert values["fluxion_worker_seconds_total"] > 0
    policies = {line.partition('policy="')[2].partition('"')[0] for line in text.splitlines() if "read_share_c" in line}
    assert policies - {""} == {"fixed", "full"}


def server_values(text: str) -> dict[str, float]:
    """Sums over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            key = name.partition("{")[0]
            found[key] = found.get(key, 0.0) + float(value)
    return found
