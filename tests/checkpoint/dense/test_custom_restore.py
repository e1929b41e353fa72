from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from checkpoint.dense.restores import restore_dense

from monolith.checkpoint.dense.custom_restore import (
    CustomRestore,
    Origin,
    RestorePlan,
    parts_by_whole,
    path_of,
)
from monolith.checkpoint.dense.state import capture_dense
from monolith.errors import ConfigError, RestoreError

S = (2, 3)
"""A shape, where it does not matter which."""


def plan(custom: CustomRestore, current: list[str] | dict, saved: list[str] | dict) -> RestorePlan:
    def shapes(names: list[str] | dict) -> dict[str, tuple[int, ...]]:
        return names if isinstance(names, dict) else dict.fromkeys(names, S)

    return custom.plan(shapes(current), shapes(saved))


def origins(custom: CustomRestore, current: list[str] | dict, saved: list[str] | dict) -> dict[str, str]:
    return {name: origin.name for name, origin in plan(custom, current, saved).origins.items()}


# Plain


def test_names_that_did_not_change_are_loaded_as_they_are() -> None:
    found = plan(CustomRestore(), ["a.b", "c"], ["a.b", "c", "d"])
    assert found.origins == {"a.b": Origin("a.b"), "c": Origin("c")}
    assert found.renamed == {}


def test_dots_and_slashes_are_the_same() -> None:
    found = plan(CustomRestore(), ["a.b.weight", "c/d"], ["a/b/weight", "c.d"])
    assert found.origins == {"a.b.weight": Origin("a/b/weight"), "c/d": Origin("c.d")}
    assert found.renamed == {}
    assert path_of("a.b/c:0") == "a/b/c"


def test_where_two_saved_names_differ_in_that_alone_only_the_exact_one_is_meant() -> None:
    assert origins(CustomRestore(auto_alias=False), ["a.b"], ["a/b", "a.b"]) == {"a.b": "a.b"}
    assert origins(CustomRestore(auto_alias=False), ["a.b/c"], ["a/b/c", "a.b.c"]) == {}


# Parts


def test_parts_are_numbered_without_a_gap_and_of_one_width() -> None:
    assert parts_by_whole({"x/part_1": (1, 2), "x/part_0": (3, 2)}) == {"x": ["x/part_0", "x/part_1"]}
    assert parts_by_whole({"x.part_0": (3,)}) == {"x": ["x.part_0"]}
    assert parts_by_whole({f"x/part_{i}": (1,) for i in range(11)})["x"][-1] == "x/part_10"
    for other in (
        {"x/part_0": (1, 2), "x/part_2": (1, 2)},
        {"x/part_1": (1, 2)},
        {"x/part_0": (1, 2), "x/part_1": (1, 3)},
        {"x/part_0": ()},
        {"x/part_0": (1,), "x": (1,)},
        {"x/part_0/y": (1,)},
        {"part_0": (1,)},
    ):
        assert parts_by_whole(other) == {}


def test_a_variable_in_parts_is_cut_out_of_the_whole_in_the_order_of_its_numbers() -> None:
    current = {f"x/part_{i}": (i + 1, 4) for i in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)}
    found = plan(CustomRestore(), current, {"x": (66, 4)})
    assert found.origins["x/part_0"] == Origin("x", (0, 1))
    assert found.origins["x/part_2"] == Origin("x", (3, 6))
    assert found.origins["x/part_10"] == Origin("x", (55, 66))
    assert found.renamed == {}
    assert found.problems == {}


def test_parts_that_do_not_add_up_are_a_problem() -> None:
    found = plan(CustomRestore(), {"x/part_0": (2, 4), "x/part_1": (2, 4)}, {"x": (5, 4)})
    assert found.problems.keys() == {"x/part_0", "x/part_1"}
    assert "its 2 parts make (4, 4), x in the checkpoint has shape (5, 4)" in found.problems["x/part_0"]


def test_parts_that_were_saved_as_parts_are_loaded_so() -> None:
    names = ["x/part_0", "x/part_1"]
    assert plan(CustomRestore(), names, names).origins == {name: Origin(name) for name in names}


# A map


def test_upstreams_partitioned_variables_with_a_map(tmp_path: Path) -> None:
    """A (1280 x 512) variable in parts of 128 KiB, 64 rows each, and a small one, both renamed."""
    whole, small = torch.rand(1280, 512), torch.rand(10, 5)
    before = {f"partition/part_{i}": part for i, part in enumerate(whole.split(64))} | {"small_var": small}
    prefix = f"{tmp_path}/model.ckpt-1"
    capture_dense(before).write_files(prefix)
    after = {f"partition2/part_{i}": torch.zeros(64, 512) for i in range(20)} | {
        "small_var2": torch.zeros(10, 5)
    }
    alias_map = {name: "partition" if "part_" in name else "small_var" for name in after}
    report = restore_dense(prefix, after, custom=CustomRestore(alias_map=alias_map))
    assert len(report.renamed) == len(report.loaded) == len(alias_map) == 21
    assert report.renamed["partition2/part_7"] == "partition"
    for i, part in enumerate(whole.split(64)):
        assert torch.equal(after[f"partition2/part_{i}"], part)
    assert torch.equal(after["small_var2"], small)
    assert report.unused == ()


def test_a_map_may_name_the_whole_variable() -> None:
    current = {"new/part_0": (3, 2), "new/part_1": (2, 2)}
    found = plan(CustomRestore(alias_map={"new": "old"}), current, {"old": (5, 2)})
    assert found.origins == {"new/part_0": Origin("old", (0, 3)), "new/part_1": Origin("old", (3, 5))}
    assert found.renamed == {"new/part_0": "old", "new/part_1": "old"}


def test_parts_may_come_from_several_variables() -> None:
    current = {"n/part_0": (2,), "n/part_1": (3,), "n/part_2": (4,)}
    alias_map = {"n/part_0": "a", "n/part_1": "b", "n/part_2": "b"}
    found = plan(CustomRestore(alias_map=alias_map), current, {"a": (2,), "b": (7,)})
    assert found.origins == {
        "n/part_0": Origin("a"),
        "n/part_1": Origin("b", (0, 3)),
        "n/part_2": Origin("b", (3, 7)),
    }


def test_mapped_parts_that_do_not_add_up_are_a_problem() -> None:
    current = {"n/part_0": (2,), "n/part_1": (3,)}
    assert plan(CustomRestore(alias_map={"n": "o"}), current, {"o": (9,)}).problems.keys() == current.keys()


def test_variables_outside_of_the_map_keep_their_names() -> None:
    custom = CustomRestore(alias_map={"new.weight": "old.weight"})
    assert origins(custom, ["new.weight", "same"], ["old.weight", "same"]) == {
        "new.weight": "old.weight",
        "same": "same",
    }


def test_names_of_a_map_may_have_slashes_and_outputs() -> None:
    custom = CustomRestore(alias_map={"a/new:0": "b/old:0"})
    assert origins(custom, ["a.new"], ["b.old"]) == {"a.new": "b.old"}


def test_two_variables_may_start_from_one() -> None:
    custom = CustomRestore(alias_map={"tower_a": "tower", "tower_b": "tower"})
    found = plan(custom, ["tower_a", "tower_b"], ["tower"])
    assert found.origins == {"tower_a": Origin("tower"), "tower_b": Origin("tower")}


def test_a_map_whose_new_names_are_all_saved_is_done_and_ignored() -> None:
    custom = CustomRestore(alias_map={"new": "old", "x/part_0": "y", "x/part_1": "y"})
    current = {"new": (1,), "x/part_0": (2,), "x/part_1": (2,)}
    saved = {"new": (1,), "x": (4,), "old": (1,), "y": (4,)}
    assert plan(custom, current, saved).origins == {
        "new": Origin("new"),
        "x/part_0": Origin("x", (0, 2)),
        "x/part_1": Origin("x", (2, 4)),
    }


def test_a_map_is_not_done_because_its_old_names_are_saved() -> None:
    """Upstream looked for the values of the map among the current names."""
    custom = CustomRestore(alias_map={"b": "a", "a": "c"})
    assert origins(custom, ["a", "b"], ["a", "c"]) == {"a": "c", "b": "a"}


def test_a_map_of_names_that_are_not_there_is_refused() -> None:
    with pytest.raises(RestoreError, match=r"no such variable. Did you mean 'tower/weight'\?"):
        plan(CustomRestore(alias_map={"towr.weight": "a"}), ["tower.weight"], ["a"])
    with pytest.raises(
        RestoreError, match=r"'new' is to be loaded from 'gone', not found in checkpoint. It has a"
    ):
        plan(CustomRestore(alias_map={"new": "gone"}), ["new"], ["a"])


# The automatic map


def test_repeated_components_may_be_gone() -> None:
    assert origins(CustomRestore(), ["tower/dense/kernel"], ["tower/tower/dense/kernel"]) == {
        "tower/dense/kernel": "tower/tower/dense/kernel"
    }
    assert origins(CustomRestore(), ["a/b/kernel"], ["a/b/a/kernel"]) == {"a/b/kernel": "a/b/a/kernel"}
    assert origins(CustomRestore(), ["a.0.b.0.weight"], ["a.a.0.b.0.weight"]) == {
        "a.0.b.0.weight": "a.a.0.b.0.weight"
    }


@pytest.mark.parametrize("suffix", ["bias", "kernel", "trainable_kernel_norm", "weight", "kernel/weight"])
def test_layers_may_be_renumbered(suffix: str) -> None:
    old = [f"t/dense_{n}/{suffix}" for n in (4, 5, 6)]
    new = [f"t/dense_{n}/{suffix}" for n in (0, 1, 2)]
    assert origins(CustomRestore(), new, old) == dict(zip(new, old, strict=True))


def test_layers_are_ordered_by_number_not_by_letters() -> None:
    old = [f"t/dense_{n}/kernel" for n in (2, 10, 9)]
    new = [f"t/dense_{n}/kernel" for n in (0, 1, 2)]
    assert origins(CustomRestore(), new, old) == {
        "t/dense_0/kernel": "t/dense_2/kernel",
        "t/dense_1/kernel": "t/dense_9/kernel",
        "t/dense_2/kernel": "t/dense_10/kernel",
    }


def test_numbers_move_together_even_if_some_names_are_still_there() -> None:
    assert origins(CustomRestore(), ["t/d_0/bias", "t/d_1/bias"], ["t/d_1/bias", "t/d_2/bias"]) == {
        "t/d_0/bias": "t/d_1/bias",
        "t/d_1/bias": "t/d_2/bias",
    }


def test_each_prefix_counts_for_itself() -> None:
    old = ["a/dense_1/bias", "a/dense_3/bias", "b/dense_2/bias", "b/dense_4/bias"]
    new = ["a/dense_0/bias", "a/dense_1/bias", "b/dense_0/bias", "b/dense_1/bias"]
    assert origins(CustomRestore(), new, old) == dict(zip(new, old, strict=True))


def test_modules_of_a_torch_sequential_are_layers_too() -> None:
    old = [f"mlp.{n}.{leaf}" for n in (0, 2, 4) for leaf in ("weight", "bias")]
    new = [f"mlp.{n}.{leaf}" for n in (0, 1, 2) for leaf in ("weight", "bias")]
    shapes = {"weight": (3, 3), "bias": (3,)}
    found = origins(
        CustomRestore(),
        {name: shapes[name.split(".")[-1]] for name in new},
        {name: shapes[name.split(".")[-1]] for name in old},
    )
    assert found == dict(zip(new, old, strict=True))


def test_a_layer_without_a_number_comes_first_or_is_left_out() -> None:
    """Upstream crashed on a name without `_`."""
    old = ["t/dense_3/kernel", "t/dense_4/kernel", "dense/kernel"]
    new = ["t/dense/kernel", "t/dense_1/kernel", "dense/kernel"]
    assert origins(CustomRestore(), new, old) == dict(zip(new, old, strict=True))
    assert origins(CustomRestore(), ["x/dense/kernel"], ["dense/kernel"]) == {}


def test_a_layer_more_or_less_is_no_renumbering() -> None:
    new = ["t/dense_0/kernel", "t/dense_1/kernel"]
    assert origins(CustomRestore(), new, ["t/dense_5/kernel"]) == {}
    assert origins(CustomRestore(), new, [f"t/dense_{n}/kernel" for n in (5, 6, 7)]) == {}


def test_layers_of_other_shapes_are_not_taken_for_the_old_ones() -> None:
    assert origins(CustomRestore(), {"d_0/kernel": (3, 4)}, {"d_1/kernel": (4, 3)}) == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("m/dcn/kernel_2", "m.dcn.layers.2.kernel.weight"),
        ("dcn_1/bias_0", "dcn_1.layers.0.bias"),
        ("m/dcn/trainable_kernel_norm_0", "m.dcn.layers.0.kernel.norm"),
        ("x/c_dot/mlp/dense_0/kernel", "x.c_dot.compress_tower.dense_0.kernel"),
        ("x/x/c_dot/mlp/dense_0/kernel", "x/c_dot/compress_tower/dense_0/kernel"),
    ],
)
def test_old_names_of_our_own_layers_are_known(old: str, new: str) -> None:
    assert origins(CustomRestore(), [new, "same"], [old, "same"]) == {new: old, "same": "same"}


def test_rules_may_be_added() -> None:
    custom = CustomRestore(rules=[(r"^user_(\w+)/", r"user/\1/")])
    assert origins(custom, ["user.tower.weight"], ["user_tower/weight"]) == {
        "user.tower.weight": "user_tower/weight"
    }
    assert origins(custom, ["user/t/d_0/bias"], ["user_t/d_7/bias"]) == {"user/t/d_0/bias": "user_t/d_7/bias"}


def test_where_one_variable_is_left_over_nothing_is_guessed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = origins(CustomRestore(), ["t/d_0/bias", "same", "new"], ["t/d_3/bias", "same"])
    assert found == {"same": "same"}
    assert "nothing in the checkpoint fits new;" in caplog.text


def test_unwanted_variables_do_not_stop_the_guessing() -> None:
    current = dict.fromkeys(["t/d_0/bias", "new"], S)
    found = CustomRestore().plan(current, {"t/d_3/bias": S}, wanted=["t/d_0/bias"])
    assert found.renamed == {"t/d_0/bias": "t/d_3/bias"}


def test_what_could_be_two_is_neither() -> None:
    assert origins(CustomRestore(), ["a/kernel"], ["a/a/kernel", "a/a/a/kernel"]) == {}
    assert origins(CustomRestore(rules=[("^b", "a")]), ["a/x", "b/x"], ["b/x"]) == {"b/x": "b/x"}


def test_where_all_names_are_saved_nothing_is_guessed() -> None:
    names = ["t/d_1/bias", "t/t/d_1/bias"]
    assert origins(CustomRestore(), names, names) == {name: name for name in names}


def test_guessing_can_be_turned_off() -> None:
    assert origins(CustomRestore(auto_alias=False), ["d_0/bias"], ["d_1/bias"]) == {}


def test_parts_are_found_by_guessing_too() -> None:
    found = plan(CustomRestore(), {"t/x/part_0": (2,), "t/x/part_1": (1,)}, {"t/t/x": (3,)})
    assert found.origins == {"t/x/part_0": Origin("t/t/x", (0, 2)), "t/x/part_1": Origin("t/t/x", (2, 3))}


# Clearing


def test_clearing_is_done_once_per_folder(tmp_path: Path) -> None:
    custom = CustomRestore(reset_dense=True)
    assert custom.clears(str(tmp_path))
    custom.mark_cleared(str(tmp_path))
    assert (tmp_path / "clear_nn").read_text() == "clean nn done!"
    assert not custom.clears(str(tmp_path))
    assert not CustomRestore().clears(None)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose one"):
        CustomRestore(reset_dense=True, alias_map={"a": "b"})
    with pytest.raises(ConfigError, match="reset_dense does to the global step"):
        CustomRestore(continue_training=True)
    with pytest.raises(ConfigError, match="needs a model_dir"):
        CustomRestore(reset_dense=True).clears(None)
    with pytest.raises(ConfigError, match="not a regular expression"):
        CustomRestore(rules=[("(", "")])
