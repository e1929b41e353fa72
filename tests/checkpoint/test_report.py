from __future__ import annotations

from monolith.checkpoint.part import RestoreReport


def test_it_reads_well() -> None:
    report = RestoreReport(
        loaded={"mlp.weight": "", "mlp.bias": "", "table item": "1,000 rows loaded"},
        reset={"table item": "optimizer state reset", "head.weight": "reset: it has shape (2,)", "noise": ""},
        renamed={"mlp.weight": "tower.weight"},
        skipped={"v0": "live", "v1": ""},
        missing=("new.weight",),
        unused=("old.weight",),
        global_step=12_000,
    )
    assert report.describe().splitlines() == [
        "loaded (2): mlp.weight, mlp.bias",
        "reset (1): noise",
        "table item: 1,000 rows loaded, optimizer state reset",
        "head.weight: reset: it has shape (2,)",
        "renamed (1): mlp.weight (was tower.weight)",
        "left alone (2): v0 (live), v1",
        "missing in the checkpoint (1): new.weight",
        "unused in the checkpoint (1): old.weight",
        "global step: 12,000",
    ]


def test_a_name_that_was_loaded_and_reset_is_one_line() -> None:
    assert RestoreReport(loaded={"a": ""}, reset={"a": ""}).describe() == "a: loaded, reset"


def test_nothing_is_said_too() -> None:
    assert RestoreReport().describe() == "nothing was restored"


def test_long_lists_are_cut_short() -> None:
    report = RestoreReport(loaded={f"v{i}": "" for i in range(100)})
    assert report.describe().endswith("v7, and 92 more")
    assert len(report.describe()) < 100


def test_reports_merge_and_lose_nothing() -> None:
    first = RestoreReport(loaded={"a": "1 row loaded"}, missing=("x",), unused=("u",), global_step=3)
    second = RestoreReport(loaded={"a": "2 rows loaded", "b": ""}, reset={"c": "why"}, missing=("x", "y"))
    merged = first.merge(second, RestoreReport(renamed={"b": "z"}, skipped={"d": "live"}))
    assert merged == RestoreReport(
        loaded={"a": "1 row loaded, 2 rows loaded", "b": ""},
        reset={"c": "why"},
        renamed={"b": "z"},
        skipped={"d": "live"},
        missing=("x", "y"),
        unused=("u",),
        global_step=3,
    )
    assert RestoreReport().merge() == RestoreReport()


def test_it_is_complete_if_nothing_was_reset_or_missing() -> None:
    assert RestoreReport(loaded={"a": ""}, unused=("b",), skipped={"c": "live"}).complete
    assert not RestoreReport(missing=("a",)).complete
    assert not RestoreReport(reset={"a": ""}).complete
