"""Where a run starts: from the latest checkpoint, from an earlier one, or from another run's.

`restore_ckpt` names an earlier checkpoint of the same folder. A training run rolls back to it once: the
marker `restore_ckpt` records that, and a restart resumes from the newest checkpoint saved since. An
evaluation reads it every time and writes nothing.

That is for an unattended setting: a name that is not listed is ignored with a warning. An operator who names
    a checkpoint gets that one or an error: see `roll_back`.

`restore_dir` is the folder of another run to start from. The chief writes state files that point there; no
data is copied. The other workers wait for the marker `restore_dir`, which records that this is done, or why
it failed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Literal

from monolith import concurrency, filesystem
from monolith.checkpoint.folder.manifest import needs_of, read_manifest
from monolith.checkpoint.folder.saver import (
    MANIFEST,
    checkpoint_exists,
    require_checkpoint,
)
from monolith.checkpoint.folder.state_files import (
    BEST,
    CHECKPOINT_FILE,
    LATEST,
    CheckpointState,
    MonolithCheckpointState,
    SaveNames,
    Sleep,
    absolute_path,
    read_best,
    read_checkpoint_state,
    read_journal,
    read_monolith_checkpoint,
    update_monolith_checkpoint,
    write_checkpoint_state,
    write_journal,
)
from monolith.checkpoint.offline.listing import is_named, named_checkpoint
from monolith.checkpoint.offline.reading import complete_names
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    FileMissingError,
    FilesystemError,
    MonolithError,
    RestoreError,
)

RESTORE_CKPT_MARKER = "restore_ckpt"
RESTORE_DIR_MARKER = "restore_dir"

_POLL_SECONDS = 30.0
_EARLIER_RUN_SECONDS = 60.0
"""A failure published so long before a worker started to wait is that of an earlier run."""

_log = logging.getLogger(__name__)

Mode = Literal["train", "eval", "predict"]


def resolve_restore(
    model_dir: str,
    *,
    restore_ckpt: str | None = None,
    mode: Mode = "train",
    latest_filename: str = CHECKPOINT_FILE,
    sleep: Sleep = concurrency.sleep,
) -> CheckpointState | None:
    """Return the state of a folder with the checkpoint to restore as its latest; None if it has none.

    Several threads may call it at once, and get the same answer.

    Args:
        restore_ckpt: The checkpoint to restore; only its name counts. One that is not listed is ignored with
            a warning.
        mode: Whether to roll back the run ("train"), or only this reading.

    Raises:
        CorruptFileError: The state file makes no sense.
        FilesystemError: It cannot be read; or, in training, the choice cannot be written.
    """
    if mode not in ("train", "eval", "predict"):
        raise ConfigError(f"a run can train, eval or predict, got the mode {mode!r}")
    marker = filesystem.join(model_dir, RESTORE_CKPT_MARKER)
    overrides = bool(restore_ckpt) and latest_filename == CHECKPOINT_FILE
    # Checked before the state is read: it is written after the state, so if it exists, so does the choice.
    was_applied = overrides and mode == "train" and filesystem.exists(marker)
    state = read_checkpoint_state(model_dir, latest_filename, sleep=sleep)
    if state is None or not restore_ckpt or not overrides or was_applied:
        return state
    latest = state.model_checkpoint_path
    wanted = filesystem.join(filesystem.parent(latest), filesystem.base_name(restore_ckpt))
    if wanted not in state.all_model_checkpoint_paths:
        _log.warning("checkpoint %s does not exist in %s; resuming from %s", wanted, model_dir, latest)
        return state
    if wanted == latest:
        _log.warning("restore_ckpt %s is the latest checkpoint already", wanted)
    chosen = replace(state, model_checkpoint_path=wanted)
    if mode == "train":
        if wanted != latest:
            write_checkpoint_state(model_dir, chosen, latest_filename)
        _write(marker, absolute_path(wanted))
    return chosen


def checkpoint_to_roll_back_to(model_dir: str, name: str) -> str | None:
    """Return the checkpoint that an operator names; None if the run was rolled back to it already.

    Raises:
        RestoreError: There is none of that name, or it is damaged.
    """
    if name == BEST:  # the best changes while the run trains, and each start would roll back again
        found = filesystem.base_name(named_checkpoint(model_dir, name))
        raise RestoreError(
            f"cannot roll back to {BEST}, which changes while the run trains: name {found} instead"
        )
    done = _marked(model_dir)
    if done is not None and is_named(done, name):
        return None
    return named_checkpoint(model_dir, name)


def roll_back(model_dir: str, name: str) -> str | None:
    """Roll the run in `model_dir` back to the checkpoint that an operator names, listed or not. For the
    chief.

    The state file then ends with that checkpoint, so that a restart resumes from it too, or from one saved
    since. Later checkpoints leave the list; their files stay until an operator deletes them. A run rolls back
    to a checkpoint once: the marker `restore_ckpt` names it, and a restart with the same setting resumes from
    the newest checkpoint.

    Returns:
        The checkpoint, or None if the run was rolled back to it at an earlier start.

    Raises:
        RestoreError: See `checkpoint_to_roll_back_to`.
        CorruptFileError: A state file makes no sense.
        FilesystemError: The choice cannot be written.
    """
    marker = filesystem.join(model_dir, RESTORE_CKPT_MARKER)
    prefix = checkpoint_to_roll_back_to(model_dir, name)
    state = read_checkpoint_state(model_dir)
    if prefix is None:
        _log.warning(
            "checkpoint %s was restored by an earlier start; resuming from %s. Remove %s to restore it again",
            name,
            None if state is None else state.model_checkpoint_path,
            marker,
        )
        return None
    later = _later(model_dir, prefix)
    # In this order: journal, state file, marker. A kill before the marker rolls back once more, which changes
    # nothing; a marker without the state file would never roll back.
    _keep_what_is_needed(model_dir, later)
    write_checkpoint_state(model_dir, _ending_with(prefix, state))
    _write(marker, absolute_path(prefix))
    if later:
        _log.warning(
            "rolling back to %s. Later checkpoints stay on disk, unlisted, until you delete them: %s",
            prefix,
            ", ".join(map(filesystem.base_name, later)),
        )
    return prefix


def _ending_with(prefix: str, state: CheckpointState | None) -> CheckpointState:
    """Return the state of a run that resumes from `prefix`: it is the latest, and later ones are left out."""
    if state is None:
        return CheckpointState(prefix, (prefix,), (read_manifest(prefix).manifest.saved_at,))
    paths, step = state.all_model_checkpoint_paths, SaveNames.step_of(prefix)
    times = dict(zip(paths, state.all_model_checkpoint_timestamps, strict=False))
    times.setdefault(prefix, read_manifest(prefix).manifest.saved_at)
    listed = [*(path for path in paths if path != prefix and SaveNames.step_of(path) <= step), prefix]
    known = all(path in times for path in listed)
    return CheckpointState(
        prefix,
        tuple(listed),
        tuple(times[path] for path in listed) if known else (),
        state.last_preserved_timestamp,
    )


def _later(model_dir: str, prefix: str) -> list[str]:
    """Return the checkpoints in the folder of later steps than that of `prefix`."""
    step = SaveNames.step_of(prefix)
    names = sorted(complete_names(model_dir), key=SaveNames.step_of)
    return [filesystem.join(model_dir, name) for name in names if SaveNames.step_of(name) > step]


def _keep_what_is_needed(model_dir: str, unlisted: Iterable[str]) -> None:
    """Write to the journal what the unlisted checkpoints need, so that it stays as long as they do."""
    journal = read_journal(model_dir)
    needs = {path: tuple(found) for path in unlisted if (found := needs_of(path))}
    if needs:
        kept = tuple(dict.fromkeys([*journal.preserved, *needs]))
        write_journal(model_dir, replace(journal, preserved=kept, depends_on={**journal.depends_on, **needs}))


def _marked(model_dir: str) -> str | None:
    try:
        return filesystem.read_bytes(filesystem.join(model_dir, RESTORE_CKPT_MARKER)).decode().strip()
    except FileMissingError:
        return None


def start_named(start: str) -> tuple[str, str | None]:
    """Return the folder of a run and the name of its checkpoint that a text means.

    Args:
        start: A run's folder, RUN/best, RUN/latest, RUN/STEP, RUN/model.ckpt-STEP.

    Returns:
        The folder, and the name; None if only the run is named.

    Raises:
        ConfigError: There is no such run; the message lists the forms.
    """
    path = absolute_path(start.removesuffix(MANIFEST).rstrip("/"))
    if checkpoint_exists(path):
        return filesystem.parent(path), filesystem.base_name(path)
    if filesystem.is_folder(path):
        return path, None
    folder, name = filesystem.parent(path), filesystem.base_name(path)
    if filesystem.is_folder(folder) and (
        filesystem.exists(filesystem.join(folder, CHECKPOINT_FILE)) or complete_names(folder)
    ):
        return folder, name  # if there is no such checkpoint, the restore lists those that exist
    raise ConfigError(
        f"there is no run and no checkpoint {start}: give the folder of a run, RUN/best, RUN/latest, "
        "RUN/STEP or the path of a checkpoint such as RUN/model.ckpt-100"
    )


def start_from(
    restore_dir: str,
    model_dir: str,
    restore_ckpt: str | None = None,
    *,
    required: bool = False,
    clock: Callable[[], float] = concurrency.time,
    sleep: Sleep = concurrency.sleep,
) -> str | None:
    """Start the run in `model_dir` from a checkpoint of another folder. For the chief.

    Does nothing if `model_dir` has checkpoints already: this is for a first start. The state file is written
    last, so a chief that was killed half-way starts over.

    Args:
        restore_ckpt: Which checkpoint. By default the best, if the other run was evaluated, or the latest;
            the latest, too, if that one is not listed.
        required: An operator named it: listed or not, it is that one or an error.

    Returns:
        The checkpoint to start from, or None if the run had started already.

    Raises:
        RestoreError: There is no such checkpoint, or the files cannot be written. The other workers are
            told, if that is possible.
    """
    try:
        filesystem.make_dirs(model_dir)
        picked = None
        if not filesystem.exists(filesystem.join(model_dir, CHECKPOINT_FILE)):
            picked = _pick(restore_dir, restore_ckpt, sleep, required=required)
            theirs = read_monolith_checkpoint(restore_dir) or MonolithCheckpointState()
            update_monolith_checkpoint(
                model_dir, seed=replace(theirs, exempt_model_checkpoint_paths=(picked,))
            )
            write_checkpoint_state(model_dir, CheckpointState(picked, (picked,)), relative_paths=False)
        # Last: the other workers read the state file as soon as they see this.
        _publish(model_dir, "done", clock())
    except MonolithError as cause:
        message = f"cannot start {model_dir} from {restore_dir}: {cause}"
        try:
            _publish(model_dir, "failed", clock(), message)
        except FilesystemError as silenced:
            _log.error("cannot tell the other workers: %s", silenced)
        raise RestoreError(message) from cause
    return picked


def wait_for_start(
    model_dir: str,
    timeout: timedelta = timedelta(minutes=30),
    *,
    clock: Callable[[], float] = concurrency.time,
    timer: Callable[[], float] = concurrency.monotonic,
    sleep: Sleep = concurrency.sleep,
) -> None:
    """Wait until the chief has done `start_from`. For the other workers.

    Raises:
        RestoreError: The chief failed, or did not finish in time.
    """
    started = clock()
    deadline = timer() + timeout.total_seconds()
    while True:
        word, at, reason = _published(model_dir)
        if word == "done" and filesystem.exists(filesystem.join(model_dir, CHECKPOINT_FILE)):
            return
        failed = f" The chief's last message was: {reason}" if word == "failed" else ""
        if failed and at >= started - _EARLIER_RUN_SECONDS:
            raise RestoreError(f"the chief could not prepare {model_dir}.{failed}")
        left = deadline - timer()
        if left <= 0:
            raise RestoreError(
                f"waited {timeout} for the chief to prepare {model_dir} from its restore_dir.{failed} "
                "Look at the chief's log; if it only needs longer, raise the timeout."
            )
        sleep(min(_POLL_SECONDS, left))


def _pick(restore_dir: str, restore_ckpt: str | None, sleep: Sleep, *, required: bool) -> str:
    if restore_ckpt and required:
        return absolute_path(named_checkpoint(restore_dir, restore_ckpt))
    state = read_checkpoint_state(restore_dir, sleep=sleep)
    if state is None:
        raise RestoreError(f"no checkpoint in {restore_dir}: it has no file {CHECKPOINT_FILE!r}")
    picked, best = state.model_checkpoint_path, read_best(restore_dir)
    if restore_ckpt == LATEST:
        return absolute_path(require_checkpoint(picked))
    if best is not None and not restore_ckpt and checkpoint_exists(best.prefix(restore_dir)):
        picked = best.prefix(restore_dir)
        _log.info(
            "starting from %s, the best of %s by %s, %.4f; restore.checkpoint = %r takes the newest",
            *(best.name, restore_dir, best.metric, best.value, LATEST),
        )
    if restore_ckpt:
        wanted = filesystem.join(filesystem.parent(picked), filesystem.base_name(restore_ckpt))
        if wanted in state.all_model_checkpoint_paths:
            picked = wanted
        else:
            _log.warning("checkpoint %s does not exist in %s; starting from %s", wanted, restore_dir, picked)
    return absolute_path(require_checkpoint(picked))


def _publish(model_dir: str, word: str, at: float, reason: str = "") -> None:
    content = {"state": word, "at": at, "reason": reason}
    _write(filesystem.join(model_dir, RESTORE_DIR_MARKER), json.dumps(content))


def _published(model_dir: str) -> tuple[str, float, str]:
    path = filesystem.join(model_dir, RESTORE_DIR_MARKER)
    try:
        found = json.loads(filesystem.read_bytes(path))
        return str(found["state"]), float(found["at"]), str(found["reason"])
    except FileMissingError:
        return "", 0.0, ""
    except (ValueError, TypeError, KeyError) as cause:
        raise CorruptFileError(path, 0, f"it is not a marker of the chief: {cause}") from cause


def _write(path: str, text: str) -> None:
    with filesystem.atomic_write(path) as file:
        file.write(text.encode())
