"""The fields of a run and the flags of `monolith train` change only on purpose."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from monolith.cli.options.train import TrainOptions
from monolith.cli.train import SHORT_FLAGS, SWITCHES
from monolith.config.fields import field_docs

TOOL = Path(__file__).parents[2] / "tools" / "list_fields.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("list_fields", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_fields_and_flags_are_those_of_the_frozen_list() -> None:
    tool = load_tool()
    frozen, now = tool.FILE.read_text().splitlines(), tool.frozen_lines()
    gone, new = sorted(set(frozen) - set(now)), sorted(set(now) - set(frozen))
    assert (gone, new) == ([], []), (
        "fields or flags changed. If that is intended: run `python tools/list_fields.py`, name the change in "
        "CHANGELOG.md, and list the former path of a renamed field in RENAMED_FIELDS"
    )


def test_the_help_of_each_short_flag_names_the_field_it_sets() -> None:
    docs = {name: " ".join(text.split()) for name, text in field_docs(TrainOptions).items()}
    sets = SHORT_FLAGS | {name: path for name, (path, _) in SWITCHES.items()}
    unnamed = [name for name, path in sets.items() if not re.search(rf"Sets {re.escape(path)}\.", docs[name])]
    assert unnamed == []
