"""The best checkpoint of a folder: named in one file, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from contracts.savers import put

from monolith.checkpoint import BestCheckpoint, Saver, list_checkpoints, read_best, write_best
from monolith.checkpoint.folder.saver import MANIFEST, checkpoint_exists
from monolith.errors import CorruptFileError


def best(step: int) -> BestCheckpoint:
    return BestCheckpoint(name=f"model.ckpt-{step}", step=step, metric="click/auc", value=0.75)


def save(saver: Saver, *steps: int) -> None:
    for step in steps:
        saver.save(step, lambda prefix: put(f"{prefix}{MANIFEST}"))


def on_disk(folder: Path, *steps: int) -> list[int]:
    return [step for step in steps if checkpoint_exists(str(folder / f"model.ckpt-{step}"))]


def test_a_folder_says_which_is_its_best(tmp_path: Path) -> None:
    assert read_best(str(tmp_path)) is None
    write_best(str(tmp_path), best(3))
    assert read_best(str(tmp_path)) == best(3)


def test_the_best_is_kept_until_another_one_is(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path), max_to_keep=2, keep_every=None)
    save(saver, 1)
    write_best(str(tmp_path), best(1))
    save(saver, 2, 3, 4)
    assert on_disk(tmp_path, 1, 2, 3, 4) == [1, 3, 4]
    write_best(str(tmp_path), best(4))
    save(saver, 5, 6, 7)
    assert on_disk(tmp_path, 1, 3, 4, 5, 6, 7) == [4, 6, 7]


@pytest.mark.parametrize(
    "text", ["{", '{"name": "x"}', '{"name": "../x-1", "step": 1, "metric": "", "value": 1}']
)
def test_while_the_best_is_unknown_none_is_deleted(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "best_checkpoint").write_text(text)
    with pytest.raises(CorruptFileError):
        read_best(str(tmp_path))
    saver = Saver(str(tmp_path), max_to_keep=1, keep_every=None)
    save(saver, 1, 2)
    assert on_disk(tmp_path, 1, 2) == [1, 2]
    assert "none is deleted" in caplog.text
    assert "best_checkpoint" in list_checkpoints(str(tmp_path)).problems[0]
