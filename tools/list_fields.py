"""Writes the frozen list of a run's fields and of the flags of `monolith train`: tests/config/fields.txt.

    python tools/list_fields.py        # after a field or a flag was added, renamed or removed

`tests/config/test_frozen_fields.py` compares the list with the code, so that each such change is seen in
review. A renamed field also needs an entry in `RENAMED_FIELDS`, so that the configs of users still work.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

FILE = Path(__file__).parents[1] / "tests" / "config" / "fields.txt"


def frozen_lines() -> list[str]:
    """Return one line for each field of a run, with its type and default; then one for each flag."""
    from monolith.cli.options.train import TrainOptions
    from monolith.cli.run_settings import SHORT_FLAGS, SWITCHES
    from monolith.config import describe_fields
    from monolith.runtime.config import RunConfig

    lines = []
    for field in describe_fields(RunConfig):
        default = "required" if field.default is dataclasses.MISSING else field.default_text
        lines.append(f"{field.path}: {field.type_text} = {default}")
    sets = SHORT_FLAGS | {name: path for name, (path, _) in SWITCHES.items()}
    hidden = {"run_flags", "words"}
    for option in dataclasses.fields(TrainOptions):
        if option.name not in hidden:
            flag = "--" + option.name.rstrip("_").replace("_", "-")
            lines.append(f"{flag} -> {sets[option.name]}" if option.name in sets else flag)
    return lines


if __name__ == "__main__":
    FILE.write_text("\n".join(frozen_lines()) + "\n")
    sys.stdout.write(f"wrote {FILE}\n")
