"""Without the flag the plug-in leaves no trace in SGLang.

The same script runs in two processes, with the plug-in active and with it kept out, and all its observations must be
equal. Two visible differences are excepted by name: the two options themselves (with "fluxion" as a choice of attention
backend), and, on a machine without an accelerator, the CPU platform, without which SGLang does not start there. Both
processes use that platform, so that there is something to compare.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fluxion_sglang.sglang.plugin import HOOKS

NEEDLE = str(Path(__file__).resolve().parents[3] / "models" / "needle")


def without_address(thing: object) -> str:
    """The repr without its address, which differs between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def observe() -> dict[str, Any]:
    """Runs in a process of its own: the work of a scheduler up to its pools, and the observations there."""
    import hashlib
    import importlib
    import inspect
    import signal
    import threading

    before = {"env": dict(os.environ), "hook": sys.excepthook, "finders": list(map(without_address, sys.meta_path))}
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=NEEDLE, random_seed=1)
    args.resolve_once()
    from sglang.srt.runtime_context import get_context, publish

    publish(args, role="scheduler")
    from sglang.srt.arg_groups import overrides
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.model_executor import model_runner
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins.hook_registry import HookRegistry

    def code(function: Any) -> list[Any]:
        """Identifies a function: hooked ones have another file, a closure and the original inside."""
        body = function.__code__
        return [
            Path(inspect.unwrap(function).__code__.co_filename).name,  # SGLang decorates some
            body.co_firstlineno,
            hashlib.sha256(body.co_code).hexdigest(),
            function.__closure__ is None,
            hasattr(function, "__wrapped__"),
            without_address(inspect.signature(function)),
        ]

    def module_code(module: Any) -> dict[str, Any]:
        functions: dict[str, Any] = {}
        for name, value in vars(module).items():
            owner = getattr(value, "__module__", None)
            if inspect.isfunction(value) and owner == module.__name__:
                functions[name] = code(value)
            elif inspect.isclass(value) and owner == module.__name__:
                for method, raw in vars(value).items():
                    raw = getattr(raw, "__func__", raw)
                    if inspect.isfunction(raw):
                        functions[f"{name}.{method}"] = code(raw)
        return functions

    modules = [model_runner, attention_registry, overrides]
    modules += [importlib.import_module(need.module) for need in HOOKS]
    resolved = args.resolved_dict()
    return {
        "resolved": {key: repr(value) for key, value in resolved.items()},
        "record": repr(args),
        "decisions": [[source, sorted(fields)] for source, fields in args._resolved_overrides],
        "bags": sorted(get_context()._config_bags),
        "platform": type(current_platform).__name__,
        "functions": {module.__name__: module_code(module) for module in modules},
        "attention backends": sorted(attention_registry.ATTENTION_BACKENDS),
        "hooks": sorted(HookRegistry._hooks),
        "patched": sorted(HookRegistry._patched),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": {k: v for k, v in os.environ.items() if before["env"].get(k) != v},
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "excepthook": sys.excepthook is before["hook"],
        "finders": [name for name in map(without_address, sys.meta_path) if name not in before["finders"]],
        "modules of ours": sorted(name for name in sys.modules if name.startswith("fluxion_sglang")),
    }


if __name__ == "__main__":
    print("FOUND" + json.dumps(observe()))


PLATFORM_ALONE = """
from fluxion_sglang.sglang.bootstrap import _CPU_PLATFORM, _has_own_platform

def activate():
    return None if _has_own_platform() else _CPU_PLATFORM
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    from test_bootstrap import environment

    # A plug-in that only provides the CPU platform.
    site = tmp_path_factory.mktemp("site")
    (site / "platform_alone.py").write_text(PLATFORM_ALONE)
    info = site / "platform_alone-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: platform-alone\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.platforms]\nplatform-alone = platform_alone:activate\n")
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))

    # In parallel: each mostly waits for imports.
    runs = [
        subprocess.Popen(
            [sys.executable, __file__],
            # Set the variables in both processes, so that the environment does not differ.
            env=environment(SGLANG_PLUGINS=plugins, PYTHONPATH=path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for plugins in ("fluxion", "platform-alone")
    ]
    results = []
    for run in runs:
        out, errors = run.communicate(timeout=900)
        lines = [line for line in out.splitlines() if line.startswith("FOUND")]
        assert lines, errors[-4000:]
        results.append(json.loads(lines[-1].removeprefix("FOUND")))
    return results[0], results[1]


OURS = {"enable_fluxion": "False", "fluxion_config": "None"}


def test_the_plug_in_was_there_once(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    active, absent = both
    assert set(active["resolved"]) - set(absent["resolved"]) == set(OURS)
    assert "fluxion_sglang.sglang.start.server_fields" in active["modules of ours"]
    assert "fluxion_sglang.sglang.start.server_fields" not in absent["modules of ours"]


def test_every_option_resolves_to_the_same(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    active, absent = both
    assert {key: active["resolved"][key] for key in OURS} == OURS
    assert {key: value for key, value in active["resolved"].items() if key not in OURS} == absent["resolved"]
    assert active["record"].replace(", enable_fluxion=False, fluxion_config=None", "") == absent["record"]
    assert active["decisions"] == absent["decisions"]


@pytest.mark.parametrize(
    "what",
    [
        *("platform", "functions", "attention backends", "hooks", "patched", "threads"),
        *("environment", "signals", "excepthook", "finders"),
    ],
)
def test_nothing_else_differs(both: tuple[dict[str, Any], dict[str, Any]], what: str) -> None:
    active, absent = both
    assert active[what] == absent[what]


def test_the_targets_of_the_hooks_are_sglangs_own(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    functions = both[0]["functions"]
    for need in HOOKS:
        file, _, _, no_closure, wrapped, _ = functions[need.module][need.name]
        assert file == need.module.rpartition(".")[2] + ".py"
        # Only SGLang's own decorators may wrap it.
        assert [no_closure, wrapped] == both[1]["functions"][need.module][need.name][3:5]


def test_only_the_light_modules_are_imported(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert set(both[0]["modules of ours"]) <= {
        "fluxion_sglang", "fluxion_sglang.sglang", "fluxion_sglang.sglang.bootstrap", "fluxion_sglang.sglang.compat",
        "fluxion_sglang.sglang.start", "fluxion_sglang.sglang.start.cpu_platform", "fluxion_sglang.sglang.hooking",
        "fluxion_sglang.sglang.plugin", "fluxion_sglang.sglang.start.server_fields",
    }  # fmt: skip
    assert set(both[0]["bags"]) - set(both[1]["bags"]) == {"fluxion"}
