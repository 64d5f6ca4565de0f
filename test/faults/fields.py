"""Inputs that SGLang's clients may send: paths of its HTTP application with their fields, and fields of its requests.

PYTHONPATH=test:. python -m faults.fields    # record the fields of the installed version in fields.json
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).with_name("fields.json")
"""Fields that have been reviewed, by version of SGLang."""


def version() -> str:
    import sglang

    return str(sglang.__version__)


def found() -> dict[str, list[str]]:
    """Fields of the installed SGLang, by "METHOD /path" and by class."""
    import msgspec
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        described = app.openapi()
    schemas = described["components"]["schemas"]
    fields: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            names = {one["name"] for one in operation.get("parameters", ())}
            for content in operation.get("requestBody", {}).get("content", {}).values():
                names |= _properties(content["schema"], schemas)
            fields[f"{method.upper()} {path}"] = sorted(names)
    fields["GenerateReqInput"] = sorted(one.name for one in dataclasses.fields(GenerateReqInput))
    for kind in (TokenizedGenerateReqInput, SamplingParams):
        fields[kind.__name__] = sorted(one.name for one in msgspec.structs.fields(kind))
    return fields


def _properties(schema: dict[str, Any], schemas: dict[str, Any]) -> set[str]:
    if "$ref" in schema:
        return _properties(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    names = set(schema.get("properties", ()))
    for option in schema.get("anyOf", ()):
        names |= _properties(option, schemas)
    return names


def noted() -> dict[str, dict[str, list[str]]]:
    return dict(json.loads(SNAPSHOT.read_text())) if SNAPSHOT.exists() else {}


def main() -> None:
    lines = []
    for name, fields in sorted({**noted(), version(): found()}.items()):
        rows = [f"  {json.dumps(key)}: {json.dumps(names)}" for key, names in sorted(fields.items())]
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n }")
    SNAPSHOT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
