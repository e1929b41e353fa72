"""Event files, read back the way TensorBoard does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.data.provider import RunTagFilter

from monolith.errors import FilesystemError, MissingExtraError
from monolith.observe.summaries import SummaryWriter, insight_data, nas_data, read_summaries, summary_metadata

NAMES = ["f1", "f2", "f3"]
WEIGHT = torch.linspace(-1, 1, 17)


def provider(folder: Path) -> MultiplexerDataProvider:
    multiplexer = EventMultiplexer(tensor_size_guidance={"scalars": 0, "monolith": 0})
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    return MultiplexerDataProvider(multiplexer, str(folder))


def tensors(data: MultiplexerDataProvider, tag: str) -> tuple[Any, list[Any]]:
    ctx, only = RequestContext(), RunTagFilter(tags=[tag])
    found = data.list_tensors(ctx, experiment_id="", plugin_name="monolith", run_tag_filter=only)
    points = data.read_tensors(
        ctx, experiment_id="", plugin_name="monolith", run_tag_filter=only, downsample=100
    )
    return found["."][tag], points["."][tag]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step in range(10):
            writer.tensor(
                nas_data(WEIGHT + step, NAMES, [3, 5, 9], [["f1", "f2"], ["f3", "f4"], ["f5", "f6"]]), step
            )
            writer.tensor(
                insight_data(
                    torch.full((3, 6), float(step)), NAMES, [2, 2, 2], label=torch.tensor([0, 1, 0])
                ),
                step,
            )
            writer.scalars({"loss": 1 / (step + 1), "metrics/click/auc": 0.5 + step / 100}, step)
    return tmp_path / "run"


def test_tensorboard_reads_nas_weights_with_their_head(written: Path) -> None:
    series, points = tensors(provider(written), "gating/monolith_nas_weight")
    assert series.plugin_content == (
        b'{"tag_type": "gating", "segment_names": ["f1", "f2", "f3"], "segment_sizes": [3, 5, 9], '
        b'"group_index": [0, 0, 1]}'
    )
    assert series.description == "gating"
    assert [point.step for point in points] == list(range(10))
    np.testing.assert_array_equal(points[4].numpy, (WEIGHT + 4).numpy())


def test_tensorboard_reads_feature_insight_with_its_head(written: Path) -> None:
    series, points = tensors(provider(written), "fi_train/monolith_feature_insight")
    assert series.plugin_content == (
        b'{"tag_type": "fi_train", "segment_names": ["f1", "f2", "f3"], "segment_sizes": [2, 2, 2], '
        b'"group_index": [0, 1, 2], "label_size": 1}'
    )
    assert points[0].numpy.shape == (3, 7)
    assert points[0].numpy[:, 6].tolist() == [0, 1, 0]


def test_tensorboard_reads_scalars(written: Path) -> None:
    points = provider(written).read_scalars(
        RequestContext(), experiment_id="", plugin_name="scalars", downsample=100
    )["."]
    assert [point.value for point in points["loss"]] == pytest.approx([1 / (n + 1) for n in range(10)])
    assert points["metrics/click/auc"][-1].value == pytest.approx(0.59)


def test_what_a_run_wrote_beyond_its_restart_is_not_shown(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as first:
        first.start(0)
        for step in range(6):
            first.scalar("loss", step, step)
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "events.out.tfevents.1000000000.earlier")  # names begin with the time in seconds
    with SummaryWriter(str(tmp_path)) as second:
        second.start(2)
        second.scalar("loss", 30, 3)
    points = provider(tmp_path).read_scalars(
        RequestContext(), experiment_id="", plugin_name="scalars", downsample=100
    )["."]["loss"]
    assert [point.value for point in points] == [0, 1, 2, 30]


def test_the_clock_is_the_one_given(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path), clock=lambda: 1234.5) as writer:
        writer.tensor(nas_data(WEIGHT, raw_tag="simple"), 7)
    (found,) = read_summaries(str(path) for path in tmp_path.iterdir())
    assert (found.step, found.wall_time, found.content) == (7, 1234.5, b"")


def test_summaries_are_read_file_after_file_without_those_of_other_plugins(written: Path) -> None:
    found = list(read_summaries(str(path) for path in written.iterdir()))
    assert len(found) == 20
    assert {one.tag for one in found} == {"gating/monolith_nas_weight", "fi_train/monolith_feature_insight"}
    assert json.loads(found[0].content)["tag_type"] == "gating"
    scalars = list(read_summaries((str(path) for path in written.iterdir()), "scalars"))
    assert len(scalars) == 20


def test_a_torn_file_is_read_to_its_last_whole_record(written: Path) -> None:
    (path,) = written.iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    assert 18 <= len(list(read_summaries([str(path)]))) <= 20


def test_metadata_names_the_plugin_and_takes_text_or_bytes() -> None:
    for content in ("{}", b"{}"):
        metadata = summary_metadata("what it is", content)
        assert metadata.plugin_data.plugin_name == "monolith"
        assert metadata.plugin_data.content == b"{}"
        assert metadata.summary_description == "what it is"
        assert metadata.data_class == 2  # DATA_CLASS_TENSOR


def test_closing_twice_does_nothing_and_writing_after_it_is_an_error(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    writer.close()
    writer.close()
    with pytest.raises(FilesystemError, match="cannot write summaries"):
        writer.scalar("loss", 1.0, 1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FilesystemError, match="file/run"):
        SummaryWriter(str(tmp_path / "file" / "run"))


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MissingExtraError, match=r"monolith-recsys\[tensorboard\]"):
        SummaryWriter(str(tmp_path))
