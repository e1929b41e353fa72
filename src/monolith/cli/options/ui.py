"""The options of `monolith ui`, apart from what runs it: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from monolith.cli.options.security import SecurityOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class UiOptions:
    """Show runs and servers on a page in the browser, live: quality, freshness, speed, tables."""

    sources: tuple[str, ...]
    """What to look at: the model_dir of a run, http://host:port of the metrics of a process that trains
    (`monolith train --metrics-port`), or http://host:port of a server (`monolith serve`). NAME=PLACE chooses
    what the page calls it."""
    host: str = "127.0.0.1"
    """The address to listen on; by default only this machine can reach it. Another one needs a token."""
    port: int = 8686
    """The port of the page; 0 chooses a free one."""
    every: float = 1.0
    """Seconds between two looks at a source."""
    source_token_file: Path | None = None
    """A file with the token that runs and servers ask for, where that is not the page's own."""
    open: bool = False
    """Open the page in the browser of this machine."""
    security: Annotated[SecurityOptions, tyro.conf.arg(name="")] = field(default_factory=SecurityOptions)
