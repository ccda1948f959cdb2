"""What a worker is doing, as one integer and in words."""

from __future__ import annotations

import pytest

from penstock.board.activity import STARTING, UPDATING, Activity, code
from penstock.schedule import Action, Kind


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("waits", [True, False])
def test_a_code_says_what_a_worker_does(kind: Kind, waits: bool) -> None:
    activity = Activity.of(code(Action(kind, 3, 70_000), waits))
    assert (activity.stage, activity.microbatch, activity.waits) == (3, 70_000, waits)
    assert activity.what == ("forward" if kind is Kind.FORWARD else "backward")
    assert ("waiting for values" in str(activity)) == waits


def test_codes_outside_of_passes() -> None:
    assert str(Activity.of(0)) == "idle"
    assert Activity.of(0).is_idle
    assert str(Activity.of(STARTING)) == "in the start"
    assert str(Activity.of(UPDATING)) == "in the optimizer step"
