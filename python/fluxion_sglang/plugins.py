"""What comes in from outside the core: entry points of this package's outer rings, and of other packages.

Each group is a seam of the core, whose interface says what an entry point's object is.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

POLICIES: Final = "fluxion_policies"
"""`policy.base.Policy`, by the first word of its specs."""
OBSERVERS: Final = "fluxion_observers"
"""`executor.observer.MakeObserver`, by the option that asks for it: `audit`, `record`."""
DEVICES: Final = "fluxion_devices"
"""`executor.device.DeviceMaker`, by torch's name of the device: `cuda`."""


@cache
def named(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group; this package's own win. Looked for once: names come from clients, too."""
    points = sorted(entry_points(group=group), key=lambda point: point.value.startswith("fluxion_sglang."))
    return {point.name: point for point in points}  # of one name, the last stays


def load(group: str, name: str) -> Any:
    """The object of an entry point.

    Raises:
        LookupError: there is none of this name: one sentence.
    """
    point = named(group).get(name)
    if point is None:
        raise LookupError(
            f"The installed fluxion-sglang does not say where its {name!r} is (entry points {group}); install it again."
        )
    return point.load()
