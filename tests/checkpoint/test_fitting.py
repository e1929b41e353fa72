"""What of a checkpoint a changed model takes over: inputs by name, hidden units by their place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from monolith.checkpoint import Checkpointer, DensePart, FeaturesPart, RestoreOptions, Saver, TablesPart
from monolith.checkpoint.part import Changes, changes_from_json, changes_to_json, covered
from monolith.feature import BucketFeature, FeatureSpec, FloatFeature, IdFeature
from monolith.table import Adagrad, Adam, NativeTable, RandomUniform, Segment, TableConfig
from monolith.wire.messages import read_message, write_message

NAME = "first.weight"
BEFORE = {NAME: {"0": [["user", 2], ["item", 2]]}}


def axes(*inputs: tuple[str, int]) -> dict[str, dict[str, list[list[object]]]]:
    return {NAME: {"0": [list(one) for one in inputs]}}


def test_the_places_of_an_input_are_found_by_its_name() -> None:
    changes = Changes(before=BEFORE, now=axes(("user", 2), ("price", 1), ("item", 2)))
    blocks, why = changes.pieces(NAME, (4, 8), (5, 8))
    assert (blocks, why) == ([((0, 0, 2), (0, 0, 8)), ((2, 3, 2), (0, 0, 8))], "")
    assert covered(blocks) == 32


def test_an_input_of_the_same_width_under_another_name_is_new() -> None:
    changes = Changes(before=BEFORE, now=axes(("user", 2), ("shop", 2)))
    assert changes.pieces(NAME, (4, 8), (4, 8))[0] == [((0, 0, 2), (0, 0, 8))]


def test_a_wider_input_and_more_hidden_units_keep_the_leading_part() -> None:
    changes = Changes(before=BEFORE, now=axes(("user", 3), ("item", 1)))
    assert changes.pieces(NAME, (4, 8), (4, 16))[0] == [((0, 0, 2), (0, 0, 8)), ((2, 3, 1), (0, 0, 8))]
    assert changes.pieces("second.weight", (8, 1), (16, 1))[0] == [((0, 0, 8), (0, 0, 1))]


def test_what_is_as_it_was_is_loaded_whole() -> None:
    assert Changes(before=BEFORE, now=BEFORE).pieces(NAME, (4, 8), (4, 8)) == ([], "")
    assert Changes().pieces(NAME, (4, 8), (4, 8)) == ([], "")


def test_without_the_names_of_inputs_another_shape_starts_fresh() -> None:
    blocks, why = Changes(now=BEFORE).pieces(NAME, (4, 8), (5, 8))
    assert not blocks
    assert why == "it has shape (4, 8) in the checkpoint, this model needs (5, 8)"


def test_changes_go_to_a_server_and_back() -> None:
    from monolith.runtime.messages import RestoreTables

    changes = Changes(fresh={"item": "kind changed"}, rescaled=("price",), before=BEFORE, now=BEFORE)
    body = RestoreTables("run", (("p", {}),), "auto", False, changes_to_json(changes))
    assert changes_from_json(read_message(RestoreTables, write_message(body)).changes) == changes
    assert changes_from_json(None) is None


# A whole checkpoint


def spec(**features: object) -> FeatureSpec:
    return FeatureSpec(features=features, labels={})  # type: ignore[arg-type]


class Run:
    """Tables of some widths, one layer over them, and the features that say what is in them."""

    def __init__(self, folder: Path, spec: FeatureSpec, widths: dict[str, int], optimizer: object) -> None:
        torch.manual_seed(len(widths))
        self.tables = {
            name: NativeTable(
                TableConfig(
                    name=name,
                    segments=(Segment(dim=dim, optimizer=optimizer, initializer=RandomUniform()),),  # type: ignore[arg-type]
                )
            )
            for name, dim in widths.items()
        }
        inputs = {**widths, **spec.floats}
        self.model = nn.Module()
        self.model.register_parameter("weight", nn.Parameter(torch.randn(sum(inputs.values()), 3)))
        parts = [
            FeaturesPart(spec, {"weight": {"0": [list(one) for one in inputs.items()]}}),
            TablesPart(self.tables),
            DensePart(self.model, [torch.optim.Adagrad(self.model.parameters())]),
        ]
        self.checkpointer = Checkpointer(Saver(str(folder)), parts)

    def start_from(self, prefix: str) -> str:
        """Return the table of what became of all, without what sets its columns apart."""
        options = self.checkpointer.fitting(prefix, RestoreOptions())
        return re.sub(" +", " ", self.checkpointer.restore(prefix, options).report.table())

    def row(self, table: str) -> list[float]:
        found: list[float] = self.tables[table].lookup(torch.tensor([7]))[0].tolist()
        return found


OLD = {"user": IdFeature(), "item": IdFeature(), "price": FloatFeature()}


@pytest.fixture
def old(tmp_path: Path) -> tuple[Run, str]:
    run = Run(tmp_path / "old", spec(**OLD), {"user": 2, "item": 2}, Adagrad())
    for table in run.tables.values():
        table.assign(torch.tensor([7]), torch.tensor([[1.0, 2.0]]))
    return run, run.checkpointer.save(1)


def test_an_added_feature_starts_fresh_and_the_rest_is_loaded(old: tuple[Run, str], tmp_path: Path) -> None:
    run, prefix = old
    widths = {"user": 2, "shop": 2, "item": 2}
    new = Run(tmp_path / "new", spec(**OLD, shop=IdFeature()), widths, Adagrad())
    fresh = new.model.weight.detach().clone()
    table = new.start_from(prefix)
    assert new.row("user") == new.row("item") == [1.0, 2.0]
    assert new.row("shop") == [0.0, 0.0]
    before = run.model.weight
    assert torch.equal(new.model.weight, torch.cat([before[:2], fresh[2:4], before[2:]]))
    assert " loaded table item 1 rows" in table
    assert " partly weight 15 of 21 weights of 7 x 3" in table
    assert " fresh table shop the checkpoint does not have it" in table


def test_a_removed_feature_is_left_out_and_said(old: tuple[Run, str], tmp_path: Path) -> None:
    run, prefix = old
    new = Run(tmp_path / "new", spec(item=IdFeature(), price=FloatFeature()), {"item": 2}, Adagrad())
    assert " left out table user 1 rows; this model does not have it" in new.start_from(prefix)
    assert torch.equal(new.model.weight, run.model.weight[2:])


def test_wider_rows_keep_their_leading_columns_and_the_rest_is_as_in_a_new_row(
    old: tuple[Run, str], tmp_path: Path
) -> None:
    new = Run(tmp_path / "new", spec(**OLD), {"user": 3, "item": 1}, Adagrad())
    table = new.start_from(old[1])
    first = RandomUniform().values(torch.tensor([7]).numpy(), range(2, 3), 0)
    assert new.row("user") == [1.0, 2.0, first[0, 0]]
    assert new.row("item") == [1.0]
    assert (
        "table user 1 rows, 2 of 3 columns, optimizer state reset, because rows have other columns" in table
    )
    assert "table item 1 rows, 1 of 2 saved columns" in table


def test_another_optimizer_keeps_rows_and_starts_its_state_fresh(
    old: tuple[Run, str], tmp_path: Path
) -> None:
    new = Run(tmp_path / "new", spec(**OLD), {"user": 2, "item": 2}, Adam())
    table = new.start_from(old[1])
    assert new.row("user") == [1.0, 2.0]
    assert "table user 1 rows, optimizer state reset, because the optimizer changed" in table


def test_rows_whose_ids_now_mean_something_else_start_fresh(old: tuple[Run, str], tmp_path: Path) -> None:
    changed = {"user": IdFeature(kind="string"), "item": IdFeature(), "price": FloatFeature(scale="log")}
    new = Run(tmp_path / "new", spec(**changed), {"user": 2, "item": 2}, Adagrad())
    fresh = new.model.weight.detach().clone()
    table = new.start_from(old[1])
    assert new.row("user") == [0.0, 0.0]
    assert "fresh table user 1 rows; features.user.kind changed: int in the checkpoint, string now" in table
    assert torch.equal(new.model.weight[4:], fresh[4:])  # the price is another number now


def test_other_buckets_start_fresh(tmp_path: Path) -> None:
    one = Run(tmp_path / "old", spec(level=BucketFeature(boundaries=(1.0,))), {"level": 2}, Adagrad())
    one.tables["level"].assign(torch.tensor([7]), torch.ones(1, 2))
    prefix = one.checkpointer.save(1)
    new = Run(tmp_path / "new", spec(level=BucketFeature(boundaries=(2.0,))), {"level": 2}, Adagrad())
    assert "features.level.boundaries changed" in new.start_from(prefix)
    assert len(new.tables["level"]) == 0


def test_a_plain_restore_says_which_side_lacks_a_feature(old: tuple[Run, str], tmp_path: Path) -> None:
    from monolith.errors import RestoreError

    more = Run(tmp_path / "a", spec(**OLD, shop=IdFeature()), {"user": 2, "shop": 2, "item": 2}, Adagrad())
    with pytest.raises(RestoreError, match=r"the checkpoint does not have features.shop.*--from .*old "):
        more.checkpointer.restore(old[1])
    fewer = Run(tmp_path / "b", spec(user=IdFeature()), {"user": 2}, Adagrad())
    with pytest.raises(RestoreError, match=r"this model does not have features.item"):
        fewer.checkpointer.restore(old[1])
