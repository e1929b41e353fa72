"""The demo's story: each claim is true only where the answers show it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monolith_bench.examples.demo.story import (
    Claim,
    ProbeAnswer,
    StoryTimes,
    claims,
    longest_silence,
    seconds_to_moved,
)

TIMES = StoryTimes(
    appeared=10.0,
    killed=20.0,
    killed_step=200,
    resumed=24.0,
    poisoned=30.0,
    held=31.5,
    held_step=300,
    released=40.0,
)


def answers() -> list[ProbeAnswer]:
    """Return an answer every half second: the score moves at 10.5, and the step follows the clock."""
    found = []
    for half in range(100):
        at = half / 2
        step = 300 if TIMES.held is not None and TIMES.held <= at < 40 else int(10 * at)
        score = 0.3 if at < 10.5 else 0.8
        found.append(ProbeAnswer(at=at, score=score, unknown=0.3, step=min(step, 300) if at < 40 else step))
    return found


def claim(name: str, some: list[ProbeAnswer], times: StoryTimes = TIMES) -> Claim:
    return next(one for one in claims(some, times) if one.name == name)


def without(some: list[ProbeAnswer], begin: float, end: float) -> list[ProbeAnswer]:
    return [replace(one, score=None) if begin <= one.at <= end else one for one in some]


def test_all_of_it_is_true_where_the_answers_show_it() -> None:
    assert [one.true for one in claims(answers(), TIMES)] == [True, True, True]


# The new item


def test_a_score_has_moved_when_it_differs_from_that_of_an_unknown_item() -> None:
    assert seconds_to_moved(answers(), 10.0) == 0.5


def test_what_moves_both_scores_is_no_news_of_the_item() -> None:
    alike = [ProbeAnswer(at=float(n), score=n / 20, unknown=n / 20) for n in range(20)]
    assert seconds_to_moved(alike, 10.0) is None
    assert not claim("new item", alike).true


def test_a_probe_without_an_earlier_answer_cannot_tell_that_the_score_moved() -> None:
    late = [ProbeAnswer(at=11.0, score=0.8)]
    with pytest.raises(ValueError, match="before it appeared"):
        seconds_to_moved(late, 10.0)
    assert not claim("new item", late).true


def test_an_item_that_was_known_before_it_appeared_is_not_new() -> None:
    known = [replace(one, score=0.8) for one in answers()]
    assert not claim("new item", known).true


# The kill


def test_one_request_without_an_answer_while_nothing_trains_is_reported() -> None:
    found = claim("kill -9", without(answers(), 22.0, 22.0))
    assert not found.true
    assert "8 of 9 requests were answered" in found.said


def test_a_probe_that_stopped_early_has_not_seen_that_the_server_answers() -> None:
    assert not claim("kill -9", [one for one in answers() if not 20.0 <= one.at <= 24.0]).true
    quiet = [one for one in answers() if not 20.5 <= one.at <= 23.5]
    assert longest_silence(quiet, 20.0, 24.0) == 4.0
    (found,) = [one for one in claims(quiet, TIMES, most_silent=3.0) if one.name == "kill -9"]
    assert not found.true


def test_a_server_that_stays_with_what_the_killed_one_knew_fails_the_demo() -> None:
    stuck = [replace(one, step=min(one.step, 200)) for one in answers()]
    found = claim("kill -9", stuck)
    assert not found.true
    assert "does not follow the restarted trainer" in found.said


def test_a_trainer_that_does_not_come_back_fails_the_demo() -> None:
    assert not claim("kill -9", answers(), replace(TIMES, resumed=None)).true


# The poison


def test_an_answer_learned_while_publishing_was_paused_is_a_leak() -> None:
    leaking = [replace(one, step=301) if one.at == 35.0 else one for one in answers()]
    found = claim("poisoned batch", leaking)
    assert not found.true
    assert "1 answers contain later steps" in found.said


def test_what_comes_after_the_release_is_no_leak() -> None:
    assert any(one.step > 300 for one in answers())
    assert claim("poisoned batch", answers()).true


@pytest.mark.parametrize("change", [{"held": None}, {"held": 29.0}])
def test_publishing_that_is_not_paused_or_resumes_too_early_fails_the_demo(
    change: dict[str, float | None],
) -> None:
    assert not claim("poisoned batch", answers(), replace(TIMES, **change)).true  # type: ignore[arg-type]
