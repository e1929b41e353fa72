"""State files: the small text files next to the checkpoints that list them.

    checkpoint              which checkpoints there are, and which is the latest
    monolith_checkpoint     which of them must never be deleted; operators edit this one
    checkpoint.journal      what the saver still has to delete, and what it must not delete yet
    ckpt.info-<step>        how many rows a checkpoint has
    best_checkpoint         which one an evaluation found best; never deleted while it is named here

The first two are text protos that upstream's tools read and write. Every file is replaced
in one step, so a reader finds the old one or the new one.

A path inside the folder is stored without it, so that the folder can be moved or copied.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from google.protobuf import text_format  # type: ignore[import-untyped]

from monolith import concurrency, filesystem
from monolith.errors import ConfigError, CorruptFileError, FileMissingError, FilesystemError
from monolith.wire.checkpoint_state_pb2 import CheckpointState as CheckpointStateProto
from monolith.wire.ckpt_info_pb2 import CkptInfo as CkptInfoProto
from monolith.wire.monolith_checkpoint_pb2 import MonolithCheckpointState as MonolithCheckpointStateProto

CHECKPOINT_FILE = "checkpoint"
MONOLITH_CHECKPOINT_FILE = "monolith_checkpoint"
LAST_SLOT = 102399
"""Rows of this slot and of those above are counted together."""

_REREADS = 5
_PAUSE_SECONDS = 0.2
_JOURNAL_VERSION = 1
_STEP = re.compile(r"-([0-9]+)$")
_NUMBER = re.compile(r"\.([0-9]+)-[0-9]+$")

_log = logging.getLogger(__name__)

Sleep = Callable[[float], None]


# Which checkpoints there are


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The checkpoints of a folder; every path is whole."""

    model_checkpoint_path: str
    """The latest: a run resumes from it."""
    all_model_checkpoint_paths: tuple[str, ...]
    """Oldest first, the latest among them."""
    all_model_checkpoint_timestamps: tuple[float, ...] = ()
    """When each was saved, in Unix seconds; empty if unknown."""
    last_preserved_timestamp: float | None = None
    """Unix seconds; one period before the next checkpoint that is preserved."""

    def __post_init__(self) -> None:
        latest, paths = self.model_checkpoint_path, self.all_model_checkpoint_paths
        if not latest or latest not in paths:
            raise ConfigError(f"the latest checkpoint {latest!r} must be one of those listed: {list(paths)}")
        if len(self.all_model_checkpoint_timestamps) not in (0, len(paths)):
            raise ConfigError(
                f"a state needs one timestamp per checkpoint or none, got "
                f"{len(self.all_model_checkpoint_timestamps)} for {len(paths)}"
            )


def read_checkpoint_state(
    folder: str, latest_filename: str = CHECKPOINT_FILE, *, sleep: Sleep = concurrency.sleep
) -> CheckpointState | None:
    """Return the checkpoints of a folder, or None if it has no state file.

    A file that makes no sense is read up to 5 times more: where a store cannot replace a
    file in one step, the next look may find it whole.

    Raises:
        CorruptFileError: It never made sense.
        FilesystemError: It is there and cannot be read.
    """
    check_latest_filename(latest_filename)
    path = filesystem.join(folder, latest_filename)
    for rereads_left in reversed(range(_REREADS + 1)):
        try:
            return _state_of(_parse(path, filesystem.read_bytes(path), CheckpointStateProto()), folder, path)
        except FileMissingError:
            return None
        except CorruptFileError as cause:
            if not rereads_left:
                raise CorruptFileError(
                    path,
                    cause.offset,
                    f"read ckpt error! {cause.reason}. Write it again, with the checkpoints that exist",
                ) from cause
            sleep(_PAUSE_SECONDS)
    raise AssertionError("unreachable: the last reading returns or raises")


def write_checkpoint_state(
    folder: str,
    state: CheckpointState,
    latest_filename: str = CHECKPOINT_FILE,
    *,
    relative_paths: bool = True,
) -> None:
    """Replace the state file of a folder atomically.

    Args:
        relative_paths: Whether the paths of checkpoints inside the folder are stored without
            it. Otherwise only those that were relative already are.
    """
    check_latest_filename(latest_filename)

    def stored(path: str) -> str:
        return path if filesystem.is_absolute(path) and not relative_paths else _stored(path, folder)

    message = CheckpointStateProto(
        model_checkpoint_path=stored(state.model_checkpoint_path),
        all_model_checkpoint_paths=map(stored, state.all_model_checkpoint_paths),
        all_model_checkpoint_timestamps=state.all_model_checkpoint_timestamps,
        last_preserved_timestamp=state.last_preserved_timestamp,
    )
    _write(filesystem.join(folder, latest_filename), _text(message))


def check_latest_filename(latest_filename: str, save_path: str | None = None) -> None:
    """Refuse a name that is not a plain name, or that checkpoints saved at `save_path` would take.

    Raises:
        ConfigError: It is one of these.
    """
    if not latest_filename or filesystem.base_name(latest_filename) != latest_filename:
        raise ConfigError(
            f"'latest_filename' must not contain path components, got {latest_filename!r}: "
            "the file is next to the checkpoints"
        )
    if save_path is not None and filesystem.base_name(save_path) == latest_filename:
        raise ConfigError(
            f"'latest_filename' collides with 'save_path': {latest_filename!r} and {save_path!r}"
        )


class LatestState:
    """Remembers the state of each folder until the step moves on. Thread-safe.

    Args:
        read: Returns the state of a folder.
    """

    def __init__(self, read: Callable[[str], CheckpointState | None] = read_checkpoint_state) -> None:
        self._read = read
        self._lock = concurrency.Lock()  # guards _seen
        self._seen: dict[str, tuple[int, CheckpointState]] = {}

    def get(self, folder: str, step: int) -> CheckpointState | None:
        """Return the state of a folder, read again if there was none or if `step` is a later one."""
        with self._lock:
            seen = self._seen.get(folder)
            if seen is not None and step <= seen[0]:
                return seen[1]
            state = self._read(folder)
            if state is None:
                self._seen.pop(folder, None)
            else:
                self._seen[folder] = (step, state)
            return state


def _state_of(message: Any, folder: str, path: str) -> CheckpointState:
    if not message.model_checkpoint_path:
        raise CorruptFileError(path, 0, "it names no latest checkpoint")
    latest = filesystem.join(folder, message.model_checkpoint_path)
    paths = [filesystem.join(folder, each) for each in message.all_model_checkpoint_paths]
    if latest not in paths:
        paths.append(latest)
    times = tuple(message.all_model_checkpoint_timestamps)
    if len(times) not in (0, len(paths)):
        _log.warning(
            "%s has %d timestamps for %d checkpoints; they are ignored", path, len(times), len(paths)
        )
        times = ()
    kept = message.last_preserved_timestamp if message.HasField("last_preserved_timestamp") else None
    return CheckpointState(latest, tuple(paths), times, kept)


# What must never be deleted


class TableKind(enum.IntEnum):
    """How the rows of a checkpoint are stored: a table per feature group, or merged tables."""

    UNKNOWN = 0
    CUCKOO_HASH_MAP = 1
    MULTI_CUCKOO_HASH_MAP = 2


@dataclass(frozen=True, slots=True)
class MonolithCheckpointState:
    """What a run knows about its checkpoints beyond which there are; None is unset."""

    exempt_model_checkpoint_paths: tuple[str, ...] = ()
    """Never deleted. As written: an absolute path, or one below the folder of this file."""
    last_checkpoint_save_timestamp: int | None = None
    """Unix seconds of the last save that succeeded."""
    builtin_hash_table_type: TableKind | None = None


def read_monolith_checkpoint(
    folder: str,
    filename: str = MONOLITH_CHECKPOINT_FILE,
    *,
    exists: Callable[[str], bool] | None = None,
) -> MonolithCheckpointState | None:
    """Read the file; return None with a warning if it is missing or makes no sense.

    For readers only. Code that deletes or writes depending on it uses `load_monolith_checkpoint`, which tells
    the two cases apart.

    Args:
        exists: Whether there is a checkpoint at a whole path. If given, exempt entries are made
            whole, and those without one are left out of what is returned; the file keeps them.
    """
    try:
        state = load_monolith_checkpoint(folder, filename)
    except (CorruptFileError, FilesystemError) as cause:
        _log.warning("ignoring %s: %s", filesystem.join(folder, filename), cause)
        return None
    if state is None or exists is None:
        return state
    kept = []
    for path in (filesystem.join(folder, entry) for entry in state.exempt_model_checkpoint_paths):
        try:
            there = exists(path)
        except FilesystemError as cause:
            _log.warning("cannot tell whether exempt checkpoint %s is there: %s", path, cause)
            there = True
        if there:
            kept.append(path)
        else:
            _log.warning("exempt checkpoint %s does not exist", path)
    return replace(state, exempt_model_checkpoint_paths=tuple(kept))


def load_monolith_checkpoint(
    folder: str, filename: str = MONOLITH_CHECKPOINT_FILE
) -> MonolithCheckpointState | None:
    """Read the file; return None if there is none.

    Raises:
        CorruptFileError: It does not parse.
        FilesystemError: It is there and cannot be read.
    """
    path = filesystem.join(folder, filename)
    try:
        message = _parse(path, filesystem.read_bytes(path), MonolithCheckpointStateProto())
    except FileMissingError:
        return None
    saved = message.HasField("last_checkpoint_save_timestamp")
    kind = message.HasField("builtin_hash_table_type")
    return MonolithCheckpointState(
        tuple(message.exempt_model_checkpoint_paths),
        message.last_checkpoint_save_timestamp if saved else None,
        TableKind(message.builtin_hash_table_type) if kind else None,
    )


def update_monolith_checkpoint(
    folder: str,
    *,
    table_kind: TableKind | None = None,
    saved_at: float | None = None,
    seed: MonolithCheckpointState | None = None,
    filename: str = MONOLITH_CHECKPOINT_FILE,
) -> MonolithCheckpointState:
    """Update the file, or create it; return its new content.

    It is read just before it is replaced, and entries of operators stay: no exempt entry is ever removed
    here.

    Args:
        table_kind: Written if the file has none, or UNKNOWN.
        saved_at: When a save succeeded; None leaves the timestamp as it is, unset in a new file.
        seed: Its entries are added to those of the file; its other fields are used if they are unset there.

    Raises:
        CorruptFileError: The file does not parse. It is left as it is, with a copy next to it.
    """
    path = filesystem.join(folder, filename)
    # Read inside the write: an operator may edit the file at any time, and the window in which an edit would
    # be lost is only as long as this block.
    with filesystem.atomic_write(path) as file:
        try:
            found = load_monolith_checkpoint(folder, filename) or MonolithCheckpointState()
        except CorruptFileError:
            _back_up(path)
            raise
        seed = seed or MonolithCheckpointState()
        exempt = dict.fromkeys(found.exempt_model_checkpoint_paths + seed.exempt_model_checkpoint_paths)
        saved = found.last_checkpoint_save_timestamp if saved_at is None else int(saved_at)
        known = found.builtin_hash_table_type or seed.builtin_hash_table_type or table_kind
        kind = known or found.builtin_hash_table_type  # UNKNOWN, which is 0, is better than none
        state = MonolithCheckpointState(
            tuple(exempt), seed.last_checkpoint_save_timestamp if saved is None else saved, kind
        )
        message = MonolithCheckpointStateProto(
            exempt_model_checkpoint_paths=state.exempt_model_checkpoint_paths,
            last_checkpoint_save_timestamp=state.last_checkpoint_save_timestamp,
            builtin_hash_table_type=None if kind is None else kind.name,
        )
        file.write(_text(message))
    return state


def _back_up(path: str) -> None:
    """Copy a file that makes no sense to `<path>.bad-<checksum>`, once."""
    data = filesystem.read_bytes(path)
    copy = f"{path}.bad-{zlib.crc32(data):08x}"
    if not filesystem.exists(copy):
        _write(copy, data)


def choose_table_kind(wanted: TableKind | None, found: MonolithCheckpointState | None) -> TableKind:
    """Return the kind of tables of a run: the wanted one; else that of the checkpoint; else merged tables.

    A checkpoint without a kind is from before there was a choice: it has single tables.
    """
    if wanted:
        return wanted
    if found is not None and found.builtin_hash_table_type is not TableKind.MULTI_CUCKOO_HASH_MAP:
        return TableKind.CUCKOO_HASH_MAP
    return TableKind.MULTI_CUCKOO_HASH_MAP


# The journal of the saver


@dataclass(frozen=True, slots=True)
class Journal:
    """What a saver must know after a restart and the state file has no field for. Paths are complete."""

    released: tuple[str, ...] = ()
    """To be deleted as soon as nothing needs them, unless the state file lists them."""
    preserved: tuple[str, ...] = ()
    """Preserved, though the state file does not list them; only those that need another one."""
    depends_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Which other checkpoints an incremental one needs."""


def journal_path(folder: str, latest_filename: str = CHECKPOINT_FILE) -> str:
    """Return the path of the journal of the saver with this state file."""
    return filesystem.join(folder, f"{latest_filename}.journal")


def read_journal(folder: str, latest_filename: str = CHECKPOINT_FILE) -> Journal:
    """Return the journal, an empty one if there is none.

    Raises:
        CorruptFileError: It is damaged. It names what to delete, so none of it is trusted.
    """
    path = journal_path(folder, latest_filename)
    try:
        data = filesystem.read_bytes(path)
    except FileMissingError:
        return Journal()
    advice = "Move it away to continue: the files it would have deleted then stay"
    body, _, checksum = data.removesuffix(b"\n").rpartition(b"\n")
    if checksum != b"%08x" % zlib.crc32(body):
        reason = f"the checksum in its last line does not match its content. {advice}"
        raise CorruptFileError(path, len(body), reason)

    def whole(paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(filesystem.join(folder, each) for each in paths)

    try:
        found = json.loads(body)
        if found["version"] != _JOURNAL_VERSION:
            raise ValueError(f"version {found['version']}, this program reads {_JOURNAL_VERSION}")
        needs = {filesystem.join(folder, path): whole(each) for path, each in found["depends_on"].items()}
        return Journal(whole(found["released"]), whole(found["preserved"]), needs)
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise CorruptFileError(path, 0, f"the journal is malformed: {cause}. {advice}") from cause


def write_journal(folder: str, journal: Journal, latest_filename: str = CHECKPOINT_FILE) -> None:
    """Replace the journal in one step; an empty one is no file."""
    path = journal_path(folder, latest_filename)
    if journal == Journal():
        filesystem.remove(path)
        return

    def stored(paths: Iterable[str]) -> list[str]:
        return [_stored(each, folder) for each in paths]

    content = {
        "version": _JOURNAL_VERSION,
        "released": stored(journal.released),
        "preserved": stored(journal.preserved),
        "depends_on": {_stored(path, folder): stored(each) for path, each in journal.depends_on.items()},
    }
    body = json.dumps(content, indent=1).encode()
    _write(path, b"%s\n%08x\n" % (body, zlib.crc32(body)))


# Names


def absolute_path(path: str) -> str:
    """Return the path as it is from every folder; links stay links."""
    return path if filesystem.is_absolute(path) else os.path.abspath(path)  # noqa: PTH100


def dense_path(prefix: str) -> str:
    """Return the file of a checkpoint's variables."""
    return f"{prefix}.dense-00000-of-00001.safetensors"


def optimizer_path(prefix: str) -> str:
    """Return the file of a checkpoint's training state."""
    return f"{prefix}.optimizer-00000-of-00001.safetensors"


class SaveNames:
    """The names of the checkpoints saved at one path, such as `runs/x/model.ckpt`.

    Args:
        pad_step_number: Whether steps are written with 8 digits at least, to sort as text.
    """

    def __init__(
        self, path: str, *, latest_filename: str = CHECKPOINT_FILE, pad_step_number: bool = False
    ) -> None:
        self._path = path
        self._latest_filename = latest_filename
        self._pad = pad_step_number

    def prefix(self, step: int, number: int = 1) -> str:
        """Return the prefix of the names of all files of a checkpoint.

        Args:
            number: From 1, of the checkpoints of the same step: a second one must not replace the first.
        """
        path = self._path if number == 1 else f"{self._path}.{number}"
        return f"{path}-{step:08}" if self._pad else f"{path}-{step}"

    def is_of(self, prefix: str, step: int) -> bool:
        """Whether a checkpoint next to the path is one of those of a step."""
        name = rf"{re.escape(filesystem.base_name(self._path))}(\.[0-9]+)?-0*{step}"
        found = re.fullmatch(name, filesystem.base_name(prefix))
        return found is not None and filesystem.parent(prefix) == filesystem.parent(self._path)

    @staticmethod
    def assets(prefix: str) -> str:
        """Return the folder of a checkpoint's tables and filters, with a slash at its end."""
        return f"{prefix}.assets/"

    @staticmethod
    def step_of(prefix: str) -> int:
        """Return the step in the name of a checkpoint; 0 if it does not end in `-<digits>`."""
        found = _STEP.search(filesystem.base_name(prefix))
        return int(found.group(1)) if found else 0

    @staticmethod
    def number_of(prefix: str) -> int:
        """Return the number in the name of a checkpoint: 2 of `model.ckpt.2-300`, 1 of `model.ckpt-300`."""
        found = _NUMBER.search(filesystem.base_name(prefix))
        return int(found.group(1)) if found else 1

    def existing_steps(self) -> set[int]:
        """Return the steps that the state file next to the path lists; none if there is no such file."""
        state = read_checkpoint_state(filesystem.parent(self._path), self._latest_filename)
        return set() if state is None else set(map(self.step_of, state.all_model_checkpoint_paths))


# How many rows


@dataclass(frozen=True, slots=True)
class CkptInfo:
    """How many rows a checkpoint has."""

    slot_counts: Mapping[int, int] = field(default_factory=dict)
    feature_counts: Mapping[str, int] = field(default_factory=dict)
    """By table."""

    @classmethod
    def counting(
        cls, slots: Iterable[tuple[int, int]] = (), tables: Iterable[tuple[str, int]] = ()
    ) -> CkptInfo:
        """Add up counts that come in parts, one from each server."""
        slot_counts: Counter[int] = Counter()
        feature_counts: Counter[str] = Counter()
        for slot, rows in slots:
            slot_counts[min(slot, LAST_SLOT)] += rows
        for table, rows in tables:
            feature_counts[table] += rows
        return cls(dict(slot_counts), dict(feature_counts))


def ckpt_info_path(folder: str, step: int, number: int = 1) -> str:
    """Return the path of the counts of a step; see `SaveNames.prefix` for its number."""
    return filesystem.join(folder, f"ckpt.info-{step}" if number == 1 else f"ckpt.info.{number}-{step}")


def write_ckpt_info(folder: str, step: int, info: CkptInfo, number: int = 1) -> str:
    """Write the counts of a step, and return where."""
    path = ckpt_info_path(folder, step, number)
    _write(path, _text(CkptInfoProto(slot_counts=info.slot_counts, feature_counts=info.feature_counts)))
    return path


def read_ckpt_info(folder: str, step: int, number: int = 1) -> CkptInfo:
    """Return the counts of a step; see `SaveNames.prefix` for its number.

    Raises:
        FileMissingError: There are none.
        CorruptFileError: They do not parse.
    """
    path = ckpt_info_path(folder, step, number)
    message = _parse(path, filesystem.read_bytes(path), CkptInfoProto())
    return CkptInfo(dict(message.slot_counts), dict(message.feature_counts))


# Text


def _parse(path: str, data: bytes, message: Any) -> Any:
    try:
        return text_format.Parse(data.decode(), message)
    except text_format.ParseError as cause:
        lines = data.splitlines(keepends=True)[: max(0, (cause.GetLine() or 1) - 1)]
        offset = sum(map(len, lines)) + max(0, (cause.GetColumn() or 1) - 1)
        raise CorruptFileError(path, offset, f"it does not parse: {cause}") from cause
    except UnicodeDecodeError as cause:
        raise CorruptFileError(path, cause.start, "it is not UTF-8 text") from cause


def _text(message: Any) -> bytes:
    return str(text_format.MessageToString(message)).encode()


def _write(path: str, data: bytes) -> None:
    with filesystem.atomic_write(path) as file:
        file.write(data)


def _stored(path: str, folder: str) -> str:
    """What is written for a path: what comes after the folder, or all of it if it is elsewhere."""
    start = folder if folder.endswith("/") else f"{folder}/"
    return path.removeprefix(start) if path.startswith(start) else absolute_path(path)


# The best checkpoint

BEST_FILE = "best_checkpoint"
BEST = "best"
"""The name that stands for it in a setting."""
LATEST = "latest"
"""The name that stands for the newest one, which may be worse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BestCheckpoint:
    """The best checkpoint of a folder, and the metric that decided it.

    An evaluation next to a run writes it to the file `best_checkpoint`, replaced atomically. A saver never
    deletes the checkpoint that is named there; the one that was best before is then one of many again.
    """

    name: str
    """The name of the checkpoint, such as model.ckpt-300."""
    step: int
    metric: str
    """Such as click/auc."""
    value: float

    def prefix(self, model_dir: str) -> str:
        return filesystem.join(model_dir, self.name)


def read_best(model_dir: str) -> BestCheckpoint | None:
    """Return which checkpoint of a folder is the best; None if no evaluation has named one.

    Raises:
        CorruptFileError: The file that names it makes no sense.
    """
    path = filesystem.join(model_dir, BEST_FILE)
    try:
        data = filesystem.read_bytes(path)
    except FileMissingError:
        return None
    try:
        found = json.loads(data)
        best = BestCheckpoint(
            name=str(found["name"]),
            step=int(found["step"]),
            metric=str(found["metric"]),
            value=float(found["value"]),
        )
    except (ValueError, KeyError, TypeError) as cause:
        reason = f"it does not name the best checkpoint: {cause}. Remove it, and the next best one is named"
        raise CorruptFileError(path, 0, reason) from cause
    if not best.name or filesystem.base_name(best.name) != best.name:
        raise CorruptFileError(path, 0, f"{best.name!r} is no name of a checkpoint in this folder")
    return best


def write_best(model_dir: str, best: BestCheckpoint) -> None:
    """Name the best checkpoint of a folder, instead of the one before."""
    assert math.isfinite(best.value), "a metric that is not finite cannot be the best"
    with filesystem.atomic_write(filesystem.join(model_dir, BEST_FILE)) as file:
        file.write(json.dumps(asdict(best), indent=1).encode())
