"""Which flags of a run's config `monolith evaluate` and `monolith predict` take: those that say what is read.

How a model is trained, and by how many processes, is over by then; a flag of that kind would be ignored, so
it is refused with the reason. What the model is, a checkpoint's command says: flags of model, features and
task that it was trained with are taken from there, and need not be given again. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monolith.config import Renamed
from monolith.errors import ConfigError
from monolith.runtime.config_loading import old_names

READ = ("data", "kafka", "examples", "labels", "task", "candidates", "threads", "train.model_dir")
"""Groups and fields that say what is read, and with which threads."""
OF_MODEL = ("features", "model", "labels", "examples", "candidates", "task")
"""Groups that say what the model is and how it reads its data."""
REASONS: Mapping[str, str] = {
    "train": "it says how a model is trained, and a checkpoint is only read here",
    "features": "features are those of the training, whose flags are taken by themselves",
    "model": "the model is the one that was trained, with its flags",
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
    for word, *_ in with_values(flags):
        given, path = word.partition("=")[0], _path(word)
        if not any(path == one or path.startswith(f"{one}.") for one in READ):
            reason = REASONS.get(path.partition(".")[0], OTHERWISE)
            raise ConfigError(
                f"{given} is a flag of monolith train: {reason}. Flags that are taken here say what is read: "
                "--data.*, --examples.*, --labels; settings of the task are given by --set, as in --set "
                "batch_size=1024 or --set scores=auc"
            )


def flags_of_model(flags: Sequence[str]) -> list[tuple[str, ...]]:
    """Return those flags of a training that say what its model is, each with its values."""
    return [one for one in with_values(flags) if _path(one[0]).partition(".")[0] in OF_MODEL]


def with_values(flags: Sequence[str]) -> list[tuple[str, ...]]:
    """Return each flag with the words that follow it."""
    found: list[list[str]] = []
    for word in flags:
        if word.startswith("--"):
            found.append([word])
        elif found:
            found[-1].append(word)
    return [tuple(one) for one in found]


def _path(word: str) -> str:
    """The dotted path of the field that a flag sets."""
    name = word[2:].partition("=")[0].replace("-", "_")
    alias = old_names().get(name)
    return alias.path if isinstance(alias, Renamed) else name
