"""Whatever is saved, killed, torn and rolled back: a checkpoint that is named has the state of its step.

The machine runs on a simulated thread, next to the simulated machine of a trainer and its disk. The model is
the plain state of `simulation.checkpoints.World`: what each snapshot contained.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from services.properties import tries
from simulation.checkpoints import Run, Shape, World
from simulation.machines import SimulatedStateMachine, run_on, run_simulated

from monolith.testing.disk import DiskFaults, SimDisk

SEEDS = st.integers(0, 2**16)


class Checkpoints(SimulatedStateMachine):
    """One run: trains, saves, dies, restores, rolls back, names a best checkpoint."""

    @initialize(
        seed=SEEDS,
        max_to_keep=st.sampled_from([1, 2, 3]),
        full_every=st.sampled_from([1, 2, 3]),
        shards=st.sampled_from([1, 2]),
    )
    def begin(self, seed: int, max_to_keep: int, full_every: int, shards: int) -> None:
        self.simulation = self.begin_simulation(seed)
        self.disk = SimDisk(self.simulation, DiskFaults(delay=(0.0, 0.002)))
        self.world = World(seed, SimpleNamespace(simulation=self.simulation))  # type: ignore[arg-type]
        self.world.shape = replace(
            Shape.drawn(seed),
            ids=6,
            max_to_keep=max_to_keep,
            full_every=full_every,
            shards=shards,
            keep_every=None,
        )
        self.best: str | None = None
        self.restart()

    # What happens

    @rule(seed=SEEDS)
    def train(self, seed: int) -> None:
        self.on_trainer(lambda: self.trainer.train(random.Random(seed)))

    @rule(seed=SEEDS, free=st.none() | st.integers(0, 6000))
    def save(self, seed: int, free: int | None) -> None:
        """Take a step and save it; the disk may be full in the middle of it."""
        self.train(seed)
        before = self.world.saved
        self.disk.faults.free_bytes = free
        self.on_trainer(self.write)
        self.disk.faults.free_bytes = None
        if free is None:
            assert self.world.saved > before, "the save failed on a disk that is well"

    @rule(seed=SEEDS, after=st.floats(0.0, 0.1))
    def save_and_kill(self, seed: int, after: float) -> None:
        """Kill the machine in the middle of a save; files that were not synced are torn."""
        self.train(seed)
        self.on_trainer(self.write, kill_after=after)
        self.restart()

    @rule(which=st.integers(0, 5))
    def roll_back(self, which: int) -> None:
        known = [*self.trainer.saver.last_checkpoints, *([] if self.best is None else [self.best])]
        if known:
            self.on_trainer(lambda: self.go_back(known[which % len(known)]))

    @rule(which=st.integers(0, 5))
    def name_best(self, which: int) -> None:
        known = self.trainer.saver.last_checkpoints
        if known:
            self.best = known[which % len(known)]
            self.on_trainer(lambda: self.trainer.name_best(self.best))

    @rule()
    def restart(self) -> None:
        """Start the trainer on a new machine: it finds the newest checkpoint."""
        if hasattr(self, "machine"):
            self.machine.kill()
        self.machine = self.simulation.machine("trainer")
        self.disk.attach(self.machine)
        self.on_trainer(self.start)

    @precondition(lambda self: self.world.saved)
    @rule()
    def look_at_the_folder(self) -> None:
        self.on_trainer(self.check)

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        if self.world.saved:
            self.restart()
            self.on_trainer(self.check)
        self.machine.kill()

    # On the trainer's machine

    def on_trainer(self, work: Callable[[], object], *, kill_after: float | None = None) -> None:
        run_on(self.machine, work, kill_after=kill_after)

    def start(self) -> None:
        self.trainer = Run(self.world)
        self.trainer.start()

    def write(self) -> None:
        self.trainer.write(*self.trainer.snapshot())

    def go_back(self, prefix: str) -> None:
        self.world.saved = 0
        self.world.saved = self.world.check_restored(self.trainer.restore(prefix))

    def check(self) -> None:
        saved = self.world.saved
        self.world.check_folder()
        self.world.saved = saved


def test_a_checkpoint_that_is_named_has_the_state_of_its_step() -> None:
    run_simulated(Checkpoints, examples=tries(8), steps=25)
