"""Planning: where to cut, how many micro-batches, which schedule. No torch."""

from penstock.plan.decisions import Candidate, StagePlan
from penstock.plan.plan import Plan
from penstock.plan.search import plan, plans

__all__ = ["Candidate", "Plan", "StagePlan", "plan", "plans"]
