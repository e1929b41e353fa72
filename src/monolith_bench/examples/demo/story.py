"""The demo's story: what must be seen from outside for it to be true.

A prober asks the server for the score of the new item, again and again, and records every answer. The claims
of the demo are checked only against these answers and the times of the events:

    new item        its served score moved, so long after it first appeared in the stream
    kill            the server answers without a trainer, and follows the restarted one
    poison          publishing was paused after labels went wrong, and no served answer is of later
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MOVED = 0.01
"""The score of the new item has moved if it differs by more than this from that of an unknown item."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeAnswer:
    """What the server said to one request for the score of the new item."""

    at: float
    """Unix seconds at which it came, or failed to."""
    score: float | None
    """The score of the new item; None if there was no answer."""
    unknown: float = 0.0
    """The score, in the same answer, of an item that never appears: what moves both is no news of one."""
    step: int = 0
    """The step of the trainer up to which the answer has learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoryTimes:
    """When things happened, in Unix seconds; None for what has not."""

    appeared: float | None = None
    """The event time of the first record with the new item."""
    killed: float | None = None
    killed_step: int | None = None
    """The last step of the trainer that was killed."""
    resumed: float | None = None
    """When the trainer that came back had taken its first step."""
    poisoned: float | None = None
    """The event time of the first wrong label."""
    held: float | None = None
    held_step: int | None = None
    """The last step that was published before publishing was held."""
    released: float | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing the demo says, and whether it was seen to be so."""

    name: str
    said: str
    true: bool


def seconds_to_moved(answers: Sequence[ProbeAnswer], appeared: float) -> float | None:
    """Return how long after its first event an item was served as one that is known; None if it never was.

    Raises:
        ValueError: There is no answer from before it appeared, or it was known by then.
    """
    asked = [one for one in answers if one.at < appeared and one.score is not None]
    if not asked or any(map(_moved, asked)):
        raise ValueError("no client asked for the item's score before it appeared, or it was known by then")
    return next((one.at - appeared for one in answers if one.at >= appeared and _moved(one)), None)


def _moved(one: ProbeAnswer) -> bool:
    return one.score is not None and abs(one.score - one.unknown) > MOVED


def longest_silence(answers: Sequence[ProbeAnswer], begin: float, end: float) -> float:
    """Return the longest time without an answer between two times."""
    answered = [one.at for one in answers if one.score is not None and begin <= one.at <= end]
    times = [begin, *answered, end]
    return max(later - earlier for earlier, later in pairwise(times))


def is_followed_again(answers: Sequence[ProbeAnswer], times: StoryTimes) -> bool:
    """Whether an answer is of steps that only the trainer that came back has taken."""
    if times.resumed is None or times.killed_step is None:
        return False
    return any(one.at >= times.resumed and one.step > times.killed_step for one in answers)


def claims(answers: Sequence[ProbeAnswer], times: StoryTimes, *, most_silent: float = 10.0) -> list[Claim]:
    """Return what the demo claims, each with what was seen.

    Args:
        answers: In the order in which they came.
        most_silent: Seconds without an answer that count as still answering, on a machine that is busy.
    """
    return [_new_item(answers, times), _kill(answers, times, most_silent), _poison(answers, times)]


def _new_item(answers: Sequence[ProbeAnswer], times: StoryTimes) -> Claim:
    name = "new item"
    if times.appeared is None:
        return Claim(name, "it never appeared in the stream", true=False)
    try:
        seconds = seconds_to_moved(answers, times.appeared)
    except ValueError as error:
        return Claim(name, str(error), true=False)
    if seconds is None:
        return Claim(name, "its served score never moved", true=False)
    return Claim(name, f"its served score moved {seconds:.2f} s after its first event", true=True)


def _kill(answers: Sequence[ProbeAnswer], times: StoryTimes, most_silent: float) -> Claim:
    name = "kill -9"
    if times.killed is None or times.resumed is None:
        return Claim(name, "the trainer was not killed, or did not come back", true=False)
    down = [one for one in answers if times.killed <= one.at <= times.resumed]
    failed = sum(one.score is None for one in down)
    silence = longest_silence(answers, times.killed, times.resumed)
    followed = is_followed_again(answers, times)
    said = (
        f"{len(down) - failed:,} of {len(down):,} requests were answered in the "
        f"{times.resumed - times.killed:.1f} s without a trainer, the longest wait was {silence:.2f} s; "
        f"the server {'follows' if followed else 'does not follow'} the restarted trainer"
    )
    return Claim(name, said, true=bool(down) and failed == 0 and silence <= most_silent and followed)


def _poison(answers: Sequence[ProbeAnswer], times: StoryTimes) -> Claim:
    name = "poisoned batch"
    if times.poisoned is None or times.held is None or times.held_step is None:
        return Claim(name, "publishing was not paused", true=False)
    until = times.released if times.released is not None else float("inf")
    leaked = sum(
        one.step > times.held_step
        for one in answers
        if times.held <= one.at < until and one.score is not None
    )
    after = times.held - times.poisoned
    if after < 0:
        return Claim(name, "publishing was paused before any label was wrong", true=False)
    said = f"publishing paused {after:.1f} s after the first wrong label; "
    said += f"{leaked:,} answers contain later steps" if leaked else "no answer contains a later step"
    return Claim(name, said, true=leaked == 0)
