"""Loads plug-ins: entry points of this package's optional parts and of other packages.

Each group is an extension point of the core. Its interface defines the type of an entry point's object.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

POLICIES: Final = "fluxion_policies"
"""`policy.base.Policy`, keyed by the first word of its specs."""
OBSERVERS: Final = "fluxion_observers"
"""`executor.observer.MakeObserver`, keyed by the option that enables it: `audit`, `record`."""
DEVICES: Final = "fluxion_devices"
"""`executor.device.DeviceMaker`, keyed by torch's device name: `cuda`."""


@cache
def named(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; this package's own take precedence. Cached, because clients send names."""
    points = sorted(entry_points(group=group), key=lambda point: point.value.startswith("fluxion_sglang."))
    return {point.name: point for point in points}  # for equal names the last wins


def load(group: str, name: str) -> Any:
    """Load the object of an entry point.

    Raises:
        LookupError: no entry point has this name; one sentence.
    """
    point = named(group).get(name)
    if point is None:
        raise LookupError(
            f"The installed fluxion-sglang does not say where its {name!r} is (entry points {group}); install it again."
        )
    return point.load()
