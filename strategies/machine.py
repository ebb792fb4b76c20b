"""The Hypothesis stateful machine: one rule a kind of call, preconditions from the model.

`machine_for` builds a machine class for a target: use it as a test case, or run it with
`hypothesis.stateful.run_state_machine_as_test`. It holds no oracle: each rule proposes one op and
the run judges it. Kinds that faults need together (detaching and recovering peers inside a group)
have several rules, since Hypothesis picks rules evenly; a rule draws one integer.
Leaves out the other Hypothesis source, whole programs (`kvcore.strategies.program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from kvcore.invariants import Run
from kvcore.invariants.run import Listener
from kvcore.models import Contract, Geometry
from kvcore.strategies.propose import PackedChoices, propose
from kvcore.strategies.weights import kinds_for, op_kind_of
from kvcore.targets.protocol import TargetFactory

CHOICES = st.integers(0, 2**48 - 1)
"""What one rule draws, see `kvcore.strategies.propose.PackedChoices`."""

RULES_INSIDE: dict[str, int] = {
    "free": 2,
    "free_swa": 5,
    "recover_locked": 5,
    "load_back_swa": 3,
    "free_device": 3,
    "device_buffer": 2,
    "hostile": 4,
    "group_end": 3,
}
"""Rules a kind inside a group, where not one."""

RULES_OUTSIDE: dict[str, int] = {
    "hostile": 3,
    "group_begin": 6,
    "alloc": 2,
    "extend_new": 2,
    "free_swa": 2,
    "device_buffer": 3,
    "reserve": 3,
    "drop": 2,
    "resume": 2,
}
"""Rules a kind outside groups, where not one."""

RunSink = Callable[[Run], None]


class AllocatorMachine(RuleBasedStateMachine):
    """Drives one target; subclasses from `machine_for` have the rules and say which target."""

    factory: ClassVar[TargetFactory]
    period: ClassVar[int]
    sink: ClassVar[RunSink | None]
    listeners: ClassVar[Sequence[Listener]]

    def __init__(self) -> None:
        super().__init__()
        self._run: Run | None = None

    @property
    def run(self) -> Run:
        """The run of this example."""
        if self._run is None:
            raise RuntimeError("the machine has not started: its first rule chooses the geometry")
        return self._run

    def start(self, geometry: Geometry) -> None:
        """Begin with an empty target of ``geometry``."""
        self._run = Run(
            type(self).factory(geometry), period=self.period, listeners=type(self).listeners
        )

    def perform(self, kind: str, choices: int) -> None:
        """Propose an op of this kind and apply it, if there is one."""
        op = propose(kind, self.run.model, PackedChoices(choices))
        if op is not None:
            self.run.step(op)

    def teardown(self) -> None:
        """Give everything back and check the pools, unless a law broke before."""
        if self._run is None:
            return
        try:
            if self._run.violation is None:
                self._run.finish()
        finally:
            if (sink := type(self).sink) is not None:
                sink(self._run)


def widest_contract(factory: TargetFactory, geometries: Sequence[Geometry]) -> Contract:
    """The contract with the most ops among those of the targets of these geometries; what a target
    leaves out, its own model refuses."""
    contracts = []
    for geometry in geometries:
        target = factory(geometry)
        contracts.append(target.contract)
        target.close()
    return max(contracts, key=lambda contract: (len(contract.ops), len(contract.hostile)))


def machine_for(
    factory: TargetFactory,
    geometries: Sequence[Geometry],
    *,
    name: str,
    period: int = 1,
    sink: RunSink | None = None,
    listeners: Sequence[Listener] = (),
) -> type[AllocatorMachine]:
    """A machine class for ``factory``, each example on one of ``geometries``.

    ``name`` becomes the class's name; it must differ between machines, since Hypothesis keys its
    database and its derandomised seed by it. ``sink`` is told every finished run, ``listeners``
    every event of every run.
    """
    contract = widest_contract(factory, geometries)
    body: dict[str, Any] = {
        "factory": staticmethod(factory),
        "period": period,
        "listeners": tuple(listeners),
        "sink": staticmethod(sink) if sink is not None else None,
        "begin": initialize(geometry=st.sampled_from(list(geometries)))(AllocatorMachine.start),
    }
    for inside, copies in ((True, RULES_INSIDE), (False, RULES_OUTSIDE)):
        for kind in kinds_for(contract, inside=inside):
            for number in range(copies.get(kind, 1)):
                where = "in_group" if inside else "alone"
                body[f"{kind}_{where}_{number}"] = _rule(kind, inside=inside)
    return type(name, (AllocatorMachine,), body)


def _rule(kind: str, *, inside: bool) -> Any:
    """A rule that asks for one op of ``kind``, inside or outside a group."""

    def perform(machine: AllocatorMachine, choices: int) -> None:
        machine.perform(kind, choices)

    perform.__name__ = kind
    needs_rows = op_kind_of(kind) not in _ALWAYS

    def possible(machine: AllocatorMachine) -> bool:
        model = machine.run.model
        return model.group_open == inside and (bool(model.rows) or not needs_rows)

    return precondition(possible)(rule(choices=CHOICES)(perform))


_ALWAYS = frozenset(
    (
        *("alloc", "extend", "extend_logical", "swa_tail", "load_back"),
        *("group_begin", "group_end", "clear", "hostile", "free_buffer"),
        *("reserve", "drop", "pause", "resume"),
    )
)
"""Op kinds that need no live row."""
