"""The command line: `kvcore verify`, `replay`, `shrink`, `faults`, `soak`, `bench`, `translate` and
`targets`.

Each command takes its options apart, has the work done elsewhere, and returns an exit status: 0
clean, 1 a law broke or a goal was missed, 2 bad usage or input, 3 the harness itself failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvcore.reports import benching, edge, hunting, recording, replaying, soaking, verifying
from kvcore.reports.edge import Status
from kvcore.reports.layout import new_table, output
from kvcore.reports.trace_files import DEFAULT_DIRECTORY, read_trace
from kvcore.strategies.scheduler import CHUNK_TOKENS, Policy
from kvcore.targets.registry import list_targets

app = typer.Typer(
    name="kvcore",
    help="Verifies KV-cache allocators: every interleaving that callers may produce, every law.",
    epilog="Exit status: 0 clean, 1 a law broke or a goal was missed, 2 bad usage or input, 3 the "
    "harness failed.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

TargetOption = Annotated[
    str, typer.Option("--target", metavar="NAME", help="What is on trial; see `kvcore targets`.")
]
OtherTarget = Annotated[
    str | None,
    typer.Option("--target", metavar="NAME", help="Another target than the one in the trace."),
]
TraceArgument = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A trace file.", show_default=False)
]


@app.command()
def verify(
    target: TargetOption = "kvcore",
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="How long: dev, ci or nightly.")
    ] = "ci",
    page_size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="Slots a page; may be repeated. 1, 2, 4, 16 if left out, of a release 1, 4. "
            "Compressed HiSparse has multiples of 4 only.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Where random choices start.")] = 0,
    time_budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Such as 45, 30s, 2m, 1h; the profile's if left out."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes; as many as there are CPUs if left out."),
    ] = None,
    traces: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the traces of findings are written.")
    ] = DEFAULT_DIRECTORY,
) -> Status:
    """Put a target on trial and show what breaks.

    Each finding is shrunk, saved as a trace and shown.
    """
    plan = verifying.make_plan(target, profile, tuple(page_size or ()), seed, time_budget, workers)
    return verifying.run(plan, traces)


@app.command()
def replay(
    trace: TraceArgument,
    target: OtherTarget = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Show the state after op N, counted from 0.", min=0),
    ] = None,
) -> Status:
    """Play a trace again and show what breaks."""
    return replaying.replay(read_trace(trace), trace, target, step)


@app.command()
def shrink(
    trace: TraceArgument,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="OUT", help="Where to write.", show_default=False),
    ],
    target: OtherTarget = None,
) -> Status:
    """Make a failing trace as short as it gets."""
    return replaying.shrink_to(read_trace(trace), out, target)


@app.command()
def faults(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="FAULT", help="Only these.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Hunts for each fault and source.")] = 5,
    traces: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write the shortest program of each fault."),
    ] = None,
) -> Status:
    """Hunt the known faults; tell how soon each is found.

    Layers: A allocators, P pools, C prefix caches, M memory saver, H HiSparse.
    """
    return hunting.run(names or [], edge.at_least(1, seeds, "--seeds"), traces)


@app.command()
def soak(
    workload: Annotated[
        Path,
        typer.Argument(
            metavar="WORKLOAD",
            help="Requests as JSON Lines in the Mooncake format, or a .csv file of input_length "
            "and output_length.",
            show_default=False,
        ),
    ],
    target: TargetOption = "kvcore",
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="Only the first N requests.")
    ] = None,
    geometry: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=N,...",
            help="Other pools: page_size, full_pages, swa_pages, requests, window, context.",
        ),
    ] = None,
    check_every: Annotated[int, typer.Option(metavar="N", help="Ops between checks.")] = 50,
    arrivals: Annotated[
        str,
        typer.Option(metavar="HOW", help="asap, or timestamps: paced by a virtual clock."),
    ] = "asap",
    chunk: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a prompt that join one prefill batch.")
    ] = CHUNK_TOKENS,
    seed: Annotated[int, typer.Option(metavar="S", help="Decides ties, and who is backed up.")] = 0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the report as JSON.")
    ] = None,
    traces: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the trace of a violation is written.")
    ] = DEFAULT_DIRECTORY,
) -> Status:
    """Serve a recorded workload through a target.

    Prefix cache, chunked prefill, retraction: what a server does, with the laws checked throughout.
    """
    policy = Policy(soaking.parse_arrivals(arrivals), seed, chunk)
    plan = soaking.make_plan(workload, target, requests, geometry, check_every, policy)
    return soaking.run(plan, json, traces)


@app.command()
def bench(
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="sglang:DIR",
            help="A released engine to compare with; may be repeated. Without it these comparisons "
            "are left out.",
        ),
    ] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this one; may be repeated. operations, groups, growth, counts, capture, "
            "harness, recorder.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare with the goals: status 1 where one is missed, but not where one is not "
            "measured.",
        ),
    ] = False,
    goals: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Other goals, in TOML, than those of this version."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the report as JSON.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Few samples and small pools: whether it runs, not how fast."),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="S", help="Decides the order of samples.")] = 0,
) -> Status:
    """Measure the allocators and the harness.

    Ratios, counts and exponents, against released engines and against itself; a control first.
    """
    errand = benching.make_errand(
        against or (), section or (), goals, seed, check=check, quick=quick
    )
    return benching.run(errand, json)


@app.command()
def translate(
    raw: Annotated[
        Path, typer.Argument(metavar="RAW", help="A raw recording.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="OUT", help="Where to write; RAW without .raw."),
    ] = None,
) -> Status:
    """Make a trace of a recorded allocator's calls.

    For recordings that were not closed, as when the process died: see docs/recording.md.
    """
    return recording.run(raw, out)


@app.command()
def targets() -> Status:
    """List what can be put on trial."""
    table = new_table()
    table.add_column("target", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for pattern, sentence in list_targets():
        table.add_row(Text(pattern), Text(sentence))
    output().print(table)
    return Status.CLEAN


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    # Without a command there is nothing to be wrong about yet: show what there is.
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    return edge.run_edge(lambda: app(given, prog_name="kvcore", standalone_mode=False))
