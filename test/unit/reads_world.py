"""Generated /metrics and audit files for the tests of `fluxion explain`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np

from fluxion_sglang.scoring.audit_file import AuditLog, record_dtype

LAYERS, GROUPS, HEADS = 3, 2, 4
MIDDLE = 1000.0
"""Bytes of the middle in all groups of a layer, per unit of `metrics`."""


def metrics(units: float, shares: list[list[float]] | None = None, *, timed: bool = True) -> str:
    """The counters of a server that decoded 10 steps and 20 tokens per unit.

    Args:
        shares: [layers][groups], share of the middle that is read; by default l * 0.2 + g * 0.1 for layer l and group
            g.
    """
    shares = shares or [[0.2 * layer + 0.1 * group for group in range(GROUPS)] for layer in range(LAYERS)]
    read = [[units * MIDDLE / GROUPS * share for share in row] for row in shares]
    tiles = sum(map(sum, read))
    samples = {
        "fluxion_decode_steps_total": 10 * units,
        "fluxion_decode_tokens_total": 20 * units,
        "fluxion_tile_bytes_total": 4 * tiles * 0.75,
        "fluxion_shared_tile_bytes_total": 4 * tiles * 0.25,
        "fluxion_metadata_bytes_total": 4 * tiles * 0.1,
        "fluxion_resident_tokens_per_request": 336,
        "fluxion_timed_steps_total": 2 * units * timed,
        'fluxion_sampled_groups_total{block="16"}': 30 * units,
        'fluxion_sampled_groups_total{block="streaming"}': 10 * units,
        **{f'fluxion_layer_middle_bytes_total{{layer="{i}"}}': MIDDLE * units for i in range(LAYERS)},
        **{
            f'fluxion_group_read_bytes_total{{group="{g}",layer="{i}"}}': read[i][g]
            for i in range(LAYERS)
            for g in range(GROUPS)
        },
        **{
            f'fluxion_step_seconds_total{{part="{part}"}}': 2 * units * seconds * timed
            for part, seconds in (
                ("resident", 0.001), ("plan", 0.001), ("tasks", 0.003), ("model", 0.004), ("between", 0.001),
            )
        },
    }  # fmt: skip
    return "".join(f"{name} {value}\n" for name, value in samples.items())


@contextmanager
def serving(text: Callable[[], str], status: int = 200) -> Iterator[str]:
    """URL of a server whose /metrics is the result of `text`, called for each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def audit(path: Path, steps: int = 50, policies: tuple[str, ...] = ("fluxion", "full"), middle: int = 100) -> Path:
    """An audit: layer l of a request with policy fluxion reads (l + 1) * 0.1, and the error of its head h is (l + h) *
    0.01."""
    log = AuditLog(path)
    for step in range(steps):
        records = np.zeros(LAYERS * len(policies), record_dtype(HEADS))
        for i, record in enumerate(records):
            layer, policy = divmod(i, len(policies))
            record["policy"], record["layer"], record["middle"] = policies[policy].encode(), layer, middle
            record["length"], record["kv_bytes"] = 500 + step, middle * 10
            exact = policies[policy] == "full"
            record["tile_bytes"] = middle * 10 if exact else middle * (layer + 1)
            record["metadata_bytes"] = 0 if exact else middle // 2
            record["error"] = 0 if exact else [(layer + head) * 0.01 for head in range(HEADS)]
        log.append(records)
    return path
