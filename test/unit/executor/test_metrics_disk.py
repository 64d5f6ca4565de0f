"""Files of the counters on a disk that is full or fills up: no signal ends the server."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import python

from fluxion_sglang.config import ConfigError
from fluxion_sglang.executor import metrics

PROGRAM = """
import os, sys
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
from fluxion_sglang.executor.metrics import EngineMetrics
found = EngineMetrics(host_pool_tokens=1, host_pool_bytes=1, resident_tokens_per_request=1)
print("made", flush=True)
with open(sys.argv[1] + "/filler", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
for label in range(200):  # each takes room that nothing was written to
    found.update({f"tasks_{label}": 1})
print("counted", flush=True)
"""


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return python("-c", PROGRAM, str(folder))


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small separate disk."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "fluxion-test", where], check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a disk")
    yield where
    subprocess.run(["umount", where], check=True)


@pytest.mark.parametrize("disk", [pytest.param("8k", marks=pytest.mark.full), "1m"], indirect=True)
def test_a_full_disk_is_refused_in_a_sentence(disk: Path) -> None:
    done = run(disk)
    assert done.returncode == 1 and "made" not in done.stdout, done
    sentence = done.stderr.strip().splitlines()[-1]
    assert "--enable-metrics keeps its counters in" in sentence and "PROMETHEUS_MULTIPROC_DIR" in sentence
    assert not list(disk.glob("*.room"))


@pytest.mark.parametrize("disk", ["6m"], indirect=True)
def test_a_disk_that_gets_full_later_stops_nothing(disk: Path) -> None:
    done = run(disk)
    assert done.returncode == 0 and done.stdout.split() == ["made", "counted"], done


def test_the_refusal_without_a_disk_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(metrics.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"no room for 4 MiB \(No space left on device\); make room, .*\.$"):
        metrics._check_room()
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    metrics._check_room()
