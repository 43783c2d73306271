"""What to measure next: `keras-preact reproduce next` prints it, `plan` writes it to
results/QUEUE.md.
"""

from collections.abc import Sequence
from pathlib import Path

from .. import backends, cli, runs
from ..terminal import duration, markdown
from . import results
from .priorities import Missing, costs, expected, grouped, missing, next_run
from .results import RESULTS, SEEDS, WORK, Record

#: Number of missing runs with a line of their own in QUEUE.md.
LINES = 20


def next_(
    minutes: float | None = None,
    output: Path = RESULTS,
    work: Path = WORK,
    device: str | None = None,
) -> None:
    """Print the most valuable missing run and its command.

    Args:
        minutes: Minutes of the device that are available. None: no limit.
        output: Folder of finished runs.
        work: Folder of unfinished runs.
        device: Name of the accelerator as in the results. None: that of this machine.

    Raises:
        UserError: for minutes that are not positive, or a file that is not a run.
    """
    if minutes is not None and not minutes > 0:
        raise cli.UserError(f"--minutes must be positive. Received: {minutes}")
    device = device or backends.device()
    records, items = _read(output, work)
    known = costs(records, device)
    item = next_run(minutes, items, known)
    if item is None:
        print(f"Nothing is missing: every row has {SEEDS} runs.")
        return
    time = expected(item, known)
    begun = f", {item.done:,} of {item.total:,} iterations done" if item.done else ""
    print(
        f"{item.trial.name}, seed {item.seed} ({item.group.title}{begun}): {_about(time, device)}."
    )
    if minutes is not None and time is not None and time > minutes:
        print(
            f"No missing run fits into {minutes:g} minutes. Start this one; the same command "
            "resumes it."
        )
    print(item.command(minutes))


def plan(output: Path = RESULTS, work: Path = WORK) -> None:
    """Write QUEUE.md: what is measured of the paper's tables, and which runs come next.

    Args:
        output: Folder of finished runs.
        work: Folder of unfinished runs.

    Raises:
        UserError: for a file that is not a run.
    """
    records, items = _read(output, work)
    text = page(records, items)
    output.mkdir(parents=True, exist_ok=True)
    with runs.replacing(output / "QUEUE.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"{text}\nWritten: {output / 'QUEUE.md'}")


def _read(output: Path, work: Path) -> tuple[list[Record], list[Missing]]:
    from .run import unfinished

    records = results.read(output)
    return records, missing({(record.trial, record.seed) for record in records}, unfinished(work))


def _about(minutes: float | None, device: str) -> str:
    if minutes is None:
        return f"the time on {device} is not known, it has no run yet"
    return f"about {_time([minutes])} of {device}"


def _time(minutes: Sequence[float | None]) -> str:
    """Return the sum in words."""
    return duration(60 * sum(each or 0.0 for each in minutes))


def page(records: Sequence[Record], items: Sequence[Missing]) -> str:
    """Return the text of QUEUE.md."""
    devices = sorted(
        {record.device["name"] for record in records if costs([record], record.device["name"])}
    )
    known = {device: costs(records, device) for device in devices}
    headings = [f"time on {device}" for device in devices]
    made: dict[str, int] = {}
    for record in records:
        made[record.trial] = made.get(record.trial, 0) + (record.seed < SEEDS)
    state = [
        [
            "group",
            "row",
            "runs",
            "unfinished",
            *(f"{heading}, for all missing runs" for heading in headings),
        ]
    ]
    for group, trials in grouped():
        for trial in trials:
            own = [item for item in items if item.trial == trial]
            begun = (
                ", ".join(
                    f"seed {item.seed}: {item.done / item.total:.0%}" for item in own if item.done
                )
                or "-"
            )
            left = [_time([expected(item, known[device]) for item in own]) for device in devices]
            state.append(
                [group.title, trial.name, f"{made.get(trial.name, 0)} of {SEEDS}", begun, *left]
            )
    first = [["", "row", "seed", *headings, "command"]]
    for number, item in enumerate(items[:LINES], 1):
        times = [_time([expected(item, known[device])]) for device in devices]
        first.append([f"{number}", item.trial.name, f"{item.seed}", *times, f"`{item.command()}`"])
    total = SEEDS * sum(len(trials) for _, trials in grouped())
    command = cli.command("reproduce")
    parts = [
        "# What to measure next",
        f"`{command} plan` writes this page from the files in this folder. {total - len(items)} "
        f"of {total} runs are finished.",
        _TIMES
        if devices
        else "The time of a run is not known: there is no run on an accelerator yet.",
        "With `--device-minutes` a run stops in time and is saved; the same command resumes it. "
        f"`{command} next --minutes 30` names the first run that fits.",
        "## Next runs",
        markdown(first) if items else f"None: every row has {SEEDS} runs.",
        *(
            [f"{len(items) - LINES} more follow, in the order of the groups below."]
            if len(items) > LINES
            else []
        ),
        "## Rows",
        markdown(state),
    ]
    return "\n\n".join(parts) + "\n"


_TIMES = (
    "Expected times are for the remaining iterations, without compilation. The time per image is "
    "that of the row's own runs on the device, or that of the nearest row, scaled by layers "
    "times channels. Shortcuts and arrangements are assumed to cost the same."
)
