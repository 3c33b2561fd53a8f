"""Faults as data: jobs that are made from a seed, each a sequence of iterations with one or two faults in each.

A job trains on the same number of active ranks throughout; spares replace those that die. What it must come to is known
from training without faults, simulated in one process (`restart_training.simulate`).
"""

import random
from dataclasses import dataclass, replace

RAISING = ("exception", "hang")  # the rank stays
KILLING = ("sigkill", "os-exit")
# The trainer goes on; another fault ends the iteration. A stopped writer is killed by its trainer, which must live.
OF_PROCESSES = ("writer-killed", "keeper-killed", "writer-stopped")
IN_TRAINING = ("step", "first-step", "staging", "between", "scheduled", "maybe-finalize", "finalize-fn")
IN_RECOVERY = ("drain", "restore", "restored")
# With snapshots: before one, between its staging and its count, when ranks agree, when bytes come back, and afterwards.
# A byte changes in the newest one of a rank; a replica process is killed; the writer of a rank cannot write.
IN_SNAPSHOTS = (*IN_TRAINING, "snapshot", "count")
IN_RECOVERY_OF_SNAPSHOTS = ("drain", "agreement", "copy-back", "settle")
OF_SNAPSHOTS = ("damage", "damage", "disk-full", "writer-killed", "keeper-killed")
STEPS_PER_ITERATION = 4


@dataclass(frozen=True)
class Fault:
    """A fault in `iteration`, on the rank that has this number then.

    It happens when the rank gets to `moment`, `offset` steps after the start of the iteration or later.
    """

    iteration: int
    kind: str
    moment: str
    rank: int
    offset: int

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.kind} at {self.moment} on rank {self.rank}, {self.offset} steps on"


@dataclass(frozen=True)
class Job:
    """`seed` alone decides what happens. `spares` are there because `kills` ranks die."""

    seed: str
    on_fault: str
    active: int
    spares: int
    faults: tuple[Fault, ...]
    snapshots: bool = False
    """Every step is kept in memory."""
    replicas: bool = False
    """Also in the memory of a rank in another place."""
    registered: bool = True
    """State is restored before the function is called, else in it."""
    twice: bool = False
    """What is saved is also kept by a snapshot of the same step."""

    @property
    def kills(self) -> bool:
        return self.spares > 0

    @property
    def steps(self) -> int:
        return STEPS_PER_ITERATION * (self.iterations + 1)

    @property
    def iterations(self) -> int:
        return 1 + max(fault.iteration for fault in self.faults)

    def __str__(self) -> str:
        return self.seed


def _job(number: int, on_fault: str, iterations: int, snapshots: bool) -> Job:
    active = 3 if number % 4 == 3 else 2
    kills = number % 2 == 1
    seed = f"{on_fault}-{active}-{'killing' if kills else 'raising'}-{number:03d}{'-snapshots' if snapshots else ''}"
    choose = random.Random(seed)
    replicas = snapshots and number % 3 == 2
    faults: list[Fault] = []
    spares = 0
    for iteration in range(iterations):
        of_iteration = _faults(choose, iteration, active, kills, kills and spares < 4, snapshots, replicas)
        in_recovery = IN_RECOVERY + IN_RECOVERY_OF_SNAPSHOTS
        spares += sum(fault.kind in KILLING or fault.moment in in_recovery for fault in of_iteration)
        faults += of_iteration
    registered, twice = not snapshots or number % 5 != 4, snapshots and number % 7 == 6
    return Job(seed, on_fault, active, spares, tuple(faults), snapshots, replicas, registered, twice)


def _faults(
    choose: random.Random, iteration: int, active: int, kills: bool, may_kill: bool, snapshots: bool, replicas: bool
) -> list[Fault]:
    """One fault, or two on different ranks; at least one ends the iteration by itself. Rank 0 at the latest."""
    in_training = IN_SNAPSHOTS if snapshots else IN_TRAINING
    in_recovery = IN_RECOVERY_OF_SNAPSHOTS if snapshots else IN_RECOVERY

    def fault(kinds: tuple[str, ...], moments: tuple[str, ...], rank: int) -> Fault:
        return Fault(iteration, choose.choice(kinds), choose.choice(moments), rank, choose.randint(1, 3))

    kinds = RAISING + KILLING if may_kill else RAISING
    first, second = choose.sample(range(active), 2)
    how = choose.choice(
        ("alone", "alone", "pair", *(("process",) * (3 if snapshots else 1)), "recovery" if may_kill else "pair")
    )
    if how == "alone":
        return [fault(kinds, in_training, first)]
    if how == "pair":
        same = fault(kinds, in_training, first)
        return [same, Fault(iteration, choose.choice(RAISING), same.moment, second, same.offset)]
    if how == "process":
        of_processes = OF_PROCESSES[: 2 if kills else 3]
        if snapshots:
            of_processes = (*OF_SNAPSHOTS, *(("replica-killed",) * 3 if replicas else ()), *of_processes[2:])
        victim = fault(of_processes, ("step", "between", "scheduled"), first)
        if victim.kind == "damage":  # of what is restored then
            victim = replace(victim, moment="step")
            return [victim, Fault(iteration, "exception", "step", choose.choice((first, second)), victim.offset)]
        later = Fault(iteration, "exception", "step", choose.choice((first, second)), victim.offset + 1)
        return [victim, later]
    return [fault(("exception",), in_training, first), fault(("exception", *KILLING), in_recovery, second)]


def jobs(on_fault: str, count: int, iterations: int, *, snapshots: bool = False) -> list[Job]:
    """The first `count` jobs; always the same."""
    return [_job(number, on_fault, iterations, snapshots) for number in range(count)]
