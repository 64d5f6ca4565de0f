"""Helper for tests of refusals."""

from __future__ import annotations


def one_sentence(message: str) -> None:
    """One line that states the fault, the reason and the remedy."""
    assert message.endswith(".")
    assert "\n" not in message
    assert "--enable-fluxion" in message
    assert "because" in message
    assert ";" in message
