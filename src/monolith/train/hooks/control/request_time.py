"""Stop exactly at a moment of the data: the model of midnight, whenever it is trained.

An operator writes the moment, in Unix seconds, into the file `limit_req_time` of the model
directory. Once a batch reaches it, the run saves and ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from monolith import filesystem
from monolith.errors import FileMissingError
from monolith.train.hook import Every, Hook, Run, StepResult
from monolith.train.hooks.saving.timer import SaveTimer

_log = logging.getLogger(__name__)

LIMIT_FILE = "limit_req_time"


def newest_example(result: StepResult) -> int:
    """Return the request time of a step: Unix seconds of the newest example in its batch."""
    return result.batch.ids.event_time


class RequestTimeHook(Hook):
    """Ends the run at the data timestamp in `limit_req_time`. Comes before the save hook.

    Args:
        timer: Of the save hook; made due, so that the state of this very step is saved.
        step_interval: Looks for the file, and at the data, when a multiple of this is reached or passed.
    """

    def __init__(
        self,
        timer: SaveTimer,
        *,
        step_interval: int = 1000,
        request_time: Callable[[StepResult], int] = newest_example,
    ) -> None:
        self._timer = timer
        self._every = Every(step_interval, "request time: step_interval")
        self._request_time = request_time

    def after_create(self, run: Run) -> None:
        self._every.begin(run.step)

    def after_step(self, run: Run, result: StepResult) -> None:
        if not self._every.crossed(run.step) or not run.model_dir:
            return
        limit = read_limit(run.model_dir)
        if limit <= 0:
            return
        now = self._request_time(result)
        if now >= limit:
            self._timer.enabled = True
            self._timer.reset()
            run.request_stop(f"the data reached {now}, the limit in {LIMIT_FILE} is {limit}")


def read_limit(model_dir: str) -> int:
    """Return the timestamp in `limit_req_time`; -1 where there is no file, or none that can be read."""
    path = filesystem.join(model_dir, LIMIT_FILE)
    try:
        text = filesystem.read_bytes(path)
    except FileMissingError:
        return -1
    try:
        return int(text)
    except ValueError:
        _log.error("%s must contain Unix seconds, got %r; no limit applies until it does", path, text[:40])
        return -1
