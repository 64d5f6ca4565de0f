"""The options: every key, every refusal, and that printed configurations can be parsed again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.config import GROUPS, ConfigError, FluxionConfig
from fluxion_sglang.sglang.start.options import options_of


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        FluxionConfig.parse(text)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("text", [None, "", "  ", "{}"])
def test_the_flag_alone_gives_the_defaults(text: str | None) -> None:
    config = FluxionConfig.parse(text)
    assert config == FluxionConfig()
    assert (config.policy, config.sinks, config.window, config.share_prefixes) == ("auto", 64, 256, True)
    assert config.request_policies is True


def test_every_option_is_documented() -> None:
    options = FluxionConfig.options()
    assert sorted(option.key for option in options) == sorted(f.name for f in dataclasses.fields(FluxionConfig))
    assert list(dict.fromkeys(option.group for option in options)) == list(GROUPS)
    for option in options:
        assert option.doc.endswith(".")
        # The default must be JSON, and the example must be accepted for its key.
        assert json.loads(option.default) == getattr(FluxionConfig(), option.key)
        parsed = FluxionConfig.parse(f'{{"{option.key}": {option.example}}}')
        assert getattr(parsed, option.key) == json.loads(option.example)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fluxion.json"
    path.write_text('{"window": 512, "cores": "0-1"}')
    config = FluxionConfig.parse(f"@{path}")
    assert (config.window, config.core_list()) == (512, [0, 1])
    assert str(tmp_path / "none.json") in refusal(f"@{tmp_path / 'none.json'}")
    path.write_text('{"window": 512')
    assert refusal(f"@{path}").startswith(str(path))
    path.write_bytes(b"\xff\xfe")
    assert "utf-8" in refusal(f"@{path}")
    assert "cannot be read" in refusal(f"@{tmp_path}")
    assert "null byte" in refusal("@a\0b")
    assert "cannot be read" in refusal("@~nobody-of-that-name/fluxion.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["not JSON", "line 1, column 2", '{"policy": "full"}']),
        ('{"policy": "full",}', ["not JSON", "column"]),
        ("fluxion.json", ["not JSON", "@path"]),
        ("[]", ["a JSON list", "object"]),
        ('"full"', ["a JSON string"]),
        ("3", ["a JSON integer"]),
        ("[" * 100_000, ["nested"]),
        ('{"window": 256, "window": 512}', ["'window' twice"]),
        ('{"windw": 256}', ["'windw'", "'window'", "policy, predictor, request_policies, sketches, host_tokens"]),
        ('{"request_policies": []}', ["request_policies is []", "a list of specs"]),
        ('{"request_policies": ["full", 3]}', ["request_policies is ['full', 3]", "a list of specs"]),
        ('{"request_policies": "full"}', ["boolean or list"]),
        ('{"policy_state_gb": 2}', ["policy_state_gb", "gone", "bound that themselves"]),
        ('{"audit_gb": 1}', ["audit_gb", "gone", '"gb": GiB']),
        ('{"audit": {"gb": 1}}', ["audit", '{"file": PATH']),
        ('{"audit": {"file": "/tmp/a.npy", "gb": 0}}', ["audit", "above 0"]),
        ('{"audit": {"file": "/tmp/a.npy", "every": 0.5}}', ["audit", "from 1"]),
        ('{"audit": {"file": "/tmp/a.npy", "steps": 2}}', ["audit", "from 1"]),
        ('{"audit": {"file": "/nowhere/a.npy"}}', ["'/nowhere/a.npy'", "no folder that exists"]),
        ('{"disk_gb": 500}', ["disk_gb", "gone", '{"folder": PATH']),
        ('{"disk": {"folder": "/tmp", "gb": "500"}}', ["disk", "above 0"]),
        ('{"disk": {"gb": 500}}', ["disk", '{"folder": PATH']),
        ('{"disk": {"folder": ""}}', ["disk is ''", "is no folder"]),
        ('{"disk": ""}', ["disk is ''", "is no folder"]),
        ('{"nonsense": 1}', ["'nonsense'", "legal keys are policy"]),
        ('{"window": true}', ["window is true", "integer"]),
        ('{"window": 256.0}', ["window is 256.0", "integer"]),
        ('{"window": "256"}', ["string", "integer"]),
        ('{"window": null}', ["null", "integer"]),
        ('{"share_prefixes": 1}', ["share_prefixes is 1", "boolean"]),
        ('{"policy": 16}', ["policy is 16", "string"]),
        ('{"host_tokens": 1e6}', ["host_tokens is 1000000.0", "integer or null"]),
        ('{"host_memory_gb": "64"}', ["number or null"]),
        ('{"host_memory_gb": NaN}', ["host_memory_gb is nan", "finite"]),
        ('{"host_memory_gb": Infinity}', ["finite"]),
        ('{"host_memory_gb": 1' + "0" * 400 + "}", ["401 digits"]),
        ('{"host_tokens": 1' + "0" * 5000 + "}", ["thousands of digits"]),
        ('{"host_memory_gb": 0}', ["host_memory_gb is 0", "positive"]),
        ('{"host_memory_gb": -1.5}', ["-1.5", "positive"]),
        ('{"host_tokens": -16}', ["host_tokens is -16", "336"]),
        ('{"host_tokens": 335}', ["host_tokens is 335", "at least 336"]),
        ('{"host_tokens": 4096, "sinks": 4096}', ["at least 4368"]),
        ('{"host_tokens": 4096, "host_memory_gb": 1}', ["host_tokens and host_memory_gb", "one of the two"]),
        ('{"sinks": 0}', ["sinks is 0", "16"]),
        ('{"sinks": 8}', ["sinks is 8", "such as 16"]),
        ('{"sinks": 100}', ["sinks is 100", "such as 96"]),
        ('{"window": -16}', ["window is -16", "such as 16"]),
        ('{"window": 250}', ["window is 250", "such as 256"]),
        ('{"workers": 0}', ["workers is 0", "1 or more"]),
        ('{"workers": 3, "cores": "0,1"}', ["workers is 3", "at most 2"]),
        ('{"cores": ""}', ["cores is ''"]),
        ('{"cores": "0-"}', ["'0-'"]),
        ('{"cores": "3-0"}', ["'3-0'"]),
        ('{"cores": "-1"}', ["'-1'"]),
        ('{"cores": "0,,1"}', ["''"]),
        ('{"cores": "a"}', ["'a'"]),
        ('{"cores": "0-2,1"}', ["twice"]),
        ('{"cores": "0-99999999"}', ["no machine has"]),
        ('{"cores": "\\u0661"}', ["not a core"]),
        ('{"attend_union": false}', ["attend_union", "gone", "leave it out"]),
        ('{"guard": 0.03}', ["guard", "gone", '"sketch"']),
        ('{"spread": 0.5}', ["spread", "gone", "Quest"]),
        ('{"step_graphs": false}', ["step_graphs", "gone", '"model_kernels": "on"']),
        ('{"tau": 0.05}', ["tau", "gone", "fluxion:0.05"]),
        ('{"model_kernels": "fast"}', ["model_kernels", "replayed"]),
        ('{"executors": "cpu"}', ["key 'executors', which is gone", "native threads compute all tasks"]),
        ('{"gpu_kernels": "fluxion"}', ["key 'gpu_kernels', which is gone", "leave it out"]),
        ('{"hot_tiles_gb": -1}', ["hot_tiles_gb is -1", "0 for none"]),
        ('{"gpu_ranks": true, "hot_tiles_gb": 2}', ["'gpu_ranks', which is gone", "hot_tiles_gb ranks blocks itself"]),
        ('{"hot_tiles_gb": 2, "audit": "/tmp/a"}', ["hot_tiles_gb does not work with audit '/tmp/a'"]),
        ('{"hot_tiles_gb": 2, "disk": "/tmp/d"}', ["hot_tiles_gb does not work with disk '/tmp/d'"]),
        ('{"scheduler": "none"}', ["key 'scheduler', which is gone", "most work comes first"]),
        ('{"predictor": 1}', ["predictor is 1", "string or null"]),
        ('{"audit": ""}', ["audit is '.'", "is a folder"]),
        ('{"audit": "/"}', ["audit is '/'", "is a folder"]),
        ('{"audit": "/no/such/folder/a.npy"}', ["no folder that exists", "/tmp/audit.npy"]),
        ('{"record": ""}', ["record is ''", "is no folder", "/tmp/samples"]),
        ('{"record": "/proc/version"}', ["record is '/proc/version'", "is no folder"]),
        ('{"record": "/proc/version/samples"}', ["is no folder and cannot be made one"]),
        ('{"record": 1}', ["record is 1", "string or null"]),
        ('{"audit": true}', ["audit is true", "string or object or null"]),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(text: str, words: list[str]) -> None:
    message = refusal(text)
    for word in words:
        assert word in message, message


def test_samples_must_have_somewhere_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path, tmp_path / "new" / "folder"):
        assert FluxionConfig.from_dict({"record": str(folder)}).record == str(folder)
        assert not (tmp_path / "new").exists(), "it is made when there is something to write"
    asked: list[Path] = []

    def access(path: Path, mode: int) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr("os.access", access)
    assert "cannot be written; give a folder" in refusal(json.dumps({"record": str(tmp_path / "new" / "folder")}))
    assert asked == [tmp_path]


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="sinks"):
        FluxionConfig.from_dict({"sinks": 1})


def test_cores_are_read_in_order() -> None:
    assert FluxionConfig(cores="0-3,8").core_list() == [0, 1, 2, 3, 8]
    assert FluxionConfig(cores=" 5 , 2-2 ").core_list() == [5, 2]
    assert FluxionConfig().core_list() == []


@st.composite
def valid(draw: st.DrawFn) -> dict[str, Any]:
    values: dict[str, Any] = {
        "policy": draw(st.sampled_from(["full", "streaming", "fixed:16:0.05", "fixed:128:1", "oracle:0.01"])),
        "sinks": draw(st.integers(1, 64)) * 16,
        "window": draw(st.integers(1, 256)) * 16,
        "request_policies": draw(st.booleans()),
        "share_prefixes": draw(st.booleans()),
        "model_kernels": draw(st.sampled_from(["replayed", "on", "off"])),
        "workers": draw(st.none() | st.integers(1, 512)),
    }
    size = draw(st.sampled_from(["host_tokens", "host_memory_gb", None]))
    if size == "host_tokens":
        values[size] = draw(st.integers(values["sinks"] + values["window"] + 16, 1 << 40))
    elif size is not None:
        values[size] = draw(st.floats(1e-3, 1e6))
    return values


@given(valid())
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    config = FluxionConfig.parse(json.dumps(values))
    assert {key: getattr(config, key) for key in values} == values
    assert FluxionConfig.parse(json.dumps(dataclasses.asdict(config))) == config


@given(st.text(max_size=40) | st.builds(json.dumps, st.dictionaries(st.text(max_size=8), st.none() | st.floats())))
def test_no_text_breaks_it(text: str) -> None:
    try:
        FluxionConfig.parse(text)
    except ConfigError as error:
        assert str(error).endswith(".")


@given(st.sets(st.integers(0, 200), min_size=1, max_size=20))
def test_a_core_list_is_what_it_says(cores: set[int]) -> None:
    assert FluxionConfig(cores=",".join(map(str, sorted(cores)))).core_list() == sorted(cores)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, False),
        ({"policy": "sketch"}, True),
        ({"policy": "sketch:0.2"}, True),
        ({"sketches": True}, True),
        ({"policy": "full", "request_policies": ["full", "sketch"]}, True),
        ({"policy": "full", "request_policies": ["full"]}, False),
        ({"policy": "full", "request_policies": True}, False),
    ],
)
def test_which_servers_keep_sketches(options: dict[str, object], kept: bool) -> None:
    assert FluxionConfig.parse(json.dumps(options)).sketched is kept


@pytest.mark.parametrize("options", [{"policy": "sketch"}, {"request_policies": ["sketch:0.2"]}])
def test_a_policy_that_reads_sketches_is_refused_where_none_are_kept(options: dict[str, object]) -> None:
    server = SimpleNamespace(fluxion_config=json.dumps({**options, "sketches": False}))
    with pytest.raises(ConfigError, match=r"keeps none; set sketches to true, or leave the policy out\.$"):
        options_of(server, again=True)
