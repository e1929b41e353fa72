"""`Run`: everything that `monolith train` does, for a notebook or a script.

A run is a `RunConfig` and a task. It trains in this process, as the role that the config names, or it
launches all processes of the run on this machine or on a Ray cluster:

    from monolith import Run

    run = Run(config, "clicks.py:Clicks", launch="local").start()  # real processes: ps 0, worker 0, ...
    run.status()["worker 1"].step                                  # what each process last reported
    result = run.wait()                                            # result.report: what the chief printed

The states of a run, and the calls that move it:

    created ──start(), or run()──► running ──finished, or stop()──► ended: wait() returns a RunResult
                                      └────────an error───────────► failed: wait() raises it

Nothing here prints or installs a signal handler: a run reports through an `Output`, which the command line
connects to standard error and to signals, and which by default logs. Nothing here needs torch until this
process trains, so that a launcher starts at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from monolith import concurrency
from monolith.cluster.status import ProcessStatus, StatusBoard
from monolith.errors import ConfigError, DeadlineExceededError
from monolith.runtime.config import RunConfig, settle
from monolith.runtime.config_loading import check_run
from monolith.runtime.context import Launch, Output, RunContext, RunResult

if TYPE_CHECKING:
    from monolith.train import Task


class Run:
    r"""A run of one task. `start` and `run` are called once; `stop`, `status` and `wait` from any thread.

    Args:
        config: The whole run. With `launch`, `cluster.role` and `cluster.index` are decided for each process.
        task: A Task, a subclass, its name (`package.module:Name` or `path/to/file.py:Name`), or a function
            of the config that returns a Task; None takes the task that the config names or describes.
            Launched processes import the task, so with `launch` it must not be defined in `__main__`, that
            is in a cell of a notebook: put it into a file and name that.
        launch: None trains in this process, as the role that the config names. "local" starts all processes
            of the run as children of this one, "ray" on a Ray cluster; a `Launch` says more.
        control: Whether an operator may control the run: pause, resume, save, stop.
        profile: Whether a few steps are recorded with torch's profiler.
        environ: Environment variables; by default those of this process.

    Raises:
        ConfigError: The config cannot be trained; lists every problem found.

    Examples:
        >>> from pathlib import Path
        >>> from monolith import Run, load_run_config
        >>> _ = Path("clicks.csv").write_text("user,item,click\n" + "ann,7,1\nbob,8,0\n" * 100)
        >>> config = load_run_config(
        ...     code={
        ...         "data.path": "clicks.csv",
        ...         "features": {"user": {"kind": "string"}, "item": {"kind": "int"}},
        ...         "labels": {"click": {}},
        ...         "model": {"type": "deepfm", "dim": 4, "hidden": [8]},
        ...         "task": {"batch_size": 50},
        ...         "train.model_dir": "run",
        ...     }
        ... )
        >>> run = Run(config).start()  # returns at once
        >>> run.wait().report["step"]
        4
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task | type[Task] | str | Callable[[RunConfig], Task] | None = None,
        *,
        launch: Launch | Literal["local", "ray"] | None = None,
        control: bool = False,
        profile: bool = False,
        output: Output | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(task, str | type):
            name = task if isinstance(task, str) else f"{task.__module__}:{task.__qualname__}"
            config = replace(config, job=replace(config.job, task=name))
            task = None  # made from its name and `config.task`, in each process
        self._context = RunContext(
            settle(config),
            task,
            launch=launch if isinstance(launch, Launch) else Launch(kind=launch),
            output=Output() if output is None else output,
            environ=os.environ if environ is None else environ,
            control=control,
            profile=profile,
        )
        self._begun = concurrency.Lock()  # taken by the first call of `start` or `run`, and never released
        self._thread: concurrency.Thread | None = None
        self._result: RunResult | BaseException | None = None

    @property
    def config(self) -> RunConfig:
        """The whole run, with nothing left open."""
        return self._context.config

    def start(self) -> Run:
        """Run on a thread of its own, and return at once. `wait` returns the result, or raises the error."""
        self._begin()
        self._thread = concurrency.Thread(target=self._execute_and_keep, name="run", daemon=True)
        self._thread.start()
        return self

    def run(self) -> RunResult:
        """Run on this thread until the run ended, and return its result.

        Raises:
            MonolithError: What went wrong; a RetryableError if another process was lost and the same run
                started again would resume.
        """
        self._begin()
        return self._execute()

    def wait(self, timeout: float | None = None) -> RunResult:
        """Wait until a started run ended, and return its result.

        Raises:
            DeadlineExceededError: It still runs after `timeout` seconds.
            MonolithError: As `run`.
        """
        if self._thread is None:
            raise ConfigError("wait: the run was not started; call start() first")
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineExceededError(f"wait: the run still runs after {timeout:g} s")
        assert self._result is not None
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def stop(self, reason: str = "stopped by its caller") -> None:
        """Have the run save, and end after its current step. The next run of its model_dir resumes it.

        Launched processes are asked to stop; a second call ends them at once.
        """
        self._context.stop(reason)

    def status(self) -> dict[str, ProcessStatus]:
        """Return what each process of the run last reported, by its name, such as "worker 0".

        Processes report to status files in the model_dir; without a model_dir there are none.
        """
        if not self.config.train.model_dir:
            return {}
        found = StatusBoard(self.config.train.model_dir).read()
        return {f"{one.role} {one.index}": one for one in found.processes}

    def _begin(self) -> None:
        if not self._begun.acquire(blocking=False):
            raise ConfigError("a Run runs once; make another one with the same config to resume it")

    def _execute(self) -> RunResult:
        if self._context.launch.kind is not None:
            from monolith.runtime.launch import run_launched

            return run_launched(self._context)
        check_run(self.config)
        from monolith.runtime.process import run_process  # which needs torch

        return run_process(self._context)

    def _execute_and_keep(self) -> None:
        try:
            self._result = self._execute()
        except BaseException as error:
            self._result = error
