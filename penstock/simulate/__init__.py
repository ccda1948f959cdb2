"""The simulator: when everything in a step would happen, and how much memory it would take."""

from __future__ import annotations

from penstock.simulate.events import Network, Simulator, simulate
from penstock.simulate.memory import HeldMemory, memory_over_time

__all__ = ["HeldMemory", "Network", "Simulator", "memory_over_time", "simulate"]
