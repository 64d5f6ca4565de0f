"""The `fluxion` command and its doctor."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from places import ROOT
from rich.console import Console

from fluxion_sglang import __version__, cli, environment
from fluxion_sglang.commands import doctor, needle
from fluxion_sglang.commands.doctor import FAIL, OK, WARN, Check
from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.device import flashinfer, library
from fluxion_sglang.native import without_best_isa

MACHINE: dict[str, Any] = {
    "cores": [0, 2, 1, 3],
    "numa": [{"id": 0, "cores": [0, 1]}, {"id": 1, "cores": [2, 3]}],
    "huge_pages": "madvise",
    "cgroup_limit_bytes": -1,
    "mem_total_bytes": 64 << 30,
    "available_bytes": 60 << 30,
    "isas": ["scalar", "avx2"],
    "isa_of_cpu": "avx2",
    "isa": "avx2",
    "isa_error": "",
}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A native library that loads, on a machine without problems."""
    module: Any = ModuleType("fluxion_sglang.native")
    module.library = lambda: object()
    module.library_path = lambda: "/somewhere/libfluxion.so"
    module.topology = lambda: dict(MACHINE)
    module.without_best_isa = without_best_isa
    monkeypatch.setitem(sys.modules, "fluxion_sglang.native", module)
    monkeypatch.setattr("fluxion_sglang.native", module, raising=False)
    return module


@pytest.fixture
def healthy(native: ModuleType, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A healthy installation. The test of compat, which imports SGLang, checks SGLang's names."""
    monkeypatch.setattr(doctor, "_hooks", lambda: iter([Check("hooks", OK, "as expected")]))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    for name in environment.proxies():
        monkeypatch.delenv(name)
    return monkeypatch


def one(name: str) -> Check:
    found = [check for check in doctor.run_checks() if check.name == name]
    assert len(found) == 1, found
    return found[0]


def test_a_healthy_machine_passes(healthy: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [check.name for check in doctor.run_checks()]
    assert names == [
        *("python", "fluxion-sglang", "sglang", "torch", "apache-tvm-ffi", "plug-in"),
        *("hooks", "native library", "instruction set", "cores", "huge pages", "host memory"),
        *("disk", "shared memory", "gpu"),
    ]
    for name in names:
        assert any(line.startswith("OK") and f" {name} " in line for line in lines), name
    assert any(line.startswith("Ready") for line in lines)
    assert "4 cores on 2 NUMA nodes" in "\n".join(lines)
    assert "avx2 (available: scalar, avx2)" in "\n".join(lines)
    assert metadata.version("sglang") in "\n".join(lines)


def test_json(healthy: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    hooks = {"name": "hooks", "status": "OK", "found": "as expected", "advice": "", "command": ""}
    assert hooks in report["checks"]
    assert report["next"] == doctor.next_command(doctor.run_checks())
    assert "--enable-fluxion" in report["serve"]


def test_a_library_that_does_not_load_fails(
    healthy: pytest.MonkeyPatch, native: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("The native library does not exist; reinstall fluxion-sglang.")

    healthy.setattr(native, "library", broken)
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    failed = [check for check in report["checks"] if check["status"] == FAIL]
    assert [check["name"] for check in failed] == ["native library"]
    assert "reinstall" in failed[0]["advice"]
    assert report["next"] == failed[0]["command"]
    assert " install " in report["next"]
    assert report["serve"] is None
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Not ready") for line in lines)
    assert lines[-1].strip() == report["next"]


@pytest.mark.parametrize(
    ("change", "name", "status", "words"),
    [
        ({"isa": "", "isa_error": "FLUXION_ISA=x is not one"}, "instruction set", FAIL, "FLUXION_ISA=x"),
        ({"isa": "scalar", "isas": ["scalar"], "isa_of_cpu": "scalar"}, "instruction set", WARN, "slow"),
        ({"isa": "avx2", "isa_of_cpu": "amx"}, "instruction set", WARN, "built for another machine, without amx"),
        ({"cores": [0]}, "cores", WARN, "only core"),
        ({"huge_pages": "never"}, "huge pages", WARN, "transparent_hugepage"),
        ({"available_bytes": 1 << 30}, "host memory", WARN, "small"),
    ],
)
def test_what_the_machine_lacks_is_said(
    healthy: pytest.MonkeyPatch, native: Any, change: dict[str, Any], name: str, status: str, words: str
) -> None:
    healthy.setattr(native, "topology", lambda: MACHINE | change)
    check = one(name)
    assert check.status == status
    assert words in check.advice


def test_a_control_group_limit_is_shown(healthy: pytest.MonkeyPatch, native: Any) -> None:
    healthy.setattr(native, "topology", lambda: MACHINE | {"cgroup_limit_bytes": 8 << 30})
    assert "limited to 8.0 GiB" in one("host memory").found


@pytest.mark.parametrize(
    ("variable", "value", "status", "command"),
    [
        ("SGLANG_PLUGINS", "other", FAIL, "export SGLANG_PLUGINS=other,fluxion"),
        ("SGLANG_PLUGINS", "other, fluxion", OK, ""),
        ("SGLANG_PLATFORM", "other", FAIL, "unset SGLANG_PLATFORM"),
        ("SGLANG_PLATFORM", "fluxion", OK, ""),
    ],
)
def test_variables_that_keep_the_plug_in_out(
    healthy: pytest.MonkeyPatch, variable: str, value: str, status: str, command: str
) -> None:
    healthy.setenv(variable, value)
    check = one("plug-in")
    assert (check.status, check.command) == (status, command)
    assert (variable in check.found) == (status == FAIL)


def test_an_unsupported_sglang_fails(healthy: pytest.MonkeyPatch) -> None:
    real = metadata.version
    healthy.setattr(metadata, "version", lambda name: "0.5.24" if name == "sglang" else real(name))
    check = one("sglang")
    assert check.status == FAIL
    assert "0.5.23" in check.advice
    assert "sglang>=0.5.23,<0.5.24" in shlex.split(check.command)


def test_a_missing_distribution_fails(healthy: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "apache-tvm-ffi":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    healthy.setattr(metadata, "version", version)
    assert one("apache-tvm-ffi").status == FAIL


@pytest.fixture
def two_gpus(healthy: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    import torch

    healthy.setattr(torch.cuda, "is_available", lambda: True)
    healthy.setattr(torch.cuda, "device_count", lambda: 2)
    healthy.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    return healthy


def test_a_gpu_without_its_library_fails(two_gpus: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag also refuses to start there."""
    two_gpus.setattr(library, "device_library_path", lambda backend: Path("/nowhere") / backend)
    library.load.cache_clear()
    check = one("gpu")
    assert check.status == FAIL
    assert "GPU 0, GPU 1: " in check.found and "build fluxion-sglang with FLUXION_CUDA=on" in check.found
    assert 'CUDA_VISIBLE_DEVICES=""' in check.advice and "--device cpu" in check.advice
    assert "install" in check.command if shutil.which("nvcc") else check.command.startswith("export ")
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].strip() == check.command


def device_library() -> SimpleNamespace:
    return SimpleNamespace(info=lambda: {"capability": "9.0"})


def test_a_gpu_with_its_library(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(library, "load", lambda backend: device_library())
    two_gpus.setitem(sys.modules, "flashinfer", None)  # an import of it fails
    two_gpus.setattr(flashinfer, "module", flashinfer.module.__wrapped__)
    check = one("gpu")
    assert (check.status, check.found) == (WARN, "GPU 0, GPU 1; compute capability 9.0")
    assert "CUDA_VISIBLE_DEVICES" in check.advice and "--device cpu" in check.advice
    check = one("flashinfer")
    assert check.status == FAIL and "does not import" in check.found and "--device cpu" in check.found
    two_gpus.setitem(sys.modules, "flashinfer", SimpleNamespace())
    assert one("flashinfer").status == OK


def test_the_commands_of_a_machine_without_a_gpu(healthy: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both name the bundled model, from any working directory."""
    healthy.setattr(doctor, "_gpu", lambda: iter([Check("gpu", OK, doctor._NO_GPU)]))
    checks = doctor.run_checks()
    healthy.chdir(ROOT)
    assert doctor.next_command(checks).endswith("try models/needle")
    serve = shlex.split(doctor.serve_command(checks))
    assert serve[1:5] == ["-m", "sglang.launch_server", "--model-path", "models/needle"]
    assert serve[5:8] == ["--enable-fluxion", "--device", "cpu"]
    healthy.chdir(tmp_path)
    assert doctor.next_command(checks).endswith(f"try {ROOT}/models/needle")
    words = shlex.split(doctor.next_command(checks))
    assert Path(shutil.which(words[0]) or words[0]).exists()
    healthy.setattr(needle, "MODEL", tmp_path / "nowhere")
    assert doctor.next_command(checks).endswith("try MODEL")


def test_a_gpu_is_served_on_without_device_cpu(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(library, "load", lambda backend: device_library())
    assert "--device" not in doctor.serve_command(doctor.run_checks())


def test_the_first_failure_is_mended_first() -> None:
    checks = [
        Check("a", OK, "fine"),
        Check("b", WARN, "slow", "do c"),
        Check("c", FAIL, "gone", "do d", "mend c"),
        Check("e", FAIL, "gone", "do f", "mend e"),
    ]
    assert not doctor.ready(checks)
    assert doctor.next_command(checks) == "mend c"


def test_little_space_is_a_warning(healthy: pytest.MonkeyPatch) -> None:
    healthy.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=64 << 20))
    assert one("disk").status == one("shared memory").status == WARN
    assert "--shm-size" in one("shared memory").advice


def test_a_terminal_gets_the_same_words_and_a_command_in_one_piece(healthy: pytest.MonkeyPatch) -> None:
    """At any width: a command that users paste must not be broken."""
    healthy.setattr(doctor, "_gpu", lambda: iter([Check("gpu", OK, doctor._NO_GPU)]))
    checks = [*doctor.run_checks(), Check("x", WARN, "[found]", "advised")]
    plain, narrow = io.StringIO(), io.StringIO()
    doctor.print_report(checks, Console(file=plain))
    doctor.print_report(checks, Console(file=narrow, force_terminal=True, width=50, color_system=None))
    assert "\x1b" not in plain.getvalue()
    assert set(plain.getvalue().split()) - set(narrow.getvalue().split()) <= {
        word for word in plain.getvalue().split() if len(word) > 20
    }
    for out in (plain, narrow):
        assert f"  {doctor.serve_command(checks)}\n" in out.getvalue()
        assert out.getvalue().splitlines()[-1] == f"  {doctor.next_command(checks)}"


def test_missing_entry_points_fail(healthy: pytest.MonkeyPatch) -> None:
    healthy.setattr(metadata, "entry_points", lambda group: [])
    check = one("plug-in")
    assert "install the package" in check.advice
    # An editable installation of the checkout that these tests run in.
    assert "pip install" in check.command and " -e " in check.command


def test_what_the_environment_has_in_the_way_is_said(healthy: pytest.MonkeyPatch, tmp_path: Path) -> None:
    healthy.setenv("http_proxy", "http://proxy.invalid:3128")
    assert one("proxy").status == OK and "http_proxy set" in one("proxy").found
    healthy.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    check = one("sockets")
    assert (check.status, check.command) == (FAIL, "export TMPDIR=/tmp") and "such as /tmp" in check.advice


def test_a_check_that_breaks_does_not_stop_the_others(healthy: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no /proc")

    broken.__name__ = "_gpu"
    healthy.setattr(doctor, "_gpu", broken)
    checks = doctor.run_checks()
    assert checks[-1] == Check("gpu", FAIL, "OSError: no /proc", "please report this", checks[-1].command)
    assert checks[-1].command.endswith("doctor --json")
    assert len(checks) == 15


def test_options_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["options"]) == 0
    out = capsys.readouterr().out
    for option in FluxionConfig.options():
        assert option.key in out
        assert option.doc in out


def test_a_reader_that_leaves_early_is_no_error_to_look_at() -> None:
    """`fluxion options | head`: no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fluxion_sglang", "options"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ""


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert __version__ in capsys.readouterr().out
    assert __version__ == metadata.version("fluxion-sglang")
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2


def test_a_command_of_another_package_that_is_broken_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = metadata.EntryPoint("bench-quality", "fluxion_nowhere.command", cli.ENTRY_POINTS)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    assert cli.main(["options"]) == 0
    assert "fluxion bench quality is left out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "quality"])


def test_the_benchmarks_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["bench"]) == 0
    said = capfd.readouterr().out
    assert "one_batch: time per output token, with the flag and without (speed)" in said and "quality: " in said
    assert cli.main(["bench", "no_such", "--quick"]) == 2
    assert "there is no benchmark 'no_such'" in capfd.readouterr().err
    monkeypatch.setattr("fluxion_sglang.commands.provenance.ROOT", tmp_path)
    assert cli.main(["bench", "one_batch"]) == 2
    assert "run in a checkout" in capfd.readouterr().err
