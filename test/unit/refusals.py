"""What tests of refusals share."""

from __future__ import annotations


def one_sentence(message: str) -> None:
    """What is wrong, why, and what to do instead, on one line."""
    assert message.endswith(".")
    assert "\n" not in message
    assert "--enable-fluxion" in message
    assert "because" in message
    assert ";" in message
