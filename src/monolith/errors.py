"""Every error Monolith raises on purpose.

One tree, so that a caller can catch a single error, a group or all of them:

    MonolithError
    ├── ConfigError             a chosen value, key or combination is not allowed    (also ValueError)
    │   ├── UnknownParamError   no parameter of that name, or the name is taken      (also AttributeError)
    │   ├── InvalidParamError   a parameter's name, path or class is invalid          (also AssertionError)
    │   ├── FrozenParamsError   the parameters were frozen                           (also TypeError)
    │   ├── UnknownTaskError    no task of that name can be found or imported        (also LookupError)
    │   ├── NotShareableError   several workers would each read all of the data
    │   └── NotRepeatableError  data cannot be read several times
    ├── MissingExtraError       an optional package is needed; names the extra       (also ImportError)
    ├── FilesystemError         a path could not be read, written, copied or renamed (also OSError)
    │   ├── FileMissingError    there is nothing at that path                        (also FileNotFoundError)
    │   └── TransientFilesystemError  for a reason that may pass: no space, quota or free descriptor
    ├── CorruptFileError        a file is torn, truncated or altered; says where     (also ValueError)
    ├── CorruptMessageError     bytes of a channel are no message, or a damaged one  (also ValueError)
    ├── TableError              a table refused a call
    │   ├── TableArgumentError  wrong dtype, shape, layout or range                  (also ValueError)
    │   ├── TableClosedError    the table was closed
    │   ├── UnknownTableError   no table of that name                                (also KeyError)
    │   └── ServingTableError   a serving table cannot be trained or dumped with its state
    ├── TensorArgumentError     a tensor, structure or shape does not fit            (also ValueError)
    ├── FeatureError            a feature, slot, slice or layout is invalid          (also ValueError)
    │   ├── UnknownFeatureError no feature, slot or layout of that name              (also KeyError)
    │   ├── EmptySlotError      a slot without slices                                (also RuntimeError)
    │   └── DuplicateNameError  a slot, feature or layout of that name exists        (also NameError)
    ├── DataError               records, columns or a source do not fit              (also ValueError)
    │   └── TooManyBadRecordsError  more records were malformed than the run tolerates
    ├── LayerArgumentError      a layer, loss or optimizer got an argument it cannot use (also ValueError)
    │   ├── LayerTypeError      ... of a type it cannot use                          (also TypeError)
    │   └── GradientError       a gradient of a tensor that may have none            (also RuntimeError)
    │       └── SparseGradientError  a sparse one, for a dense optimizer        (also NotImplementedError)
    ├── RequestError            a message of another process is malformed or too large  (also ValueError)
    │   ├── RequestTooLargeError  it is larger than a limit allows
    │   ├── ForbiddenError      this server does not do that, or not for this caller
    │   └── UnknownModelError   no model or version of that name is served           (also LookupError)
    ├── ClusterError            processes cannot find, reach or agree with each other
    │   ├── AddressError        a text is not host:port                              (also ValueError)
    │   ├── DiscoveryError      a registry refused, was closed, or lost entries      (also OSError)
    │   └── RetryableError      a failure that may be temporary: failover retries
    │       ├── UnavailableError       a peer or a registry is gone                  (also ConnectionError)
    │       │   ├── LostStateError     it restarted, and has lost the state
    │       │   ├── OutOfMemoryError   it has no memory left for its work, and ends
    │       │   ├── ReplacedError      another process was started in place of this one
    │       │   └── UnpublishedError   the delta channel did not take the last changes of a run
    │       ├── OverloadedError        a server has as many requests as its limits allow
    │       ├── DeadlineExceededError  it took longer than allowed                   (also TimeoutError)
    │       │   └── AbsentWorkersError workers of a run did not join it in time
    │       ├── StaleAnswerError       a server's rows are older than its client accepts; has the answer
    │       └── NodeAliveCheckerError  nodes do not answer; names them               (also ConnectionError)
    ├── AcceleratorError        a GPU, its driver or its compiler is missing or refused (also RuntimeError)
    │   └── DeviceFullError     its memory has no room
    ├── MetricError             a metric got values it cannot measure                (also ValueError)
    ├── QueueClosedError        the queue was closed and is empty
    ├── StoppedWhileWaitingError  a request to stop came while this process waited for others
    ├── ListenError             a port is taken or may not be listened on            (also OSError)
    ├── WrongThreadError        only the main thread may make this call              (also RuntimeError)
    ├── TrainingError           a run cannot continue, or cannot do this             (also RuntimeError)
    │   ├── DivergedError       the loss is NaN, infinite or exploding
    │   │   └── NonFiniteError  of one batch: nothing of it was applied
    │   ├── NothingTrainedError  all data was skipped, and no step was taken
    │   ├── BarrierAlreadyPlacedError  another caller has paused the workers
    │   └── ProfilerBusyError   another caller is profiling the process
    ├── ModelDirLockedError     another process writes to this model_dir; names it
    ├── ExportError             a model or checkpoint cannot become a servable           (also ValueError)
    ├── SaveError               state cannot be part of a checkpoint                     (also ValueError)
    └── RestoreError            saved state does not fit what it is restored into    (also ValueError)

The builtin parent is for callers who know only Python. A message names the operation, the found and the
expected value, and the remedy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any


class MonolithError(Exception):
    """The base class of every error that Monolith raises on purpose.

    Examples:
        >>> from monolith import MonolithError, load_run_config
        >>> try:
        ...     load_run_config(code={"cluster.num_pss": 2})
        ... except MonolithError as error:  # every error that the library raises on purpose
        ...     print("not a valid config")
        not a valid config
    """


class ConfigError(MonolithError, ValueError):
    """A configuration value, key or combination is not allowed.

    Examples:
        >>> from monolith import ConfigError, Segment
        >>> try:
        ...     Segment(dim=0)
        ... except ConfigError as error:  # also a ValueError
        ...     print(error)
        segment: dim must be at least 1, got 0
    """


class UnknownParamError(ConfigError, AttributeError):
    """No parameter of that name; or, when defining one, the name is taken."""


class InvalidParamError(ConfigError, AssertionError):
    """A parameter's name, path or class is invalid."""


class FrozenParamsError(ConfigError, TypeError):
    """The parameters were frozen and cannot change."""


class UnknownTaskError(ConfigError, LookupError):
    """No task of that name: no such module, file or name, or it cannot be imported."""


class NotShareableError(ConfigError):
    """A source cannot be divided among workers, so that each would read all of its data."""


class NotRepeatableError(ConfigError):
    """A source cannot be read several times, in another order each time."""


class MissingExtraError(MonolithError, ImportError):
    """An optional package is needed and not installed.

    Examples:
        >>> from monolith import MissingExtraError
        >>> str(MissingExtraError("kazoo", "zookeeper", "ZooKeeper")).partition(". ")[2]
        "Install it with: pip install 'monolith-recsys[zookeeper]'"
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'monolith-recsys[{extra}]'"
        )


@contextmanager
def optional_package(package: str, extra: str, purpose: str, *modules: str) -> Iterator[None]:
    """Say in a `with` block around imports which extra is needed, if the package of it is not installed.

    Only that counts as not installed: a package that is there and cannot be loaded (no memory for its
    libraries, a library of it that is missing) raises its own error.

    Args:
        modules: The names by which it is imported, unless that is its own.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] not in (modules or (package.replace("-", "_"),)):
            raise
        raise MissingExtraError(package, extra, purpose) from cause


class FilesystemError(MonolithError, OSError):
    """A path could not be read, written, copied or renamed; `errno` is the cause's, if it had one."""


class FileMissingError(FilesystemError, FileNotFoundError):
    """There is nothing at that path."""


class TransientFilesystemError(FilesystemError):
    """A path could not be used for a temporary reason; the same call may succeed later.

    A class of its own, so that it keeps its meaning on its way from another process, which sends only
    the name of an error and its message.
    """

    ERRNOS = frozenset(
        {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
    )
    """A full disk, a used-up quota, no free descriptor; a device or network mount that fails for a while.
    A read-only mount, a missing permission and a file that is too large need a person first."""


class CorruptFileError(MonolithError, ValueError):
    """A file is torn, truncated or altered.

    Attributes:
        path: The file that was refused.
        offset: The first byte that could not be read.
    """

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: corrupt at byte {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason


class CorruptMessageError(MonolithError, ValueError):
    """Received bytes are not a message: torn, altered, of another version, or too large."""


class TableError(MonolithError):
    """A table refused a call.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Segment, TableConfig, TableError
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2),)))
        >>> table.close()
        >>> try:
        ...     table.lookup(torch.tensor([7]))
        ... except TableError as error:
        ...     print(error)
        table 'item' was closed
    """


class TableArgumentError(TableError, ValueError):
    """An argument has the wrong dtype, shape, layout or range; nothing was changed."""


class TableClosedError(TableError):
    """The table was closed, here or by another thread."""


class UnknownTableError(TableError, KeyError):
    """No table of that name."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class ServingTableError(TableError):
    """A serving table has compressed values only: no gradients, no optimizer state."""


class TensorArgumentError(MonolithError, ValueError):
    """A tensor, a structure of tensors or a shape does not fit."""


class FeatureError(MonolithError, ValueError):
    """A feature, slot, slice or layout is invalid, or does not fit the batch."""


class UnknownFeatureError(FeatureError, KeyError):
    """No feature, slot or layout of that name."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class EmptySlotError(FeatureError, RuntimeError):
    """A slot has no slices, so its rows would have no columns."""


class DuplicateNameError(FeatureError, NameError):
    """A slot, feature or layout of that name exists already."""


class DataError(MonolithError, ValueError):
    """Records, columns or a source do not fit the request for them.

    Examples:
        >>> from monolith import DataError, IterableSource
        >>> source = IterableSource([{"user": 17}, {"user": "ann"}], batch_size=2, types={"user": int})
        >>> try:
        ...     list(source)
        ... except DataError as error:  # also a ValueError
        ...     print(error)
        iterable source: record 1: key 'user': 'ann' is not a whole number
    """


class TooManyBadRecordsError(DataError):
    """More records were malformed than the run tolerates."""


class LayerArgumentError(MonolithError, ValueError):
    """A layer, loss or optimizer got an argument that it cannot use."""


class LayerTypeError(LayerArgumentError, TypeError):
    """A layer, loss or optimizer got an argument of a type that it cannot use."""


class GradientError(LayerArgumentError, RuntimeError):
    """A tensor that may have no gradient got one."""


class SparseGradientError(GradientError, NotImplementedError):
    """A dense optimizer was given a sparse gradient; rows of tables have their own optimizers."""


class RequestError(MonolithError, ValueError):
    """A message from another process is malformed, or asks for more than a limit allows. Nothing was done.

    Examples:
        >>> from monolith import RequestError
        >>> from monolith.errors import RequestTooLargeError, UnknownModelError
        >>> [issubclass(error, RequestError) for error in (RequestTooLargeError, UnknownModelError)]
        [True, True]
    """


class RequestTooLargeError(RequestError):
    """A message, or its answer, is larger than a limit of this server allows."""


class ForbiddenError(RequestError):
    """The server is not set up to do that, or the caller has the token of another role."""


class UnknownModelError(RequestError, LookupError):
    """No model, or no version of it, of that name is served here."""


class ClusterError(MonolithError):
    """Processes cannot find, reach or agree with each other."""


class AddressError(ClusterError, ValueError):
    """A text is not host:port."""


class DiscoveryError(ClusterError, OSError):
    """A registry refused, was closed, or lost its entries; a retry will not help."""


class RetryableError(ClusterError):
    """A failure that may be temporary: the job may retry. All other errors are final.

    Examples:
        >>> from monolith import RetryableError
        >>> from monolith.errors import DeadlineExceededError, UnavailableError
        >>> [issubclass(error, RetryableError) for error in (DeadlineExceededError, UnavailableError)]
        [True, True]
    """


class UnavailableError(RetryableError, ConnectionError):
    """A peer or a registry is gone, or cannot be reached now."""


class ReplacedError(UnavailableError):
    """Another process was started in place of this one, which ends: two of them would undo each other's work.

    A launcher that still wants this process starts it again, and the other one ends.
    """


class ShutOutError(UnavailableError, DataError):
    """A data service took a trainer for lost, or another process attached in its place. A worker of a run
    joins the run again, which tells whether it is still part of it, and resumes from a checkpoint."""


class FailedPeerError(UnavailableError):
    """Another process reported why it cannot continue."""

    replaced: int | None = None
    """The rank that another process has joined as, while this one did: it was restarted, or replaced."""


class LostStateError(UnavailableError):
    """A server restarted or started another run, and has lost the state that the caller works on."""


class OutOfMemoryError(UnavailableError):
    """A process has no memory left for its work. It ends, for its launcher to start it again."""


class UnpublishedError(UnavailableError):
    """The delta channel did not take the last changes of a run, which are saved; its next start publishes
    them."""


class OverloadedError(RetryableError):
    """A server has as many requests as its limits allow; retry later, or on another server."""


class DeadlineExceededError(RetryableError, TimeoutError):
    """An operation took longer than allowed."""


class AbsentWorkersError(DeadlineExceededError):
    """Workers did not join a run in time, so its chief has to be started again, and they with it."""


class StaleAnswerError(RetryableError):
    """A server answered with rows that are older than its client accepts.

    Attributes:
        answer: The answer, a `monolith.serve.ClientAnswer`, for clients that prefer it to none.
        staleness: The age of its rows, a `timedelta`; None if the server does not know it.

    Examples:
        >>> from datetime import timedelta
        >>> from monolith import StaleAnswerError
        >>> error = StaleAnswerError("ads", timedelta(seconds=90), timedelta(seconds=5))
        >>> str(error).partition(". ")[0]
        "the rows of model 'ads' are 90 s old, the client accepts 5 s"
    """

    def __init__(self, model: str, staleness: timedelta | None, most: timedelta, answer: Any = None) -> None:
        age = "of unknown age" if staleness is None else f"{staleness.total_seconds():g} s old"
        super().__init__(
            f"the rows of model {model!r} are {age}, the client accepts {most.total_seconds():g} s. Use "
            "`error.answer`, or see the server's log: does it still follow its trainer?"
        )
        self.staleness = staleness
        self.answer = answer


class NodeAliveCheckerError(RetryableError, ConnectionError):
    """Nodes do not answer.

    Attributes:
        dead: Address -> why it counts as dead.
    """

    def __init__(self, dead: dict[str, str]) -> None:
        named = "; ".join(f"{address} ({reason})" for address, reason in sorted(dead.items()))
        super().__init__(
            f"{len(dead)} node(s) do not answer: {named}. They may have died or be restarting; "
            "see their logs."
        )
        self.dead = dead


class AcceleratorError(MonolithError, RuntimeError):
    """A GPU, its driver or its compiler is missing, or refused an operation."""


class DeviceFullError(AcceleratorError):
    """The memory of a GPU has no room for what was to be there."""


class MetricError(MonolithError, ValueError):
    """A metric was given predictions, labels or weights that it cannot measure."""


class QueueClosedError(MonolithError):
    """The queue was closed, and all its items were taken."""


class StoppedWhileWaitingError(MonolithError):
    """A request to stop came while this process waited for others. Not a failure: nothing was lost by it."""


class ListenError(MonolithError, OSError):
    """A port is taken, or this process may not listen on it."""


class WrongThreadError(MonolithError, RuntimeError):
    """Only the main thread may make this call."""


class TrainingError(MonolithError, RuntimeError):
    """A run cannot continue, or cannot do the requested operation.

    Examples:
        >>> from monolith import TrainingError
        >>> from monolith.errors import DivergedError, NothingTrainedError
        >>> [issubclass(error, TrainingError) for error in (DivergedError, NothingTrainedError)]
        [True, True]
    """


class DivergedError(TrainingError):
    """The loss is NaN, infinite or exploding: from now on the run learns nothing useful."""


class NonFiniteError(DivergedError):
    """The loss or a gradient of a batch is NaN or infinite; nothing of it was applied."""


class NothingTrainedError(TrainingError):
    """A run reached the end of its data without a step, because all of it was skipped."""


class BarrierAlreadyPlacedError(TrainingError):
    """A barrier is placed already: another caller has paused the workers."""


class ProfilerBusyError(TrainingError):
    """The process is being profiled already, by another caller."""


class ModelDirLockedError(MonolithError):
    """Another process writes to this model_dir.

    Attributes:
        pid: The process that has the lock, or None if it is unknown.
        host: The machine it runs on, or None.
    """

    def __init__(self, message: str, pid: int | None = None, host: str | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host


class ExportError(MonolithError, ValueError):
    """A model or a checkpoint cannot be exported; existing versions are unchanged.

    Examples:
        >>> import torch
        >>> from monolith import ExportError
        >>> from monolith.serve.exporter import Exporter, ExportHow, ExportModel
        >>> model = ExportModel(name="clicks", module=torch.nn.Linear(2, 1), outputs=lambda module, batch: {})
        >>> try:
        ...     Exporter(model, ExportHow(), restore=lambda prefix: None)
        ... except ExportError as error:
        ...     print(error)
        the model has no EmbeddingCollection, so there is nothing to look up
    """


class SaveError(MonolithError, ValueError):
    """State cannot be part of a checkpoint; nothing was written.

    Examples:
        >>> import torch
        >>> from monolith import Checkpointer, DensePart, SaveError, Saver
        >>> model = torch.nn.Linear(2, 1)
        >>> model.register_buffer("table", torch.zeros(2).to_sparse())
        >>> try:
        ...     Checkpointer(Saver("run"), [DensePart(model)]).save(100)
        ... except SaveError as error:
        ...     print(error)
        cannot save 'table': it is sparse_coo, and only dense tensors can be saved
    """


class RestoreError(MonolithError, ValueError):
    """Saved state does not fit the model that it is restored into.

    Examples:
        >>> import torch
        >>> from monolith import Checkpointer, DensePart, RestoreError, Saver
        >>> Checkpointer(Saver("run"), [DensePart(torch.nn.Linear(2, 1))]).save(100)
        'run/model.ckpt-100'
        >>> try:
        ...     Checkpointer(Saver("run"), [DensePart(torch.nn.Linear(3, 1))]).restore("run/model.ckpt-100")
        ... except RestoreError as error:
        ...     print(str(error).splitlines()[1].strip())
        weight: it has shape (1, 2) in the checkpoint, this model needs (1, 3)
    """


OUT_OF_MEMORY = os.EX_OSERR
"""The exit status of a process that had no memory left: a launcher starts it again."""

_NO_MEMORY = ("cannot allocate memory", "can't allocate memory", "can't start new thread")
"""Texts of errors of another kind: of the loader of libraries, of torch, and of Python for a thread."""


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, says that this process has no memory left.

    An `OutOfMemoryError` that another process has answered says nothing about this one.
    """
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        foreign = isinstance(error, RuntimeError | ImportError) and not isinstance(error, MonolithError)
        if foreign and any(text in str(error).lower() for text in _NO_MEMORY):
            return True
        error = error.__cause__
    return False
