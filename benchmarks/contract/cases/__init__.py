"""The cases, in the order of the table: those about a step, and those about what is around it."""

from benchmarks.contract.cases import scripts, steps
from benchmarks.contract.cases.case import CASES, Case

__all__ = ["CASES", "Case", "scripts", "steps"]
