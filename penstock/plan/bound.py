"""The lower bound that no schedule can beat."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InputError


def step_bound(
    stage_seconds: Sequence[float], latency: Sequence[float], num_microbatches: int
) -> float:
    """The least seconds that a training step can take, whatever the schedule.

        max over s of [ sum over i < s of (T_i + 2 c_i)  +  m T_s ]

    Proof. Look at stage `s`. Its first action is the forward of some micro-batch, which has come
    through the stages before it: it starts no earlier than the sum of `F_i + c_i` over `i < s`.
    From there its device works for `m T_s` at least. Its last action is the backward of some
    micro-batch, which then still has to go back through the stages before it: the step ends no
    earlier than the sum of `B_i + c_i` over `i < s` later. With `T_i = F_i + B_i` the three add up
    to the bracket, and the step takes at least the largest one.

    The proof needs one contiguous stage per device and whole backwards.

    Args:
        stage_seconds: `T_s`, the seconds of a forward and a backward of one micro-batch.
        latency: `c_s`, the one-way seconds between stages `s` and `s+1`. Empty means none.
        num_microbatches: `m`.

    Raises:
        InputError: no stage, no micro-batch, or a number of latencies that does not fit.
    """
    links = len(stage_seconds) - 1
    if links < 0 or num_microbatches < 1:
        raise InputError(
            f"a step needs at least one stage and one micro-batch, "
            f"got {len(stage_seconds)} stages and num_microbatches={num_microbatches}"
        )
    if len(latency) not in (0, links):
        raise InputError(
            f"{len(stage_seconds)} stages have {links} links between them, "
            f"but latency has {len(latency)} entries; give one per link, or none"
        )
    bound = elapsed = 0.0
    for stage, seconds in enumerate(stage_seconds):
        bound = max(bound, elapsed + num_microbatches * seconds)
        elapsed += seconds + (2 * latency[stage] if stage < len(latency) else 0.0)
    return bound
