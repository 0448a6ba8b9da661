"""``loadmaster bench scope``: thread teams of several ranks against each other, and what the scope does about it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.cli.options import JsonOption, QuietOption, print_json
from loadmaster.errors import InputError

if TYPE_CHECKING:
    from loadmaster.bench.record import ArmResult, BenchRecord

__all__ = ["bench_scope"]


def bench_scope(
    ranks: Annotated[str, typer.Option("--ranks", help="Numbers of ranks, separated by commas.")] = "2,4,8",
    copy_bytes: Annotated[int, typer.Option("--copy-bytes", min=1, help="Size of each copy.")] = 400_000,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="Copying of each arm, each time.")] = 0.5,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Repetitions of each arm, interleaved.")] = 5,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure copies of many ranks at once, a raise of one rank, and the cost of the scope itself."""
    from loadmaster.bench.scope import bench_scope as measure

    record = measure(
        _numbers(ranks),
        copy_bytes=copy_bytes,
        seconds=seconds,
        repeat=repeat,
        on_step=None if quiet or as_json else lambda step: print(f"measuring {step}", file=sys.stderr),
    )
    if as_json:
        print_json(record.as_dict())
    else:
        _print_record(record)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(number < 1 for number in numbers):
        raise InputError(f"--ranks must be whole numbers of at least 1, separated by commas, not {text!r}")
    return numbers


def _print_record(record: BenchRecord) -> None:
    from loadmaster.bench.scope import AS_SHIPPED, SCOPE
    from loadmaster.cli.tables import print_table, report_console

    console = report_console()
    by_name = {arm.name: arm for arm in record.arms}
    rows = [
        [
            arm.name,
            f"{1e6 * arm.median:.1f}",
            f"{1e6 * min(arm.seconds):.1f}",
            f"{1e6 * max(arm.seconds):.1f}",
            _times_as_fast(arm, by_name),
        ]
        for arm in record.arms
    ]
    print_table(console, ("arm", "median us", "min", "max", "x as\nshipped"), rows)
    for ranks in record.settings["ranks"]:
        arms = {name.partition(", ")[2]: arm for name, arm in by_name.items() if name.startswith(f"{ranks} ranks, ")}
        shipped, scope = arms.pop(AS_SHIPPED), arms.pop(SCOPE)
        name, best = min(arms.items(), key=lambda row: row[1].median)
        console.print(
            f"{ranks} rank{'s' * (ranks > 1)}: the scope is {shipped.median / scope.median:.1f} times as fast as torch "
            f"as shipped, and takes {scope.median / best.median:.2f} of the time of the best fixed count, {name}",
            soft_wrap=True,
        )


def _times_as_fast(arm: ArmResult, by_name: dict[str, ArmResult]) -> str:
    from loadmaster.bench.scope import AS_SHIPPED

    group = arm.name.partition(", ")[0]
    base = by_name.get(f"{group}, {AS_SHIPPED}") or by_name.get(f"{group} at OMP_NUM_THREADS=1")
    return "" if base is None else f"{base.median / arm.median:.1f}"
