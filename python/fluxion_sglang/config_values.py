"""Parses the text of `--fluxion-config` into plain values of the right types."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin


class ConfigError(ValueError):
    """A wrong option. The message is one sentence: what is wrong, why, and what to give instead."""


def read_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, or the file named by `@path`; raises ConfigError."""
    if text.startswith("@"):
        return _load_object(_file_text(text[1:]), text[1:])
    return _load_object(text, "--fluxion-config")


def checked(key: str, value: Any, hint: Any, example: str) -> Any:
    """Return the value of a key, converted to the type hint; raises ConfigError."""
    allowed = _types(hint)
    # Compare exact types: Python's bool is a subclass of int, but JSON's true is no integer.
    if type(value) is int and float in allowed and int not in allowed:
        value = _finite(key, value)
    if type(value) is float and float in allowed and not math.isfinite(value):
        raise ConfigError(f"{key} is {value}, which is no size; give a finite number.")
    if type(value) not in allowed:
        raise ConfigError(
            f"{key} is {json.dumps(value)}, a JSON {_json_name(type(value))}, but it takes {type_names(hint)}; "
            f"an example is {example}."
        )
    return value


def type_names(hint: Any) -> str:
    """The types of an option in JSON's words."""
    return " or ".join(map(_json_name, _types(hint)))


def _file_text(name: str) -> str:
    try:
        return Path(os.path.expanduser(name)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or an impossible path
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"--fluxion-config names the file {name!r}, which cannot be read ({reason}); "
            "give the path of a JSON file after the @, or the JSON object itself."
        ) from None


def _load_object(text: str, source: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{source} gives the key {key!r} twice; keep one of the two.")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        hint = " (a file is written @path)" if "{" not in text else ""
        raise ConfigError(
            f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; give an object "
            f'such as {{"policy": "full"}}{hint}.'
        ) from None
    except ConfigError:
        raise
    except ValueError:  # an integer literal beyond Python's digit limit
        raise ConfigError(f"{source} has a number of thousands of digits; give one that a machine can hold.") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply; give a flat JSON object.") from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{source} is a JSON {_json_name(type(value))}, but options are key and value; give an object "
            'such as {"policy": "full"}.'
        )
    return value


def _types(hint: Any) -> tuple[type, ...]:
    """The types that a value may have; element types of lists are ignored."""
    if isinstance(hint, UnionType):
        return tuple(get_origin(part) or part for part in get_args(hint))
    return (hint,)


def _finite(key: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{key} has {len(str(value))} digits; give a number that a machine can hold.") from None


_JSON_NAMES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "list",
    dict: "object",
    type(None): "null",
}


def _json_name(kind: type) -> str:
    return _JSON_NAMES[kind]
