"""Pictures of what experiments found, drawn by matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from monolith.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(command: str, width: float, height: float) -> Figure:
    """Return an empty picture, its size in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise ConfigError(
            f"{command}: --plot needs matplotlib; pip install 'monolith-recsys[plot]'"
        ) from cause
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, command: str, path: Path) -> None:
    """Write a picture, in the format that the ending of its path names.

    Raises:
        ConfigError: There is no such format.
    """
    try:
        figure.savefig(path)
    except ValueError as cause:
        raise ConfigError(f"{command}: cannot draw to {str(path)!r}: {cause}") from cause
