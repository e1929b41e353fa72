from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monolith.checkpoint.folder.retention import Retention, Saved, exempt_paths
from monolith.errors import ConfigError


def keeping(max_to_keep: int | None, keep_every: float | None = None, **known: Any) -> Retention:
    period = None if keep_every is None else timedelta(seconds=keep_every)
    return Retention(max_to_keep=max_to_keep, keep_every=period, **({"last_preserved": 0.0} | known))


def saved(
    retention: Retention, *paths: str, at: float = 1.0, exempt: frozenset[str] = frozenset()
) -> Retention:
    for path in paths:
        retention = retention.recorded(path, at).trimmed(exempt)
    return retention


# The list


def test_the_oldest_are_released_first():
    retention = saved(keeping(2), "a", "b", "c")
    assert (retention.paths, retention.released) == (("b", "c"), ("a",))


def test_fewer_than_the_bound_all_stay():
    retention = saved(keeping(5), "a", "b")
    assert (retention.paths, retention.released) == (("a", "b"), ())


def test_as_many_are_released_as_are_too_many():
    retention = keeping(2).relisted([Saved(path, 1.0) for path in "abcde"])
    assert retention.paths == tuple("abcde"), "a list is taken as it is, until the next save"
    retention = saved(retention, "f")
    assert (retention.paths, retention.released) == (("e", "f"), ("a", "b", "c", "d"))


def test_exempt_ones_are_not_released_and_do_not_count():
    exempt = frozenset("ab")
    retention = saved(keeping(3), *"abcde", exempt=exempt)
    assert retention.paths == tuple("abcde")
    retention = saved(retention, "f", exempt=exempt)
    assert (retention.paths, retention.released) == (("a", "b", "d", "e", "f"), ("c",))
    assert saved(retention, "g").paths == ("e", "f", "g"), "exempt no longer"


@pytest.mark.parametrize("max_to_keep", [0, None])
def test_without_a_bound_none_is_listed_and_none_released(max_to_keep):
    retention = saved(keeping(max_to_keep), "a", "b", "c")
    assert (retention.paths, retention.released, retention.due(())) == ((), (), ())
    assert retention.relisted([Saved("x", 1.0)]).paths == ()


def test_one_saved_again_is_the_newest_and_there_once():
    retention = saved(keeping(2), "a", "b", "c", "b")
    assert (retention.paths, retention.released) == (("c", "b"), ("a",))
    retention = saved(retention, "a")
    assert (retention.paths, retention.released) == (("b", "a"), ("c",)), "a came back before it was deleted"


def test_one_listed_twice_counts_once():
    retention = keeping(5).relisted([Saved("a", 1.0), Saved("b", 2.0), Saved("a", 3.0)])
    assert retention.listed == (Saved("a", 3.0), Saved("b", 2.0))


def test_a_retention_never_changes():
    before = saved(keeping(1), "a")
    saved(before, "b").without("a")
    assert (before.paths, before.released) == (("a",), ())


def test_the_rules_must_make_sense():
    with pytest.raises(ConfigError, match="max_to_keep"):
        keeping(-1)
    with pytest.raises(ConfigError, match="keep_every"):
        keeping(1, 0.0)
    with pytest.raises(ConfigError, match="the run started"):
        keeping(1, 1.0, last_preserved=None)


# Kept for good


def test_one_saved_after_the_next_keep_time_is_kept_for_good():
    retention = saved(keeping(2, 0.7), "a", "b", "c")
    assert (retention.paths, retention.released) == (("b", "c"), ())
    assert retention.next_keep_time == pytest.approx(1.4)
    retention = saved(retention, "d")
    assert (retention.paths, retention.released) == (("c", "d"), ("b",))


def test_one_saved_exactly_then_is_not():
    assert saved(keeping(1, 1.0), "a", "b", at=1.0).released == ("a",)


def test_after_an_idle_time_only_one_is_kept():
    retention = saved(keeping(1, 10.0), *"abcd", at=1000.0)
    assert (retention.released, retention.next_keep_time) == (("b", "c"), 1010.0)


def test_keep_times_stay_on_the_grid():
    assert saved(keeping(1, 10.0, last_preserved=3.0), "a", "b", at=47.0).next_keep_time == 53.0


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 20), st.integers(1, 3))
def test_kept_for_good_are_those_that_counting_period_by_period_finds(pauses, period, max_to_keep):
    times = [sum(pauses[: n + 1]) for n in range(len(pauses))]
    expected, next_keep = [], period
    for step, now in enumerate(times[: max(0, len(times) - max_to_keep)]):
        if now > next_keep:
            expected.append(str(step))
            while next_keep <= now:
                next_keep += period
    retention, kept = keeping(max_to_keep, period), []
    for step, now in enumerate(times):
        after = saved(retention, str(step), at=now)
        kept += set(retention.paths) - set(after.paths) - set(after.released)
        retention = after
    assert (kept, retention.next_keep_time) == (expected, next_keep)


@given(st.integers(0, 20), st.floats(0.1, 1e5), st.floats(1e9, 2e9))
def test_the_keep_time_is_the_same_after_a_restart(steps, period, began):
    retention = keeping(1, period, last_preserved=began)
    for step in range(steps):
        retention = saved(retention, str(step), at=began + step * 0.77 * period)
    again = keeping(1, period, last_preserved=retention.last_preserved)
    assert again.next_keep_time == retention.next_keep_time


def test_without_a_period_what_was_known_of_it_is_carried_along():
    assert keeping(1, None, last_preserved=5.0).next_keep_time is None
    assert saved(keeping(1, None, last_preserved=5.0), "a", "b").last_preserved == 5.0


# What needs what


def test_what_a_listed_one_needs_is_released_but_not_due():
    retention = saved(keeping(1), "a").recorded("b", 1.0, ["a"]).trimmed(())
    assert (retention.released, retention.due(())) == (("a",), ())
    retention = saved(retention, "c")
    assert (retention.released, retention.due(())) == (("a", "b"), ("a", "b"))


def test_dependencies_are_followed_through_checkpoints_that_are_released():
    retention = keeping(1).recorded("a", 1.0).recorded("b", 1.0, ["a"]).recorded("c", 1.0, ["b"]).trimmed(())
    assert (retention.released, retention.due(())) == (("a", "b"), ())
    assert retention.needed(()) == {"a", "b"}


def test_one_needed_by_two_waits_for_both():
    retention = keeping(2).recorded("a", 1.0).recorded("b", 1.0, ["a"]).recorded("c", 1.0, ["a"]).trimmed(())
    retention = saved(retention, "d")
    assert (retention.released, retention.due(())) == (("a", "b"), ("b",))


def test_a_circle_of_needs_ends():
    retention = keeping(1).recorded("a", 1.0, ["b"]).recorded("b", 1.0, ["a"]).trimmed(())
    assert retention.due(()) == ()
    assert saved(retention, "c").due(()) == ("a", "b")


def test_what_an_exempt_one_needs_is_not_due_listed_or_not():
    retention = keeping(1).recorded("a", 1.0).recorded("b", 1.0, ["a"]).recorded("c", 1.0).trimmed(())
    assert retention.due(frozenset("b")) == ()
    assert retention.due(()) == ("a", "b")


def test_what_one_kept_for_good_needs_is_never_due():
    retention = keeping(1, 0.5).recorded("a", 0.1).recorded("b", 1.0, ["a"]).recorded("c", 1.0).trimmed(())
    assert (retention.preserved, retention.released, retention.due(())) == (("b",), ("a",), ())
    assert retention.without("b").due(()) == ("a",)


def test_one_kept_for_good_that_needs_nothing_is_forgotten():
    assert saved(keeping(1, 0.5), "a", "b").preserved == ()


def test_one_that_leaves_by_another_list_still_has_what_it_needs():
    retention = keeping(1).recorded("a", 1.0).recorded("b", 1.0, ["a"]).trimmed(()).relisted([])
    assert (retention.preserved, retention.due(())) == (("b",), ())
    assert retention.relisted([Saved("b", 1.0)]).preserved == ()


def test_without_a_bound_needs_count_too():
    retention = keeping(0, released=("a",)).recorded("b", 1.0, ["a"])
    assert retention.due(()) == ()


def test_saved_again_whole_it_needs_nothing():
    retention = keeping(2).recorded("a", 1.0).recorded("b", 1.0, ["a"]).recorded("b", 2.0)
    assert retention.needed(()) == set()


# Half-way


def test_what_is_begun_may_go_until_it_is_recorded():
    begun = saved(keeping(2), "a").begun("b")
    assert (begun.paths, begun.due(())) == (("a",), ("b",))
    assert begun.recorded("b", 1.0).due(()) == ()


def test_one_whose_place_another_took_goes_unless_one_that_stays_needs_it():
    saved = keeping(3).recorded("a", 1.0).recorded("b", 2.0, ["a"]).recorded("a.2", 3.0).releasing(["a"])
    assert (saved.paths, saved.due(()), saved.needed(())) == (("b", "a.2"), (), {"a"})
    assert saved.releasing(["b"]).due(()) == ("a", "b")


def test_what_the_list_names_is_not_released_whatever_was_planned():
    retention = keeping(2, released=("a", "b")).relisted([Saved("a", 1.0)])
    assert (retention.released, retention.due(())) == (("b",), ("b",))


# Exempt entries


def test_a_bare_entry_is_a_name_in_the_folder_and_an_absolute_one_is_itself():
    entries = ["model.ckpt-1", "/other/model.ckpt-2", "hdfs:/x/model.ckpt-3", "sub/model.ckpt-4", ""]
    assert exempt_paths(entries, "/run") == {
        "/run/model.ckpt-1",
        "/other/model.ckpt-2",
        "hdfs:/x/model.ckpt-3",
        "/run/sub/model.ckpt-4",
    }
