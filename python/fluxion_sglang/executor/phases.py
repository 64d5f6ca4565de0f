"""The phases of a decode step, by which its time is told."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """Where the time of a decode step goes; the phases make up the whole step."""

    RESIDENT = 0
    """Attention to the residents, where a policy sees them before it plans."""
    FEATURES = 1
    """What a policy is told of them: the numbers that describe each head."""
    PLAN = 2
    """The policy, and what begins a step."""
    TASKS = 3
    """From the start of a layer's queue to its last result; with the residents, where no policy sees them first."""
    MODEL = 4
    """The model before the first layer's attention, and between the attention of two layers."""
    BETWEEN = 5
    """From the last layer's attention to the next step: the end of the model, sampling, SGLang's scheduler."""
