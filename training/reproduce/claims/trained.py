"""Claims about trained networks: the committed results decide."""

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...ranks import LEVEL, difference, median, rank_test, spread
from .. import rates, results
from ..results import Record
from ..rows import TABLES
from .finding import Finding, decided

#: A network has learned if its test error is below this, in percent: the paper's "fail".
FAIL = 20.0
#: So many runs that do not learn show that a network does not learn.
ENOUGH = 3


@functools.cache
def _groups(folder: Path) -> Mapping[str, list[Record]]:
    return results.groups(results.read(folder))


def _test_error(record: Record) -> float | None:
    return record.error


def _training_loss(record: Record) -> float | None:
    return record.final["train_loss"]


def _early_loss(record: Record) -> float | None:
    """Return the training loss after a quarter of the iterations, or None if the run
    diverged.
    """
    if record.diverged_at is not None:
        return None
    iterations = record.curves["iteration"]
    quarter = bisect.bisect_left(iterations, iterations[-1] / 4)
    return float(record.curves["train_loss"][quarter])


#: What a claim about runs is about: its words, its value in a run and the format.
FIGURES: Mapping[str, tuple[str, Callable[[Record], float | None], str]] = {
    "test error": ("Test errors in percent", _test_error, ".2f"),
    "training loss": ("Training losses at the end", _training_loss, ".3f"),
    "early loss": ("Training losses after a quarter of the iterations", _early_loss, ".3f"),
}


def _values(folder: Path, trial: str, figure: str = "test error") -> list[float | None]:
    """Return a figure of the largest group of runs of a trial on one device."""
    _, value, _ = FIGURES[figure]
    return [value(record) for record in results.largest(_groups(folder).get(trial, []))]


def _labels(trials: Sequence[str]) -> list[str]:
    """Return the labels of trials, from the first table that has all of them if there is
    one.
    """
    known: dict[str, str] = {}
    for table in TABLES.values():
        labels = {row.trial.name: row.label for row in table.rows}
        if labels.keys() >= set(trials):
            return [labels[trial] for trial in trials]
        known = labels | known
    return [known[trial] for trial in trials]


def _about(folder: Path, trials: Sequence[str], figure: str = "test error") -> str:
    """Return a figure of trials, with the range and the number of runs."""
    words, _, digits = FIGURES[figure]
    where = "CIFAR-10" if trials[0].startswith("cifar10") else "digits"
    rows = []
    for trial, label in zip(trials, _labels(trials), strict=True):
        values = _values(folder, trial, figure)
        shown = f"{spread(values, digits)}, n = {len(values)}" if values else "not measured"
        rows.append(f"{label}: {shown}")
    return f"{words} on {where}. {'; '.join(rows)}."


def higher(folder: Path, row: str, than: str, figure: str = "test error") -> Finding:
    """A row has higher test errors than another one, or higher values of another figure. The
    rank test decides; it is not clear if the test does not tell them apart.
    """
    sign = difference(_values(folder, row, figure), _values(folder, than, figure))
    text = _about(folder, [row, than], figure)
    return decided(sign > 0, text) if sign else _undecided(folder, [row, than], text)


def regularises(folder: Path, row: str, than: str) -> Finding:
    """A row ends with higher training losses and lower test errors than another one. It is
    false if the rank test finds the opposite for one of them.
    """
    parts = [higher(folder, row, than, "training loss"), higher(folder, than, row)]
    return _all_hold(parts, " ".join(part.text for part in parts))


def similar(folder: Path, row: str, other: str, within: float) -> Finding:
    """Two rows have similar test errors: the rank test shows that they differ by less than
    `within` percentage points in both directions, each at the level of the other tests. It is
    false if they differ otherwise. That no difference is seen shows nothing.
    """
    errors, others = _values(folder, row), _values(folder, other)
    text = f"{_about(folder, [row, other])} Similar: within {within:g} percentage points."
    if _is_lower(errors, others, within) and _is_lower(others, errors, within):
        return decided(True, text)
    if difference(errors, others):
        return decided(False, text)
    return _undecided(folder, [row, other], text)


def _is_lower(
    errors: Sequence[float | None], others: Sequence[float | None], margin: float
) -> bool:
    """Whether errors are significantly lower than others plus a margin, in a one-sided test."""
    raised = [None if error is None else error + margin for error in others]
    sign, chance = rank_test(errors, raised)
    return sign < 0 and chance / 2 < LEVEL


def any_harms(folder: Path, rows: Sequence[str], than: str) -> Finding:
    """Each of these rows is worse than another one. By the rank test, it is true if all have
    higher errors, and false if one has lower errors. For the latter, the level of the test
    is divided by the number of rows: of many rows, one may look lower by chance.
    """
    found = {row: rank_test(_values(folder, row), _values(folder, than)) for row in rows}
    lower = [row for row, (sign, p) in found.items() if sign < 0 and p < LEVEL / len(rows)]
    unclear = [row for row, (sign, p) in found.items() if sign < 1 or p >= LEVEL]
    text = _about(folder, [than, *(lower or unclear or rows)])
    if lower or not unclear:
        return decided(not lower, text)
    return _undecided(folder, [than, *rows], text)


def learns(folder: Path, trial: str) -> Finding:
    """A network can be trained. It holds if the test error of a run is below 20 %, the
    paper's "fail", and is false if no run of at least `ENOUGH` gets there.
    """
    return _trained(folder, trial, claimed=True)


def fails(folder: Path, trial: str) -> Finding:
    """A network cannot be trained: the opposite of `learns`."""
    return _trained(folder, trial, claimed=False)


def limit(folder: Path, up_to: str, beyond: str) -> Finding:
    """Networks of a kind can be trained up to a depth, and not beyond it: `learns` holds for
    a network of this depth, and `fails` for a deeper one.
    """
    parts = [learns(folder, up_to), fails(folder, beyond)]
    return _all_hold(parts, _about(folder, [up_to, beyond]))


def _trained(folder: Path, trial: str, claimed: bool) -> Finding:
    errors, text = _values(folder, trial), _about(folder, [trial])
    learned = any(error is not None and error < FAIL for error in errors)
    is_known = learned or len(errors) >= ENOUGH
    return decided(learned is claimed, text) if is_known else _undecided(folder, [trial], text)


def _undecided(folder: Path, trials: Sequence[str], text: str) -> Finding:
    """Return the finding of a claim that the runs of these trials do not decide."""
    is_measured = all(_values(folder, trial) for trial in trials)
    return Finding("not clear" if is_measured else "unmeasured", text)


def _all_hold(parts: Sequence[Finding], text: str) -> Finding:
    """Return whether all parts of a claim are true. A false part decides. Otherwise a part
    decides nothing if it is not clear or not measured.
    """
    verdicts = [part.verdict for part in parts]
    for open_verdict in ("unmeasured", "not clear"):
        if open_verdict in verdicts and "false" not in verdicts:
            return Finding(open_verdict, text)
    return decided("false" not in verdicts, text)


def gain_grows(folder: Path, pairs: Sequence[Sequence[str]]) -> Finding:
    """Deeper networks gain more. It holds if the differences of the median test errors
    increase from pair to pair; each is the original and the improved network.
    """
    errors = [[_values(folder, trial) for trial in pair] for pair in pairs]
    if not all(each for pair in errors for each in pair):
        return Finding("unmeasured", _about(folder, [trial for pair in pairs for trial in pair]))
    gains = [median(before) - median(after) for before, after in errors]
    listed = "; ".join(
        f"{_labels([pair[1]])[0]}: {gain:.2f}" for pair, gain in zip(pairs, gains, strict=True)
    )
    text = f"Gains in percentage points on digits. {listed}."
    if min(len(each) for pair in errors for each in pair) < ENOUGH:
        return Finding("not clear", f"{text} A row has fewer than {ENOUGH} runs.")
    return decided(gains == sorted(gains), text, gains=gains)


def rate(folder: Path, low: float, high: float, least: int = 0, most: float = math.inf) -> Finding:
    """The best learning rate of networks of `least` to `most` layers is in this range. It
    holds if it is so at each measured depth, up to the step of the measured rates, 2.
    """
    best = {
        record["layers"]: rates.best_rate(record)
        for record in rates.read(folder)
        if record["network"] == "preact" and least <= record["layers"] < most
    }
    if not best:
        return Finding("unmeasured", "No network of this depth was measured.")
    listed = ", ".join(f"{rate or math.nan:g} at {layers} layers" for layers, rate in best.items())
    holds = all(rate and low / 2 <= rate <= high * 2 for rate in best.values())
    return decided(holds, f"Best of 8 rates, digits: {listed}.", best=best)
