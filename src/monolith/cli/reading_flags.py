"""Which flags of a run's config `monolith evaluate` and `monolith predict` take: those that say what is read.

How a model is trained, and by how many processes, is over by then; a flag of that kind would be ignored, so
it is refused with the reason. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monolith.config import Renamed
from monolith.errors import ConfigError
from monolith.run.old_names import OLD_NAMES

READ = ("data", "kafka", "examples", "labels", "task", "candidates", "threads", "train.model_dir")
"""Groups and fields that say what is read, and with which threads."""
REASONS: Mapping[str, str] = {
    "train": "it says how a model is trained, and a checkpoint is only read here",
    "features": "features are those of the training; change them in the config, and train anew",
    "model": "the model is the one that was trained; change it in the config, and train anew",
    "admission": "it says which ids earn a row in training, and a checkpoint is only read here",
    "job": "it says what is trained; give the task as the first word, or by --config",
    "data_service": "what a data service hands out is for who trains",
}
OTHERWISE = "it is for the processes that train, and one process reads a checkpoint"


def check_reading_flags(flags: Sequence[str]) -> None:
    """Refuse a flag that says nothing of what is read.

    Raises:
        ConfigError: Names it, and says why.
    """
    for word in flags:
        if not word.startswith("--"):
            continue
        given = word.partition("=")[0]
        name = given[2:].replace("-", "_")
        alias = OLD_NAMES.get(name)
        path = alias.path if isinstance(alias, Renamed) else name
        if not any(path == one or path.startswith(f"{one}.") for one in READ):
            reason = REASONS.get(path.partition(".")[0], OTHERWISE)
            raise ConfigError(
                f"{given} is a flag of monolith train: {reason}. Flags that are taken here say what is read: "
                "--data.*, --examples.*, --labels; settings of the task are given by --set, as in --set "
                "batch_size=1024 or --set scores=auc"
            )
