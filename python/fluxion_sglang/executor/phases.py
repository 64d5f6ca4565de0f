"""The phases of a decode step, for accounts of its time."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """A phase of a decode step; together they make up the whole step."""

    RESIDENT = 0
    """Attention to the residents, if a policy observes it before it plans."""
    FEATURES = 1
    """Computing the features of each head for the policy."""
    PLAN = 2
    """The policy, and the start of the step."""
    TASKS = 3
    """From the start of a layer's queue to its last result; with the residents, if no policy observes them."""
    MODEL = 4
    """The model before the first layer's attention, and between the attention of two layers."""
    BETWEEN = 5
    """From the last layer's attention to the next step: the end of the model, sampling, SGLang's scheduler."""
