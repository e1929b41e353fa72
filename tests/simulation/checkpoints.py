"""The world of checkpoints: a run saves, is killed at any moment, restores, goes back and saves again.

Every step writes numbers that no other step writes. The world notes what each snapshot contained, so a
restored checkpoint is compared row by row with the snapshots that were taken for its name.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from simulation.publishing import NO_ROW, assign, make_table, numbers_of
from torch import nn

from monolith import concurrency, filesystem
from monolith.checkpoint import Checkpointer, DensePart, PendingCheckpoint, Saver, StatePart, TablesPart
from monolith.checkpoint.folder.manifest import needs_of
from monolith.checkpoint.folder.saver import checkpoint_exists
from monolith.checkpoint.folder.state_files import (
    BestCheckpoint,
    read_best,
    read_checkpoint_state,
    write_best,
)
from monolith.errors import FilesystemError
from monolith.runtime.checkpoints import newest_checkpoint
from monolith.testing.cluster import Faults, SimCluster
from monolith.train import TrainConfig

FOLDER = "sim://run"


@dataclass(frozen=True)
class Shape:
    """The choices of a seed."""

    steps: int
    ids: int
    save_every: int
    max_to_keep: int
    keep_every: timedelta | None
    full_every: int
    shards: int
    asynchronous: bool
    rollbacks: float
    """Chance at each step that the run goes back to an older checkpoint."""
    full_disks: float
    """Chance at each save that the disk is full in the middle of it."""
    bests: float = 0.0
    """Chance at each step that a listed checkpoint is named the best one."""
    saves_at_start: bool = False
    """Whether a run saves the step that it restored, before it takes another one."""

    @classmethod
    def drawn(cls, seed: int) -> Shape:
        draw = random.Random(f"checkpoints {seed}")
        return cls(
            steps=draw.randint(3, 12),
            ids=draw.choice([4, 10]),
            save_every=draw.choice([1, 2, 3]),
            max_to_keep=draw.choice([1, 2, 3]),
            keep_every=draw.choice([None, None, timedelta(seconds=1)]),
            full_every=draw.choice([1, 2, 3]),
            shards=draw.choice([1, 2]),
            asynchronous=draw.choice([False, True]),
            rollbacks=draw.choice([0.0, 0.15, 0.4]),
            full_disks=draw.choice([0.0, 0.3]),
            bests=draw.choice([0.0, 0.1, 0.3]),
            saves_at_start=draw.choice([False, False, True]),
        )


@dataclass(frozen=True)
class State:
    """All that a checkpoint holds, and which snapshot it is of."""

    step: int
    rows: dict[int, int]
    weight: int
    position: int
    snapshot: int = field(compare=False, default=0)
    """Number of the snapshot, over all starts of the run."""


class World:
    """What a run has saved, over all its starts."""

    def __init__(self, seed: int, cluster: SimCluster) -> None:
        self.shape, self.cluster = Shape.drawn(seed), cluster
        self.snapshots: dict[int, list[State]] = {}
        """Step -> what was in each snapshot of it, in order."""
        self.taken = 0
        self.newest = 0
        """Number of a write."""
        self.saved = 0
        """The snapshot that a restart must find, or a later one: it is saved, or the run went back to it."""
        self.bests: dict[str, State] = {}
        """Name -> what the checkpoint contained when it was last named the best one."""

    def check_restored(self, found: State) -> int:
        """Check that a restored state is that of a snapshot, and not an outdated one; return its number."""
        known = self.snapshots.get(found.step, [])
        matching = [one.snapshot for one in known if one == found]
        assert matching, f"restored {found}, and the snapshots of that step were {known}"
        assert matching[-1] >= self.saved, (
            f"restored {found}, older than snapshot {self.saved}, which was saved"
        )
        return matching[-1]

    def check_named(self) -> list[str]:
        """Check that all checkpoints that are named exist: the listed ones, at least one, and the best."""
        state = read_checkpoint_state(FOLDER)
        assert state is not None, "there is no checkpoint"
        best = read_best(FOLDER)
        named = [filesystem.join(FOLDER, path) for path in state.all_model_checkpoint_paths]
        named += [] if best is None else [best.prefix(FOLDER)]
        for prefix in named:
            assert checkpoint_exists(prefix), f"{prefix} is named, and it is not complete"
        return named

    def check_folder(self) -> None:
        """Check that every checkpoint that is named can be restored, and that nothing else is left."""
        named, best = set(self.check_named()), read_best(FOLDER)
        exempt = set() if best is None else {best.prefix(FOLDER)}
        assert len(named - exempt) <= self.shape.max_to_keep, named
        for prefix in sorted(named):
            self.saved = 0
            self.check_restored(Run(self).restore(prefix))
        if best is not None:
            found, had = Run(self).restore(best.prefix(FOLDER)), self.bests[best.name]
            assert found == had, f"{best.name} is the best checkpoint: it has {found}, and had {had}"
        needed = {one for prefix in named for one in needs_of(prefix)}
        names = [filesystem.base_name(path) for path in filesystem.list_files(FOLDER)]
        names += [filesystem.base_name(path) for path in filesystem.list_folders(FOLDER)]
        there = {found[0] for name in names if (found := re.match(r"model\.ckpt(\.\d+)?-\d+", name))}
        there |= {found[0] for name in names if (found := re.match(r"ckpt\.info(\.\d+)?-\d+", name))}
        allowed = {filesystem.base_name(prefix) for prefix in {*named, *needed}}
        allowed |= {name.replace("model.ckpt", "ckpt.info") for name in allowed}
        if self.shape.keep_every is None:
            assert there <= allowed, f"files of {sorted(there - allowed)} are left: {names}"
        unfinished = [name for name in names if filesystem.is_temporary(name)]
        assert not unfinished, f"unfinished files are left: {unfinished}"


class Run:
    """One start of the run."""

    def __init__(self, world: World) -> None:
        shape = world.shape
        self.world = world
        self.step = self.position = 0
        self.table = make_table()
        self.model = nn.Linear(1, 1, bias=False)
        tables = TablesPart({"item": self.table}, num_shards=shape.shards, incremental=shape.full_every > 1)
        position = StatePart("position", lambda: self.position, self._set_position)
        self.saver = Saver(FOLDER, max_to_keep=shape.max_to_keep, keep_every=shape.keep_every)
        self.checkpointer = Checkpointer(
            self.saver, [tables, DensePart(self.model, random=False), position], full_every=shape.full_every
        )

    def _set_position(self, position: int) -> None:
        self.position = position

    def state(self) -> State:
        return State(self.step, numbers_of(self.table), int(self.model.weight.item()), self.position)

    def restore(self, prefix: str) -> State:
        self.step = self.checkpointer.restore(prefix).step
        return self.state()

    def start(self) -> None:
        """Continue from the newest checkpoint, as a process of a run does."""
        self.saver.recover(needs=needs_of)
        prefix = newest_checkpoint(TrainConfig(model_dir=FOLDER), "train")
        if prefix is None:
            assert not self.world.saved, "no checkpoint is found, and one was saved"
        else:
            self.world.saved = self.world.check_restored(self.restore(prefix))

    def train(self, draw: random.Random) -> None:
        self.step += 1
        keys = draw.sample(range(1, self.world.shape.ids + 1), draw.randint(1, 4))
        numbers = {}
        for key in keys:
            self.world.newest += 1
            numbers[key] = NO_ROW if draw.random() < 0.25 else self.world.newest
        assign(self.table, numbers)
        self.position = self.world.newest
        with torch.no_grad():
            self.model.weight.fill_(self.world.newest)

    def snapshot(self) -> tuple[PendingCheckpoint, State]:
        pending = self.checkpointer.snapshot(self.step)
        self.world.taken += 1
        taken = replace(self.state(), snapshot=self.world.taken)
        self.world.snapshots.setdefault(self.step, []).append(taken)
        return pending, taken

    def write(self, pending: PendingCheckpoint, taken: State) -> None:
        """Write a snapshot, on whatever thread; a failure leaves the checkpoints before it as they were."""
        saved = False
        try:
            pending.write()
            saved = True
            self.world.saved = max(self.world.saved, taken.snapshot)
        except FilesystemError as error:
            self.world.cluster.simulation.note(f"step {taken.step} is not saved: {error}")
        pending.close(saved=saved)
        if self.world.saved:
            self.world.check_named()

    def name_best(self, prefix: str) -> None:
        """Name a checkpoint the best one, as an evaluation does."""
        found, name = Run(self.world).restore(prefix), filesystem.base_name(prefix)
        self.world.bests[name] = found  # before: it may be killed in the middle of it
        self.world.cluster.simulation.note(f"names {name} the best")
        write_best(FOLDER, BestCheckpoint(name=name, metric="auc", value=0.5, step=found.step))


def run(world: World) -> None:
    """The process: trains to the last step and saves it."""
    shape, disk = world.shape, world.cluster.disk
    draw = random.Random(world.cluster.random.random())
    if world.cluster.quiet or draw.random() < 0.5:
        disk.faults.free_bytes = None  # an operator has freed some space
    one = Run(world)
    one.start()
    writing: concurrency.Thread | None = None

    def save() -> None:
        nonlocal writing
        if writing is not None:
            writing.join()
        pending, taken = one.snapshot()
        if draw.random() < shape.full_disks and not world.cluster.quiet:
            disk.faults.free_bytes = draw.randint(0, 6000)
        writing = concurrency.Thread(target=one.write, args=(pending, taken))
        writing.start()
        if not shape.asynchronous:
            writing.join()
            disk.faults.free_bytes = None

    if shape.saves_at_start and one.step:
        save()
    while one.step < shape.steps or not world.cluster.quiet:
        concurrency.sleep(draw.uniform(0.01, 0.2))
        one.train(draw)
        if one.step % shape.save_every == 0:
            save()
        if draw.random() < shape.bests and one.saver.last_checkpoints:
            if writing is not None:
                writing.join()
            one.name_best(draw.choice(one.saver.last_checkpoints))
        if draw.random() < shape.rollbacks and one.saver.last_checkpoints:
            if writing is not None:
                writing.join()
            best = read_best(FOLDER)
            known = [*one.saver.last_checkpoints, *([] if best is None else [best.prefix(FOLDER)])]
            prefix = draw.choice(known)
            world.cluster.simulation.note(f"goes back to {prefix}")
            world.saved = 0
            world.saved = world.check_restored(one.restore(prefix))
    if writing is not None:
        writing.join()
    disk.faults.free_bytes = None
    before = world.saved
    save()
    assert writing is not None
    writing.join()
    assert world.saved == world.taken > before, "the last step was not saved"


def checkpoints(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    faults = replace(Faults.drawn(seed), cuts=0, pauses=0)
    kills = random.Random(f"kills {seed}").randint(0, 6)
    disk = replace(faults.disk, delay=(0.0, max(faults.disk.delay[1], 0.01)))
    cluster = SimCluster(seed, replace(faults, kills=kills, disk=disk), traced=traced, calm=120.0)
    world = World(seed, cluster)

    def play(cluster: SimCluster) -> None:
        cluster.start("trainer", lambda: run(world))
        cluster.wait()
        world.check_folder()

    cluster.run(play)
    return cluster
