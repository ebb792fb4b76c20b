"""`kvcore faults`: each known fault hunted by each source, and how soon it is found.

Leaves out the hunt itself (`kvcore.strategies.hunt`) and the faults (`kvcore.targets.faults`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvcore.models.trace import Trace, new_header
from kvcore.reports.edge import BadInput, Status
from kvcore.reports.layout import messages, new_table, output
from kvcore.reports.trace_files import SUFFIX, check_directory, write_trace
from kvcore.reports.wording import count
from kvcore.strategies.hunt import Hunt, hunt
from kvcore.strategies.sources import SourceName
from kvcore.strategies.workers import worker_processes
from kvcore.targets.faults import FAULTS

LIMITS: dict[SourceName, int] = {"walker": 100, "machine": 400}
"""The sources that are held to finding every fault, and the programs that each may take."""

LAYERS = {
    "A": "allocators",
    "P": "pools",
    "C": "prefix cache",
    "M": "memory saver",
    "H": "HiSparse",
}
"""What the letters of the layers stand for, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Prey:
    """One fault and the hunts for it, one a source."""

    fault: str
    hunts: tuple[Hunt, ...]

    @property
    def found(self) -> bool:
        """Whether each source finds it, in most of its hunts."""
        return all(hunt.median is not None for hunt in self.hunts)


def run(names: Sequence[str], seeds: int, traces: Path | None = None) -> Status:
    """Hunt the faults named, or all, with ``seeds`` seeds, and print what was found; the shortest
    program of each goes to ``traces``, if given, as a trace named after the fault."""
    for name in names:
        if name not in FAULTS:
            raise BadInput(f"unknown fault {name!r}; known: {', '.join(sorted(FAULTS))}")
    if traces is not None:
        check_directory(traces)
    chosen = list(dict.fromkeys(names)) or list(FAULTS)
    prey = _hunt_all(chosen, seeds)
    if traces is not None:
        _save(prey, traces)
    console = output()
    console.print(faults_table(prey))
    console.print()
    missed = [one.fault for one in prey if not one.found]
    console.print(verdict(missed, len(prey), seeds))
    return Status.VIOLATION if missed else Status.CLEAN


def _save(prey: Sequence[Prey], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for one in prey:
        found = [(shrunk, hunt.source) for hunt in one.hunts for shrunk in hunt.shrunk]
        if found:
            shrunk, source = min(found, key=lambda pair: len(pair[0].program))
            header = new_header(f"fault:{one.fault}", shrunk.geometry, found_by=source)
            trace = Trace(header, shrunk.program, shrunk.violation)
            write_trace(trace, directory / f"{one.fault}{SUFFIX}")


def _hunt_all(faults: Sequence[str], seeds: int) -> list[Prey]:
    """Hunt on every CPU, and tell which hunts have ended."""
    console = messages()
    found: dict[str, Prey] = {}
    with worker_processes() as pool, console.status("hunting") as status:
        for prey in pool.imap_unordered(_hunt, [(fault, seeds) for fault in faults]):
            found[prey.fault] = prey
            news = f"hunted {prey.fault} ({len(found)} of {len(faults)})"
            status.update(news)
            if not console.is_terminal:
                console.print(news, markup=False)
    return [found[fault] for fault in faults]


def _hunt(task: tuple[str, int]) -> Prey:
    fault, seeds = task
    ways = [(source, range(seeds), limit) for source, limit in LIMITS.items()]
    return Prey(fault, tuple(hunt(fault, *way) for way in ways))


def faults_table(prey: Sequence[Prey]) -> Table:
    """One row a fault, layer by layer: programs until found (median) by each source, shrunk length,
    laws broken."""
    table = new_table()
    table.add_column("fault", no_wrap=True)
    table.add_column("reported as", width=len("sglang#00000,"), overflow="fold")
    for source in LIMITS:
        table.add_column(source, justify="right", no_wrap=True)
    table.add_column("ops", justify="right", no_wrap=True)
    table.add_column("laws", overflow="fold")
    for layer, name in LAYERS.items():
        within = [one for one in prey if FAULTS[one.fault].layer == layer]
        if within:
            table.add_row(Text(f"{layer}, {name}", style="bold"))
        for one in within:
            table.add_row(*_cells(one), style="" if one.found else "bold red")
    return table


def _cells(one: Prey) -> tuple[str, ...]:
    lengths = [hunt.shrunk_length for hunt in one.hunts if hunt.shrunk_length is not None]
    laws = sorted(frozenset[str]().union(*(hunt.laws for hunt in one.hunts)))
    return (
        f"  {one.fault}",
        FAULTS[one.fault].source,
        *(_until(hunt) for hunt in one.hunts),
        str(max(lengths)) if lengths else "-",
        ", ".join(laws) or "-",
    )


def _until(hunt: Hunt) -> str:
    """Programs until found, and in how many hunts if not in all."""
    found = [number for number in hunt.programs if number is not None]
    number = "none" if hunt.median is None else f"{hunt.median:g}"
    every = len(found) == len(hunt.programs)
    return number if every else f"{number} ({len(found)}/{len(hunt.programs)})"


def verdict(missed: Sequence[str], total: int, seeds: int) -> Text:
    """Whether every fault was found, and how to read the table."""
    legend = (
        f"walker, machine: programs until found, median of {count(seeds, 'seed')}; "
        "ops: the longest shrunk program; laws: those seen broken."
    )
    if missed:
        return Text.assemble(
            f"{legend}\n", (f"Not found by every source: {', '.join(missed)}.", "bold red")
        )
    return Text.assemble(
        f"{legend}\n", (f"Every fault was found: {total} of {total}.", "bold green")
    )
