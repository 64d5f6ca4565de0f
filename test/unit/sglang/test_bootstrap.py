"""The two options on every surface of SGLang, and the look of a refusal in a terminal.

Importing SGLang takes seconds, so one process visits all surfaces (`surfaces` below, run as a script), and the tests
check its findings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluxion_sglang.sglang import bootstrap, compat

NEEDLE = str(Path(__file__).resolve().parents[3] / "models" / "needle")
CONFIG = '{"policy": "fixed:16:0.05"}'


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without variables that select plug-ins."""
    kept = {k: v for k, v in os.environ.items() if k not in ("SGLANG_PLUGINS", "SGLANG_PLATFORM")}
    return {**kept, **changes}


# --- the script


def surfaces(folder: Path) -> dict[str, Any]:
    """Runs in a process of its own: help texts, records made in all ways, a spawned process."""
    found: dict[str, Any] = {"at_import": _after_import()}
    for name, words in {
        "launch_server": ["sglang.launch_server"],
        "one_batch": ["sglang.benchmark.one_batch"],
        "bench_one_batch": ["fluxion_sglang.bench_one_batch"],
        "serve": ["sglang.cli.main:main", "serve", "--model-type", "llm"],
    }.items():
        found[f"{name} --help"] = _help(words)

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    words = ["--model-path", NEEDLE, "--device", "cpu"]
    yaml = folder / "server.yaml"
    yaml.write_text("enable-fluxion: true\nfluxion-config: {policy: 'fixed:16:0.05'}\n")
    records = {
        "flags": prepare_server_args([*words, "--enable-fluxion", "--fluxion-config", CONFIG]),
        "yaml": prepare_server_args([*words, "--config", str(yaml)]),
        "keywords": Engine.server_args_class(model_path=NEEDLE, enable_fluxion=True, fluxion_config=CONFIG),
        "none": ServerArgs(model_path=NEEDLE, device="cpu"),
    }
    for name, record in records.items():
        found[name] = [record.enable_fluxion, record.fluxion_config]

    records["flags"].resolve_once()
    records["none"].resolve_once()
    resolved = records["flags"].resolved_dict()
    found["resolved"] = {key: resolved[key] for key in ("attention_backend", "page_size", "enable_fluxion")}

    import multiprocessing

    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_in_spawned_process, args=(records["none"], records["flags"], send))
    child.start()
    found["spawned"] = receive.recv() if receive.poll(240) else "no answer"
    child.join(10)
    return found


def _after_import() -> dict[str, Any]:
    import sglang  # noqa: F401

    # First the platform, which is resolved inside `import sglang`, before the options are assembled.
    early = "sglang.srt.server_args" in sys.modules
    from sglang.srt.platforms import current_platform

    ours = [name for name in sys.modules if name.startswith("fluxion_sglang")]
    return {"platform": type(current_platform).__name__, "too late": early, "modules": sorted(ours)}


def _help(words: list[str]) -> str:
    import contextlib
    import importlib
    import io
    import runpy

    target, *arguments = words
    sys.argv = [target, *arguments, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        if ":" in target:
            module, function = target.split(":")
            getattr(importlib.import_module(module), function)()
        else:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
    return out.getvalue()


def _in_spawned_process(without: Any, with_flag: Any, send: Any) -> None:
    """What a scheduler or a rank of one_batch does: unpickle a record, install it, and continue to the pools."""
    import pkgutil

    from sglang.srt.runtime_context import get_context, publish

    from fluxion_sglang.sglang.plugin import HOOKS, assert_hooks_applied

    def targets() -> list[Any]:
        return [pkgutil.resolve_name(need.path) for need in HOOKS]

    def unchanged(now: list[Any], then: list[Any]) -> bool:
        return all(a is b for a, b in zip(now, then, strict=True))

    originals = targets()
    publish(without, role="scheduler")
    answer: dict[str, Any] = {
        "untouched without the flag": unchanged(targets(), originals),
        "hooked without": get_context().config_bag("fluxion").hooked,
    }
    publish(with_flag, role="scheduler")
    assert_hooks_applied()
    answer |= {
        "record": [with_flag.enable_fluxion, with_flag.fluxion_config],
        "hooked with": get_context().config_bag("fluxion").hooked,
        "original inside": unchanged([target.__wrapped__ for target in targets()], originals),
        "applied": [compat.is_applied(need, hook) for need, hook in HOOKS.items()],
    }
    # Return to a server without the flag in the same process: the hooks stay and pass everything through.
    publish(without, role="scheduler")
    first = SimpleNamespace(server_args=without)
    calls = [hook(lambda *given, **named: [given, named], first, named=1) for hook in HOOKS.values()]
    answer["passed through"] = all(call == [(first,), {"named": 1}] for call in calls)
    heavy = ("memory.pools", "steps.backend", "containment.passes")
    answer["modules"] = [name for name in heavy if f"fluxion_sglang.sglang.{name}" in sys.modules]
    send.send(answer)


if __name__ == "__main__":
    print("FOUND" + json.dumps(surfaces(Path(sys.argv[1]))))


# --- the tests


needs_processes = pytest.mark.full  # every way into SGLang, each in a process of its own


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, __file__, str(tmp_path_factory.mktemp("surfaces"))]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, run.stderr[-4000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND"))
    return result


@needs_processes
def test_activation_is_light_and_in_time(found: dict[str, Any]) -> None:
    import torch

    early = found["at_import"]
    assert early["too late"] is False
    assert (early["platform"] == "PortableCpuPlatform") == (not torch.cuda.is_available())
    assert set(early["modules"]) <= {
        "fluxion_sglang", "fluxion_sglang.sglang", "fluxion_sglang.sglang.bootstrap", "fluxion_sglang.sglang.compat",
        "fluxion_sglang.sglang.start.server_fields", "fluxion_sglang.sglang.start.cpu_platform",
    }  # fmt: skip


@needs_processes
@pytest.mark.parametrize("surface", ["launch_server", "serve", "one_batch", "bench_one_batch"])
def test_the_options_are_in_the_help(found: dict[str, Any], surface: str) -> None:
    text = found[f"{surface} --help"]
    assert "--enable-fluxion" in text
    assert "--fluxion-config FLUXION_CONFIG" in text
    assert "fluxion" in text.split("--attention-backend", 1)[1].split("}", 1)[0]  # a legal choice of the backend


@needs_processes
@pytest.mark.parametrize("surface", ["flags", "yaml", "keywords"])
def test_the_options_reach_the_record(found: dict[str, Any], surface: str) -> None:
    enabled, config = found[surface]
    assert enabled is True
    assert json.loads(config) == json.loads(CONFIG)


@needs_processes
def test_the_options_are_off_by_default(found: dict[str, Any]) -> None:
    assert found["none"] == [False, None]


@needs_processes
def test_the_flag_decides_backend_and_page_size(found: dict[str, Any]) -> None:
    assert found["resolved"] == {"attention_backend": "fluxion", "page_size": 16, "enable_fluxion": True}


@needs_processes
def test_a_spawned_process_gets_options_and_hooks(found: dict[str, Any]) -> None:
    spawned = found["spawned"]
    assert spawned["record"] == [True, CONFIG]
    assert spawned["untouched without the flag"] is True
    assert (spawned["hooked without"], spawned["hooked with"]) == (False, True)
    assert spawned["original inside"] is True
    assert spawned["applied"]
    assert all(spawned["applied"])
    assert spawned["passed through"] is True
    assert spawned["modules"] == []  # pools and backend are imported when a pool is built


SERVE = ["-c", "from sglang.cli.main import main; main()", "serve"]


@needs_processes
@pytest.mark.parametrize("program", [["-m", "sglang.launch_server"], SERVE])
def test_a_refusal_is_one_line_at_a_terminal(program: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", *program, "--model-path", NEEDLE]
    command += ["--device", "cpu", "--enable-fluxion", "--fluxion-config", '{"windw": 512}']
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "did you mean 'window'?" in errors[0]


# --- activation that goes wrong


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def install() -> None:
        raise AttributeError("no collect_input_fields")

    monkeypatch.setattr(bootstrap, "_install", install)
    monkeypatch.setattr(bootstrap, "_has_own_platform", lambda: True)
    monkeypatch.setattr(compat, "activation_problem", None)
    return monkeypatch


def test_the_cpu_platform_has_what_sglang_s_profiler_asks_for() -> None:
    import sglang  # noqa: F401 (it imports the platform when it is ready for it)
    import torch

    from fluxion_sglang.sglang.start.cpu_platform import PortableCpuPlatform

    platform = PortableCpuPlatform()
    assert hasattr(torch.profiler.ProfilerActivity, platform.get_torch_profiler_activity_str())
    with torch.profiler.profile(activities=[platform.get_torch_profiler_activity()]) as profile:
        torch.ones(2).sum()
    assert any("sum" in event.key for event in profile.key_averages())


def test_a_failed_activation_leaves_sglang_alone(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(sys, "argv", ["sglang", "serve"])
    assert bootstrap.activate() is None
    assert compat.activation_problem is not None
    assert "no collect_input_fields" in compat.activation_problem


def test_a_failed_activation_stops_who_asks_for_the_flag(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(sys, "argv", ["sglang", "serve", "--enable-fluxion"])
    with pytest.raises(SystemExit) as caught:
        bootstrap.activate()
    assert str(caught.value.code).endswith("leave the option out.")
    assert "\n" not in str(caught.value.code)


@pytest.mark.parametrize(("cuda", "cpu_engine", "own"), [(True, "0", True), (False, "1", True), (False, "0", False)])
def test_the_cpu_platform_is_for_machines_without_another(
    cuda: bool, cpu_engine: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: cuda)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", cpu_engine)
    monkeypatch.setattr(bootstrap, "_install", lambda: None)
    assert (bootstrap.activate() is None) == own
