"""State machines of Hypothesis on a simulated thread: their rules may start, kill and cut off machines."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from monolith import concurrency
from monolith.testing.scheduler import SimMachine, Simulation


class SimulatedStateMachine(RuleBasedStateMachine):
    """A state machine whose rules run on a thread of a simulation."""

    def begin_simulation(self, seed: int) -> Simulation:
        """Return the simulation, to be called first: its choices are those of this example from now on."""
        here = concurrency.machine()
        assert isinstance(here, SimMachine), "use run_simulated"
        here.simulation.random.seed(seed)
        return here.simulation


def run_simulated(machine: type[SimulatedStateMachine], *, examples: int, steps: int) -> None:
    """Run the examples of a state machine, one after the other in one simulation."""
    simulation = Simulation(0, most_seconds=float("inf"), most_switches=10**12)
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # Without shrinking, which takes minutes: an example can be read as it is.
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    simulation.run(lambda: run_state_machine_as_test(machine, settings=how))


def run_on(machine: SimMachine, work: Callable[[], object], *, kill_after: float | None = None) -> None:
    """Run something on a thread of a machine, and raise here what it raises.

    Args:
        kill_after: Virtual seconds after which the machine is killed, whatever it does then.
    """
    failed: list[Exception] = []

    def body() -> None:
        try:
            work()
        except Exception as error:
            failed.append(error)

    thread = machine.spawn(body)
    thread.join(kill_after)
    if kill_after is not None:
        machine.kill()
    if failed:
        raise failed[0]
