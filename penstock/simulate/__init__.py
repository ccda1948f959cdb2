"""What a schedule would do on a profile: an event simulator. No torch."""

from __future__ import annotations

from penstock.simulate.events import simulate

__all__ = ["simulate"]
