"""An SGLang of another version, with moved names, or with hooks that are taken."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from places import NEEDLE
from refusals import one_sentence

from fluxion_sglang.sglang import compat, plugin
from fluxion_sglang.sglang.compat import CompatError, Need


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23rc1"])
def test_supported_versions(version: str) -> None:
    assert compat.version_problem(version) is None


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.24.dev3+gabc", "0.6", "1.0.0", "unknown"])
def test_other_versions_are_refused(version: str) -> None:
    problem = compat.version_problem(version)
    assert problem is not None
    assert version in problem
    assert "works with SGLang 0.5.23, and" in problem


def test_every_page_names_the_versions_that_are_checked() -> None:
    root = Path(NEEDLE).parents[1]
    pages = (root / "pyproject.toml", *root.glob("*.md"), *root.glob("docs/**/*.md"))
    text = {page: page.read_text() for page in pages}
    required = [found for page in text.values() for found in re.findall(r"sglang>=[0-9.,<]+", page)]
    assert set(required) == {compat.REQUIREMENT} and compat.REQUIREMENT in text[root / "pyproject.toml"]
    for name in ("README.md", "docs/serving.md"):
        assert f"SGLang {compat.SUPPORTED}" in text[root / name].replace("*", "").replace("SGLang:", "SGLang")
    assert compat.SUPPORTED in text[root / "docs" / "reference.md"]


def test_the_installed_sglang_has_every_name() -> None:
    assert list(compat.problems()) == []
    compat.check()
    for needs in (compat.DISK_NEEDS, compat.TRANSFER_NEEDS, compat.STATE_NEEDS):
        compat.check(needs)


@pytest.mark.parametrize(
    ("need", "words"),
    [
        (Need("sglang.no_such_module", "x"), "sglang.no_such_module does not import"),
        (Need(compat.RESOLVE_POOL.module, "KVCacheConfigurator.gone"), "KVCacheConfigurator.gone does not exist"),
        (Need(compat.RESOLVE_POOL.module, "Gone.method"), "Gone.method does not exist"),
        (Need(*compat.FUSED_KV_WRITE.path.rsplit(".", 1), ("pool",)), "takes (forward_batch) and not (pool)"),
    ],
)
def test_a_name_that_moved_is_refused(need: Need, words: str) -> None:
    (problem,) = compat.problems((need,))
    one_sentence(problem)
    assert words in problem


def test_a_failed_activation_is_refused(server_args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "activation_problem", "--enable-fluxion is not available.")
    with pytest.raises(CompatError, match="not available"):
        server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True).resolve_once()
    # Also if the resolution steps themselves were not registered: the flag must not be ignored silently.
    with pytest.raises(CompatError, match="not available"):
        plugin.install_if_enabled(SimpleNamespace(enable_fluxion=True))


def test_hooks_that_are_not_there_are_an_error() -> None:
    # No configuration with the flag is installed in this process.
    with pytest.raises(CompatError, match="could not hook"):
        plugin.assert_hooks_applied()


def test_hooks_go_in_once_and_a_taken_target_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins import hook_registry

    target = ModuleType("fluxion_test_target")
    calls: list[str] = []

    def function() -> str:
        return "original"

    def hook(original: Any) -> str:
        calls.append("hook")
        return "hooked " + original()

    target.function = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, target.__name__, target)
    need = Need(target.__name__, "function", ())
    monkeypatch.setattr(plugin, "HOOKS", {need: hook})
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", {})
    monkeypatch.setattr(hook_registry.HookRegistry, "_hooks", copy.copy(hook_registry.HookRegistry._hooks))
    monkeypatch.setattr(hook_registry.HookRegistry, "_patched", set(hook_registry.HookRegistry._patched))
    plugin.install()
    plugin.install()
    assert target.function() == "hooked original"
    assert calls == ["hook"]
    assert compat.is_applied(need, hook)

    # SGLang's registry patches a target once. Later plug-ins are skipped, which must be reported.
    other = Need(target.__name__, "other", ())
    target.other = function  # type: ignore[attr-defined]
    hook_registry.HookRegistry._patched.add(other.path)
    monkeypatch.setattr(plugin, "HOOKS", {other: hook})
    with pytest.raises(CompatError, match="SGLANG_PLUGINS"):
        plugin.install()
