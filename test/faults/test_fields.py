"""Every field that SGLang's clients may send has been reviewed; and the bodies made from these fields."""

from __future__ import annotations

import json
import random

import pytest
from faults import bodies, fields


def test_every_field_of_sglang_has_been_looked_at() -> None:
    """A new field may need a bound (containment/bounds.py), and values in bodies.py."""
    noted, version, found = fields.noted(), fields.version(), fields.found()
    if version not in noted:
        pytest.fail(f"fields.json has SGLang {', '.join(noted)} and not {version}; see what is new, and note it with "
                    "`PYTHONPATH=test:. python -m faults.fields`.")  # fmt: skip
    known = noted[version]
    assert sorted(found.keys() - known.keys()) == [], "paths that are new"
    assert sorted(known.keys() - found.keys()) == [], "paths that are gone"
    for name, names in found.items():
        assert sorted(set(names) - set(known[name])) == [], f"fields of {name} that are new"
        assert sorted(set(known[name]) - set(names)) == [], f"fields of {name} that are gone"


def test_a_body_depends_on_its_numbers_alone() -> None:
    once = [bodies.call(3, index) for index in range(200)]
    random.random()
    again = [bodies.call(3, index) for index in reversed(range(200))]
    assert list(map(repr, once)) == list(map(repr, reversed(again)))
    assert len({json.dumps(call.body) for call in once}) > 180, "they differ"
    assert {call.path for call in once} > {"/generate", "/vertex_generate", "/api/chat", "/v1/completions"}


def test_the_hints_are_of_fields_that_exist() -> None:
    known = set(bodies.sampling_fields()).union(*map(bodies.fields_of, bodies.ROUTES))
    assert bodies.HINTS.keys() <= known
    assert known >= {*bodies.COMPANIONS, *bodies.KEPT} and known >= set(bodies.SLOW) - {"num_predict"}
