"""The phases of a decode step, by which its time is told."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """Where the time of a decode step goes; the phases make up the whole step."""

    RESIDENT = 0
    """Attention to the residents, and the features, where a policy sees them before it plans."""
    PLAN = 1
    """The policy, and what begins a step."""
    TASKS = 2
    """From the start of a layer's queue to its last result; with the residents, where no policy sees them first."""
    MODEL = 3
    """The model before the first layer's attention, and between the attention of two layers."""
    BETWEEN = 4
    """From the last layer's attention to the next step: the end of the model, sampling, SGLang's scheduler."""
