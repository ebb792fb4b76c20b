"""The Hypothesis stateful machine: one rule a kind of call, preconditions from the model.

`machine_for` builds a machine class for a target: use it as a test case, or run it with
`hypothesis.stateful.run_state_machine_as_test`. It holds no oracle: each rule proposes one op and
the run judges it; a rule draws one integer. Leaves out which rules there are
(`kvcore.strategies.machine_rules`), and the other Hypothesis source, whole programs
(`kvcore.strategies.program`).
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
from kvcore.models import Contract, Geometry, ServingModel
from kvcore.models.ops import Op
from kvcore.strategies.choices import PackedChoices
from kvcore.strategies.machine_rules import (
    REQUEST_RULES,
    pick_kind,
    propose_or_other,
    rules_for,
)
from kvcore.strategies.propose import propose
from kvcore.targets.protocol import TargetFactory

CHOICES = st.integers(0, 2**48 - 1)
"""What one rule draws, see `kvcore.strategies.choices.PackedChoices`."""

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
        """Apply an op of this kind, or of another one if there is none."""
        self._apply(propose_or_other(kind, self.run.model, PackedChoices(choices)))

    def perform_one_of(self, kinds: Sequence[str], choices: int) -> None:
        """The same of one of these request-level kinds, see
        `kvcore.strategies.machine_rules.pick_kind`."""
        packed, model = PackedChoices(choices), self.run.model
        if isinstance(model, ServingModel) and (kind := pick_kind(kinds, model, packed)):
            self._apply(propose(kind, model, packed))

    def _apply(self, op: Op | None) -> None:
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
    rules = _request_rules() if "admit" in contract.ops else _allocator_rules(contract)
    return type(name, (AllocatorMachine,), body | rules)


def _allocator_rules(contract: Contract) -> dict[str, Any]:
    rules: dict[str, Any] = {}
    for inside in (True, False):
        where = "in_group" if inside else "alone"
        for number, kind in enumerate(rules_for(contract, inside=inside)):
            rules[f"{kind}_{where}_{number}"] = _rule(kind, inside=inside)
    return rules


def _rule(kind: str, *, inside: bool) -> Any:
    """A rule that asks for one op of ``kind``, inside or outside a group."""

    def perform(machine: AllocatorMachine, choices: int) -> None:
        machine.perform(kind, choices)

    perform.__name__ = kind
    possible = _inside if inside else _outside
    return precondition(possible)(rule(choices=CHOICES)(perform))


# Asked of every rule at every step, up to a hundred times: no more than a look.


def _inside(machine: AllocatorMachine) -> bool:
    return machine.run.model.group_open


def _outside(machine: AllocatorMachine) -> bool:
    return not machine.run.model.group_open


def _request_rules() -> dict[str, Any]:
    return {
        f"{kinds[0]}_{number}": _request_rule(kinds)
        for kinds, copies in REQUEST_RULES.items()
        for number in range(copies)
    }


def _request_rule(kinds: Sequence[str]) -> Any:
    """A rule that asks for one op of these kinds. It is always possible: Hypothesis varies its
    examples step by step, and a step that has become impossible is the end of such an example."""

    def perform(machine: AllocatorMachine, choices: int) -> None:
        machine.perform_one_of(kinds, choices)

    perform.__name__ = kinds[0]
    return rule(choices=CHOICES)(perform)
