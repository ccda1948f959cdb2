"""Planning: where to cut, how many micro-batches, which schedule. No torch."""

from penstock.plan.plan import Candidate, Plan, StagePlan
from penstock.plan.search import plan, plans

__all__ = ["Candidate", "Plan", "StagePlan", "plan", "plans"]
