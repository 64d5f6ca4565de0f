"""Every option of `--fluxion-config`, defined, documented and validated in one place."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from fluxion_sglang.config_values import ConfigError as ConfigError
from fluxion_sglang.config_values import checked, read_object, type_names
from fluxion_sglang.kv.placement import PAGE, Placement

OBSERVERS = ("audit", "record")
"""Options that ask for an observer (`executor/observer.py`)."""
KV_DTYPES = ("auto", "int8")
MODEL_KERNELS = ("replayed", "on", "off")
DISK_GB = 32.0
EVERYDAY, TUNING, GPU, RESEARCH = GROUPS = ("Every day", "Tuning", "With a GPU", "Research")
"""Groups of options, in display order."""


GONE = {
    "attend_union": "leave it out: heads of a group read what any of them chose",
    "audit_gb": 'write "audit": {"file": PATH, "gb": GiB}',
    "disk_gb": 'write "disk": {"folder": PATH, "gb": GiB}',
    "executors": "leave it out: native threads compute all tasks",
    "gpu_kernels": "leave it out",
    "gpu_ranks": "leave it out: a GPU with hot_tiles_gb ranks blocks itself",
    "guard": 'leave it out: the policy "sketch" estimates what it leaves out before it reads',
    "policy_state_gb": "leave it out: policies that remember requests bound that themselves",
    "scheduler": "leave it out: the task with the most work comes first",
    "spread": "leave it out: blocks are ranked by Quest's bound",
    "step_graphs": 'write "model_kernels": "on" for steps that are not replayed',
    "tau": 'write it into the policy, such as "fluxion:0.05"',
}
"""Keys of earlier versions, with the replacement to suggest."""


def _option(
    default: Any,
    doc: str,
    example: str,
    legal: Callable[[Any], bool] | None = None,
    why: str = "",
    group: str = TUNING,
) -> Any:
    """Define a key. `legal` tests a value; `why` completes the error "KEY is VALUE, but" for an illegal one."""
    return field(default=default, metadata={"doc": doc, "example": example, "legal": legal, "why": why, "group": group})


PLACES = {"audit": "file", "disk": "folder"}
"""Options that name a path, as text or as an object, with the object's key for that path."""


def _is_place(value: Any, key: str, *others: str) -> bool:
    """Whether `value` is text, or an object with the path and optionally `gb` and the keys `others`."""
    if isinstance(value, str):
        return True
    gib, numbers = value.get("gb", 1), [value.get(other, 1) for other in others]
    return (
        value.keys() <= {PLACES[key], "gb", *others}
        and type(value.get(PLACES[key])) is str
        and type(gib) in (int, float)
        and 0 < gib < math.inf
        and all(type(number) is int and number >= 1 for number in numbers)
    )


def _one_of(words: tuple[str, ...]) -> str:
    return f"it is one of a few words; use one of {', '.join(map(json.dumps, words))}."


@dataclass(frozen=True)
class Option:
    """One row of the table of options, for documentation and command line."""

    key: str
    type: str
    default: str
    doc: str
    example: str
    group: str


@dataclass(frozen=True)
class FluxionConfig:
    """The options of one server. Instances made by `parse` are valid; `validate` checks one made by hand."""

    policy: str = _option(
        "auto",
        "What each head reads of the middle, as a policy spec. auto is fluxion if a predictor fits the model, "
        "otherwise full, which is exact.",
        '"fixed:16:0.25"',
        group=EVERYDAY,
    )
    predictor: str | None = _option(
        None,
        "Folder of a predictor that `fluxion train` made. By default `fluxion` in the model's folder, if it exists.",
        '"/models/llama/fluxion"',
        group=EVERYDAY,
    )
    request_policies: bool | list[str] = _option(  # noqa: RUF009 (the default is no list)
        True,
        "Policies that requests may name: true for all that this server can run, a list for these specs, false for "
        "none. A request that names another policy ends with an error.",
        '["full", "fixed:16:0.25"]',
        lambda allowed: isinstance(allowed, bool) or (bool(allowed) and all(type(spec) is str for spec in allowed)),
        'it says which policies requests may name; give true, false, or a list of specs such as ["full", '
        '"fixed:16:0.25"].',
        group=EVERYDAY,
    )
    sketches: bool | None = _option(
        None,
        "The host pool keeps a sketch of every key, 4 bits an element, for the policy sketch. The pool grows by a "
        "tenth in bfloat16. By default on if policy, or the list request_policies, names sketch.",
        "true",
        lambda on: isinstance(on, bool),
        "it says whether sketches of keys are kept; give true or false.",
    )
    host_tokens: int | None = _option(
        None,
        "Size of the host pool in tokens. By default it follows from the free host memory.",
        "1000000",
        group=EVERYDAY,
    )
    host_memory_gb: float | None = _option(
        None,
        "Size of the host pool in GiB, instead of host_tokens. All ranks of a host divide it.",
        "64",
        lambda gib: gib > 0,
        "the host pool needs memory; give a positive number of GiB or leave the key out to size the pool from the "
        "free host memory.",
        group=EVERYDAY,
    )
    disk: str | dict[str, Any] | None = _option(  # noqa: RUF009
        None,
        "Folder that keeps the KV of prompts: after a restart or an eviction their beginnings are not prefilled again. "
        f'Each model has a subfolder. The object form takes "gb", the most GiB for one model ({DISK_GB:g} by default), '
        "which the tensor-parallel ranks of a host divide.",
        '{"folder": "/var/cache/fluxion", "gb": 500}',
        lambda value: _is_place(value, "disk"),
        'it says where KV is kept; give the path of a folder, or {"folder": PATH, "gb": GiB above 0}.',
        group=EVERYDAY,
    )
    kv_dtype: str = _option(
        "auto",
        "Type of keys and values in the host pool. auto: the model's dtype. int8: 8 bits an element, with a scale for "
        "every token and head; a step reads about half the bytes. For models in bfloat16, CPU only.",
        '"int8"',
        lambda word: word in KV_DTYPES,
        _one_of(KV_DTYPES),
    )
    sinks: int = _option(
        Placement.sinks, "First tokens of a request that stay on the device; a multiple of 16.", "64", group=RESEARCH
    )
    window: int = _option(
        Placement.window, "Most recent tokens that stay on the device; a multiple of 16.", "256", group=RESEARCH
    )
    prefill_budget: float = _option(
        1.0,
        "Largest share of the preceding tokens that a block of queries of a prompt reads. 1 is an exact prefill. Less "
        "is a sparse prefill, which is faster and not exact. CPU only.",
        "0.3",
        lambda share: 0 < share <= 1,
        "it is the share of the earlier tokens that queries of a prompt read; give 1 for an exact prefill, or a number "
        "above 0 and below 1, such as 0.3.",
    )
    prefill_pass_ms: float = _option(
        200.0,
        "Milliseconds of a prefill pass while other requests decode or wait. The longest gap of a stream is this time "
        "and two decode steps. Short prompts go first. 0 leaves passes and their order to SGLang. CPU only.",
        "0",
        lambda ms: ms >= 0,
        "it is a time; give a number of milliseconds, or 0 for passes of chunked_prefill_size tokens.",
    )
    share_prefixes: bool = _option(
        True,
        "Requests of a batch with a common beginning read it from memory once for all of them, under full, fixed and "
        "fluxion. What each head reads stays the same.",
        "false",
        group=RESEARCH,
    )
    canary: float = _option(
        0.0,
        "Share of the reads of host KV, metadata and sketches that are compared with checksums made at writing; 0 is "
        "none. A request that read something else ends with an error. CPU only.",
        "0.01",
        lambda share: 0 <= share <= 1,
        "it is a share of reads; give 0 for none, 1 for all, or a number between, such as 0.01.",
    )
    workers: int | None = _option(
        None,
        "CPU threads of each rank's engine, including the calling thread. By default one for each core of the rank, "
        "and two fewer beside a GPU.",
        "16",
        lambda workers: workers >= 1,
        "the calling thread itself is one; give 1 or more, or leave the key out for one thread a core.",
    )
    cores: str | None = _option(
        None,
        "Cores to pin the engine's threads to, divided among the ranks of the host. By default those that the process "
        "may use. Under a quota of CPU time, threads are pinned only if this is set.",
        '"0-3,8"',
    )
    model_kernels: str = _option(
        MODEL_KERNELS[0],
        "On a CPU, native threads compute linear layers of few rows, experts, norms, activations and rotary "
        "embeddings, too. replayed: decode steps are recorded and replayed without Python between the layers (one "
        "rank, no adapters). on: no replay. off: PyTorch computes these layers.",
        '"off"',
        lambda word: word in MODEL_KERNELS,
        _one_of(MODEL_KERNELS),
        group=RESEARCH,
    )
    hot_tiles_gb: float = _option(
        0.0,
        "GiB of device memory of each rank for copies of recently read tiles. Above 0 the GPU keeps all metadata (a "
        "sixteenth of the host pool), ranks blocks, and reads the chosen tiles that it has copied; the CPU reads the "
        "others. Only in steps whose requests all follow full, fixed or streaming.",
        "4",
        lambda gib: gib >= 0,
        "it is an amount of memory; give 0 for none, or a number of GiB.",
        group=GPU,
    )
    cuda_graphs: bool = _option(
        False, "Record decode steps as CUDA graphs and replay them. Run on one H200 only.", "true", group=GPU
    )
    audit: str | dict[str, Any] | None = _option(  # noqa: RUF009
        None,
        "File to append an audit of decode steps to: bytes read, and error against exact attention. It at least "
        'doubles the work. The object form takes "gb", the largest size in GiB (a full file gets the ending .1 and '
        'replaces the one before it), and "every": audit only steps in which the length of the first request is a '
        "multiple of it.",
        '{"file": "/tmp/audit.npy", "gb": 1}',
        lambda value: _is_place(value, "audit", "every"),
        'it says where the audit goes; give the path of a file, or {"file": PATH, "gb": GiB above 0, "every": steps '
        "from 1}.",
        group=RESEARCH,
    )
    record: str | None = _option(
        None,
        "Folder for training samples of requests that ask for it in custom_params. `fluxion train` sets it.",
        '"/tmp/samples"',
        group=RESEARCH,
    )

    @classmethod
    def parse(cls, text: str | None) -> FluxionConfig:
        """Read a JSON object, or `@path` of a file that holds one; None or "" gives the defaults.

        Raises:
            ConfigError: one sentence that names the key and its legal values.
        """
        return cls.from_dict({} if text is None or not text.strip() else read_object(text))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FluxionConfig:
        """Build from the plain values of the JSON object; raises ConfigError."""
        legal = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key in GONE:
                raise ConfigError(f"--fluxion-config has the key {key!r}, which is gone; {GONE[key]}.")
            if key not in legal:
                near = difflib.get_close_matches(key, legal, n=1, cutoff=0.5)
                guess = f"; did you mean {near[0]!r}?" if near else ";"
                raise ConfigError(f"--fluxion-config has no key {key!r}{guess} The legal keys are {', '.join(legal)}.")
        hints, fields = get_type_hints(cls), cls.__dataclass_fields__
        return cls(
            **{key: checked(key, value, hints[key], fields[key].metadata["example"]) for key, value in values.items()}
        ).validate()

    def validate(self) -> FluxionConfig:
        """Check each value alone and against the others, and return self; raises ConfigError."""
        for f in dataclasses.fields(self):
            legal, value = f.metadata["legal"], getattr(self, f.name)
            if legal is not None and value is not None and not legal(value):
                shown = f"{value:g}" if isinstance(value, float) else repr(value)
                raise ConfigError(f"{f.name} is {shown}, but {f.metadata['why']}")
        self._check_size()
        cores = self.core_list()
        if self.workers is not None and cores and self.workers > len(cores):
            raise ConfigError(
                f"workers is {self.workers}, but cores {self.cores!r} names only {len(cores)} to pin them to; "
                f"give at most {len(cores)} workers or name more cores."
            )
        if self.hot_tiles_gb > 0:
            self._check_hot_tiles()
        self._check_files()
        return self

    @property
    def sketched(self) -> bool:
        """Whether the host pool has sketches of keys."""
        if self.sketches is not None:
            return self.sketches
        named = [self.policy, *(self.request_policies if isinstance(self.request_policies, list) else ())]
        return any(spec.partition(":")[0] == "sketch" for spec in named)

    @property
    def int8(self) -> bool:
        return self.kv_dtype == "int8"

    def path(self, key: str) -> Path | None:
        """The file or folder that a key names; None if it is not set."""
        value = getattr(self, key)
        if isinstance(value, dict):
            value = value[PLACES[key]]
        return None if value is None else Path(os.path.expanduser(value))

    def beside_path(self, key: str, name: str, default: Any) -> Any:
        """The value of the key `name` in the object form of a path option."""
        value = getattr(self, key)
        return value.get(name, default) if isinstance(value, dict) else default

    def core_list(self) -> list[int]:
        """The core ids in `cores`, in the order given; [] if it is not set. Raises ConfigError."""
        if self.cores is None:
            return []
        ids: list[int] = []
        for part in self.cores.split(","):
            first, dash, last = part.strip().partition("-")
            # isdecimal alone also accepts digits of other scripts.
            if not (first.isascii() and first.isdecimal()) or (
                dash and not (last.isascii() and last.isdecimal() and int(last) >= int(first))
            ):
                raise ConfigError(
                    f"cores is {self.cores!r}, where {part.strip()!r} is not a core or a range; give core "
                    'ids and ranges separated by commas, such as "0-3,8".'
                )
            if int(last or first) >= 1 << 16:
                raise ConfigError(
                    f"cores is {self.cores!r}, but no machine has a core {last or first}; see `lscpu` for the ids."
                )
            ids.extend(range(int(first), int(last if dash else first) + 1))
        if len(set(ids)) != len(ids):
            raise ConfigError(f"cores is {self.cores!r}, which names a core twice; name each core once.")
        return ids

    @classmethod
    def options(cls) -> list[Option]:
        """The options, group by group, in the order of the class."""
        hints = get_type_hints(cls)
        return [
            Option(
                key=f.name,
                type=type_names(hints[f.name]),
                default=json.dumps(f.default),
                doc=f.metadata["doc"],
                example=f.metadata["example"],
                group=group,
            )
            for group in GROUPS
            for f in dataclasses.fields(cls)
            if f.metadata["group"] == group
        ]

    def _check_size(self) -> None:
        for key in ("sinks", "window"):
            size = getattr(self, key)
            if size < PAGE or size % PAGE:
                raise ConfigError(
                    f"{key} is {size}, but it is kept in whole pages of {PAGE} tokens and needs at least "
                    f"one; give a multiple of {PAGE} such as {max(PAGE, round(size / PAGE) * PAGE)}."
                )
        if self.host_tokens is not None and self.host_memory_gb is not None:
            raise ConfigError(
                "host_tokens and host_memory_gb both give the size of the host pool; keep one of the two."
            )
        least = Placement(self.sinks, self.window).slots
        if self.host_tokens is not None and self.host_tokens < least:
            raise ConfigError(
                f"host_tokens is {self.host_tokens}, less than the {least} tokens of one request's sinks, window and "
                f"page in progress; give at least {least} (every token of every request lives in this pool)."
            )

    def _check_hot_tiles(self) -> None:
        others = {
            "audit": "the CPU does not know what was read",
            "disk": "what comes from files does not come to the GPU's metadata",
        }
        for key, why in others.items():
            if (value := getattr(self, key)) is not None:
                raise ConfigError(
                    f"hot_tiles_gb does not work with {key} {value!r}, because {why}; leave one of them out."
                )

    def _check_files(self) -> None:
        path = self.path("audit")
        if path is not None and (not path.name or os.path.isdir(path) or not os.path.isdir(path.parent)):
            what = "is a folder" if os.path.isdir(path) else "is in no folder that exists"
            raise ConfigError(f"audit is {str(path)!r}, which {what}; give the path of a file, such as /tmp/audit.npy.")
        folders = {"record": "/tmp/samples", "disk": "/var/cache/fluxion"}
        for key, example in folders.items():
            path = self.path(key)
            if path is None:
                continue
            value = getattr(self, key)
            value = value[PLACES[key]] if isinstance(value, dict) else value
            there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
            folder = bool(value) and os.path.isdir(there)
            if not folder or not os.access(there, os.W_OK | os.X_OK):
                what = "cannot be written" if folder else "is no folder and cannot be made one"
                raise ConfigError(
                    f"{key} is {value!r}, which {what}; give a folder that can be written, such as {example}."
                )
