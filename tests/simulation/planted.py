"""Bugs planted mechanically, one line each: a guard dropped, two lines swapped, a number off by one.

    python -m simulation.planted                     plants each in turn; prints the seeds until it is found
    python -m simulation.planted adopted_too_late    plants this one

Each runs in a process of its own, which reads the changed text in place of the module. Those that no world
can notice name the test that does; those that change nothing say why.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import torch  # noqa: F401  before the processes are forked, since it takes most of the time

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "monolith"
MOST = 400
"""Seeds within which a world is to find a bug."""
_NAME = "MONOLITH_PLANTED_BUG"


@dataclass(frozen=True)
class Planted:
    """One bug: a text of a module, and the wrong text in its place."""

    file: str
    old: str
    new: str
    world: str
    sentence: str
    """What is wrong, in words."""
    test: str = ""
    """The test that fails, if no world can notice it."""
    same: str = ""
    """Why nothing is wrong after all."""

    @property
    def module(self) -> str:
        return "monolith." + self.file.removesuffix(".py").replace("/", ".")

    def text(self) -> str:
        """Return the module with the bug."""
        right = (SOURCE / self.file).read_text()
        assert right.count(self.old) == 1, f"{self.file} has {right.count(self.old)} times: {self.old}"
        return right.replace(self.old, self.new)


PLANTED = {
    # store
    "last_push_is_new": Planted(
        "store/pushes.py",
        "return number > pushes.highest or",
        "return number >= pushes.highest or",
        "fleet",
        "The newest push of a sender counts as new when it is repeated.",
    ),
    "copy_while_pushes_run": Planted(
        "store/pushes.py",
        "while self._is_still or number in",
        "while number in",
        "keep_going",
        "A push is applied while a standby takes its copy.",
        test="tests/store/test_pushes.py::test_no_push_is_applied_while_the_rows_are_still",
    ),
    "copy_with_pushes_under_way": Planted(
        "store/pushes.py",
        "while any(pushes.under_way for pushes in self._senders.values()):",
        "while False:",
        "keep_going",
        "A standby's copy does not wait for pushes under way.",
        test="tests/store/test_pushes.py::test_no_push_is_applied_while_the_rows_are_still",
    ),
    "refused_push_counts": Planted(
        "store/pushes.py",
        "if not applied and number > pushes.floor:",
        "if not applied and number < pushes.floor:",
        "keep_going",
        "A push that was refused counts as applied.",
        test="tests/store/test_pushes.py::test_a_push_that_was_refused_has_not_come",
    ),
    "adopted_too_late": Planted(
        "store/server.py",
        "        state.applied.adopt(applied or {})\n        self._state = state\n",
        "        self._state = state\n        state.applied.adopt(applied or {})\n",
        "keep_going",
        "A server that takes over is visible before it knows the pushes of its copy.",
    ),
    "rows_of_any_state": Planted(
        "store/server.py",
        "if not state.matches(about.incarnation):",
        "if False:",
        "fleet",
        "Rows are read and trained in a state that the caller does not mean.",
    ),
    "refresh_without_waiting": Planted(
        "store/dense_cache.py",
        "        self._background.wait()\n        self.fetch()\n",
        "        self.fetch()\n",
        "fleet",
        "The newest dense weights are fetched while pushes are queued.",
    ),
    # runtime
    "late_arrival": Planted(
        "runtime/service.py",
        "if run.halt == body.halt:  # otherwise",
        "if True:  # otherwise",
        "fleet",
        "An arrival at an earlier pause counts for the one in force.",
        test="tests/runtime/test_service.py::test_a_process_that_arrives_late_at_a_released_pause_is_not_waited_for",
    ),
    "pause_without_states": Planted(
        "runtime/service.py",
        "                run.stood[run.halt] = self._quiesced(run)  # `saved` comes later, if at all\n",
        "                pass\n",
        "keep_going",
        "States of a pause are forgotten before its snapshot is on disk.",
    ),
    "pause_of_a_lost_chief": Planted(
        "runtime/service.py",
        "            run.halt = None\n            run.arrived.clear()\n"
        "            run.heard[0] = self._clock()\n",
        "            run.heard[0] = self._clock()\n",
        "keep_going",
        "The pause of a chief that restarted stays in force.",
    ),
    "pause_of_a_lost_service": Planted(
        "runtime/service.py",
        "return body.halt is None or run.halt == body.halt",
        "return True",
        "keep_going",
        "A chief continues a pause that the new coordination service does not know.",
    ),
    "departure_given_back_twice": Planted(
        "runtime/service.py",
        "if departure is None or departure.number != body.number:",
        "if departure is None:",
        "elastic",
        "A late word that a worker's work was given back ends its next departure.",
    ),
    "stopped_service": Planted(
        "runtime/service.py",
        "        if slept:\n",
        "        if False:\n",
        "fleet",
        "A server that was stopped takes all workers for silent.",
        test="tests/runtime/test_service.py::test_no_worker_is_lost_because_the_service_itself_was_stopped",
    ),
    "marked_after_arrival": Planted(
        "runtime/fleet.py",
        "        self._pushes.mark(halt)\n"
        '        self._surely("meeting.arrive", Arrive(self._run, self.index, halt, state, self._member))\n',
        '        self._surely("meeting.arrive", Arrive(self._run, self.index, halt, state, self._member))\n'
        "        self._pushes.mark(halt)\n",
        "keep_going",
        "A worker counts its pushes after it has arrived at a pause.",
    ),
    "losses_counted_late": Planted(
        "runtime/fleet_placement.py",
        "            self._servers.begin_commit(self._losses)\n",
        "            self._servers.begin_commit(self._servers.losses)\n",
        "keep_going",
        "A checkpoint is committed although a server was lost while it was written.",
    ),
    "last_word_not_awaited": Planted(
        "runtime/service.py",
        "            self._wait(lambda: not self._untold(run), body.wait)\n            return Farewell(",
        "            return Farewell(",
        "fleet",
        "The chief ends server 0 before the workers know that the run is over.",
    ),
    # sync
    "learned_after_the_rows": Planted(
        "sync/publisher.py",
        "        # After the rows were read: the update of one step more may have been under way.\n",
        "        learned = self._learned()\n",
        "publishing",
        "A delta says the progress after its rows were read.",
    ),
    "overflow_checked_too_early": Planted(
        "sync/publisher.py",
        "            delta = self._make()\n",
        "            if self._has_overflowed():\n                return None\n"
        "            delta = self._make()\n"
        "            self._lost = {name: touched.lost for name, touched in self._touched.items()}\n",
        "publishing",
        "The set of changed ids is checked for an overflow before the delta is made.",
    ),
    "delta_before_the_state": Planted(
        "sync/publisher.py",
        "            if not self._state_sent:\n"
        "                self._writer.set_state(self._state)\n"
        "                self._state_sent = True\n"
        "            if self._unsent is not None and not self._state.paused:\n"
        "                self._append(self._unsent)\n",
        "            if self._unsent is not None and not self._state.paused:\n"
        "                self._append(self._unsent)\n"
        "            if not self._state_sent:\n"
        "                self._writer.set_state(self._state)\n"
        "                self._state_sent = True\n",
        "publishing",
        "Readers get a delta before the publish state.",
    ),
    "delta_of_the_epoch_before": Planted(
        "sync/publisher.py",
        "            self._pending.clear()\n            self._unsent = None\n",
        "            self._pending.clear()\n",
        "publishing",
        "A delta that was not sent is sent in the next epoch.",
    ),
    "changed_rows_in_digests": Planted(
        "sync/publisher.py",
        "        still[among[(among >= 0) & (among < len(buckets))]] = False\n",
        "",
        "publishing",
        "Digests include rows that changed since the delta was made.",
    ),
    "log_one_delta_short": Planted(
        "sync/channel.py",
        "if not log.oldest - 1 <= position.sequence",
        "if not log.oldest - 2 <= position.sequence",
        "publishing",
        "A reader continues although the log lacks the delta after its position.",
        test="tests/sync/test_delta_log.py::test_the_oldest_go_where_all_take_too_many_bytes",
    ),
    "late_state": Planted(
        "sync/subscriber.py",
        "if state.publisher == known.publisher and state.number < known.number:",
        "if False:",
        "publishing",
        "A late publish state replaces a newer one.",
    ),
    "repeated_delta_applied": Planted(
        "sync/subscriber.py",
        "if following.sequence <= position.sequence:",
        "if following.sequence < position.sequence:",
        "publishing",
        "A delta that is repeated is applied again.",
        same="the target has exactly the rows of the position, so its newest delta puts the same rows again",
    ),
    "buckets_move_the_position": Planted(
        "sync/subscriber.py",
        "        position = begin.position if begin.buckets is None else _lower(self.progress.position, ",
        "        position = begin.position if True else _lower(self.progress.position, ",
        "publishing",
        "After some buckets were read again, the deltas before them count as applied.",
    ),
    "broken_snapshot_keeps_the_position": Planted(
        "sync/subscriber.py",
        "self.progress = replace(self.progress, position=_lower(position, begun) if same else None)",
        "pass",
        "publishing",
        "Rows of a snapshot that broke off count as those of the position.",
    ),
    "chunk_of_another_snapshot": Planted(
        "sync/subscriber.py",
        "if snapshot is None or message.snapshot != snapshot.begin.snapshot:",
        "if snapshot is None:",
        "publishing",
        "Rows of an earlier snapshot count as part of this one.",
    ),
    # data/service
    "replaced_trainer_gets_chunks": Planted(
        "data/service/job.py",
        "        if current != session:\n",
        "        if False:\n",
        "data_service",
        "A trainer that was replaced gets chunks.",
        test="tests/data/service/test_job.py::test_an_older_process_of_the_same_trainer_is_shut_out",
    ),
    "session_is_not_over": Planted(
        "data/service/job.py",
        "            self._replaced.add(current)\n",
        "            pass\n",
        "data_service",
        "A session that was replaced may attach once more.",
        test="tests/data/service/test_job.py::test_a_repeated_attach_that_arrives_late_shuts_nobody_out",
    ),
    "finished_without_its_last_chunk": Planted(
        "data/service/job.py",
        "            if chunks != known:\n",
        "            if False:\n",
        "data_service",
        "A split counts as read although the dispatcher lacks its last chunk.",
        test="tests/data/service/test_job.py::test_a_split_is_not_finished_while_chunks_of_it_are_missing",
    ),
    "chunk_of_a_lost_lease": Planted(
        "data/service/job.py",
        "            if sequence == chunks - 1:\n",
        "            if sequence == chunks - 2:\n",
        "data_service",
        "A chunk that is announced again is refused.",
        test="tests/data/service/test_job.py::test_announcing_again_changes_nothing_and_a_gap_is_refused",
    ),
    "last_turn_not_freed": Planted(
        "data/service/job.py",
        '"UPDATE chunks SET trainer = NULL, turn = NULL WHERE trainer = ? AND turn >= "',
        '"UPDATE chunks SET trainer = NULL, turn = NULL WHERE trainer = ? AND turn > "',
        "together",
        "The first chunk that a trainer has not trained is not freed with those after it.",
    ),
    "forgotten_too_early": Planted(
        "data/service/job.py",
        '"DELETE FROM chunks WHERE trainer = ? AND turn < ?"',
        '"DELETE FROM chunks WHERE trainer = ? AND turn <= ?"',
        "data_service",
        "The first chunk that a trainer may ask for again is forgotten.",
    ),
    "turn_counted_before_it_is_kept": Planted(
        "data/service/client.py",
        '                self._put(self._fetch(chunk, answer["workers"]))\n                self._turn += 1\n',
        '                self._turn += 1\n                self._put(self._fetch(chunk, answer["workers"]))\n',
        "data_service",
        "A trainer counts a chunk before it has it.",
        same="only the fetching thread reads the number, and asks for no chunks meanwhile",
    ),
    "refused_chunk_stays": Planted(
        "data/service/worker.py",
        "                self._buffer.free.pop(chunk, None)\n                self._changed.notify_all()\n"
        "        return bool(held)",
        "                self._changed.notify_all()\n        return bool(held)",
        "data_service",
        "A data worker keeps a chunk whose lease was lost.",
        same="the worker that has the lease now cuts the same records at the same place",
    ),
    # checkpoint
    "new_files_not_called_incomplete": Planted(
        "checkpoint/folder/saver.py",
        "        self._write_journal(unlisted)\n        self._write_state(after, Saved(prefix, now))\n",
        "        self._write_state(after, Saved(prefix, now))\n",
        "checkpoints",
        "Deletions are not in the journal before the state file is replaced.",
    ),
    "state_before_the_journal": Planted(
        "checkpoint/folder/saver.py",
        "        self._write_journal(unlisted)\n        self._write_state(after, Saved(prefix, now))\n",
        "        self._write_state(after, Saved(prefix, now))\n        self._write_journal(unlisted)\n",
        "checkpoints",
        "The state file is replaced before the journal of the deletions.",
        test="tests/checkpoint/folder/test_saver.py::test_killed_at_any_moment_a_run_ends_as_if_it_had_not_been",
    ),
    "listed_deleted": Planted(
        "checkpoint/folder/saver.py",
        "return self._retention.due(exempt | listed)",
        "return self._retention.due(exempt)",
        "checkpoints",
        "A checkpoint is deleted that the state file lists.",
        test="tests/checkpoint/folder/test_saver.py::test_a_state_file_that_was_replaced_after_all_loses_nothing",
    ),
    "needed_deleted": Planted(
        "checkpoint/folder/saver.py",
        "self._due(exempt | set(needs))",
        "self._due(exempt)",
        "checkpoints",
        "Before a save, checkpoints are deleted that it needs.",
        test="tests/checkpoint/folder/test_saver.py::test_a_checkpoint_that_could_not_be_deleted_stays_if_the_next_one_needs_it",
    ),
    "manifest_deleted_last": Planted(
        "checkpoint/folder/saver.py",
        "key=lambda path: path != prefix + MANIFEST",
        "key=lambda path: path == prefix + MANIFEST",
        "checkpoints",
        "The manifest of a checkpoint is deleted after its files.",
        test="tests/checkpoint/folder/test_saver.py::test_the_manifest_is_deleted_first",
    ),
    "manifest_of_a_failed_attempt": Planted(
        "checkpoint/checkpointer.py",
        "            filesystem.remove(prefix + MANIFEST)\n",
        "            pass\n",
        "checkpoints",
        "A save that is tried again keeps the manifest of the attempt before.",
    ),
    "tip_of_a_restore": Planted(
        "checkpoint/checkpointer.py",
        "            self._tip = None\n        known",
        "            pass\n        known",
        "checkpoints",
        "After a restore that changed something, the next increment continues the last chain.",
        test="tests/checkpoint/test_checkpointer.py::test_a_chain_ends_when_a_renamed_table_is_restored",
    ),
    "one_kept_too_few": Planted(
        "checkpoint/folder/retention.py",
        "len(counted) - self.max_to_keep) if",
        "len(counted) - self.max_to_keep + 1) if",
        "checkpoints",
        "One checkpoint less is kept than was asked for.",
    ),
}


class _Loader(SourceFileLoader):
    def __init__(self, bug: Planted, path: str) -> None:
        super().__init__(bug.module, path)
        self._bug = bug

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return compile(self._bug.text(), self.path, "exec")


class _Planting(MetaPathFinder):
    """Loads the module of one bug with its wrong text."""

    def __init__(self, bug: Planted) -> None:
        self._bug = bug

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._bug.module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(self._bug, spec.origin)
        return spec


def plant(name: str) -> None:
    """Let this process import the wrong text. Nothing may have imported the module yet."""
    bug = PLANTED[name]
    assert bug.module not in sys.modules, f"{bug.module} was imported before the bug was planted"
    sys.meta_path.insert(0, _Planting(bug))


def find(name: str, most: int) -> str:
    """Plant a bug in a process of its own, and return what finds it."""
    bug = PLANTED[name]
    if bug.test:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "simulation.planted", bug.test]
        environ = os.environ | {_NAME: name, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(command, env=environ, capture_output=True, check=False, cwd=TESTS.parent)
        return f"{'found' if done.returncode == 1 else 'MISSED'} by {bug.test}"
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_simulate, (name, most))


def _simulate(name: str, most: int) -> str:
    plant(name)
    from simulation.blocks import run_block

    for seed in range(most):
        if failed := run_block(PLANTED[name].world, seed, seed + 1).failed:
            return f"found after {seed + 1} seeds: {failed[seed]:.150}"
    return f"MISSED by {most} seeds of {PLANTED[name].world}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m simulation.planted", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PLANTED), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=MOST)
    options = parser.parse_args()
    for name in options.names:
        sys.stdout.write(f"{name}: {find(name, options.seeds)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    # The order of sets of strings is part of a run, and only fixed if this is.
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, "-m", "simulation.planted", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"})
    main()
elif _NAME in os.environ:
    plant(os.environ[_NAME])  # a plugin of pytest, which imports this before all else
