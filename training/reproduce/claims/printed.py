"""Claims about numbers that the papers print."""

from collections.abc import Sequence
from typing import Any

import keras_preact as kp

from .finding import Finding, conditional, decided


def _error(table: str, row: str, network: str) -> float | None:
    """Return the published error of a row on CIFAR-10 in percent; None for "fail"."""
    [found] = [
        result for result in kp.published.results(table, network, "cifar10") if result.row == row
    ]
    return found.error


def _text(error: float | None) -> str:
    return "fail (over 20 %)" if error is None else f"{error:.2f} %"


def error(table: str, network: str, rows: dict[str, float], within: float = 0.005) -> Finding:
    """The rows of a table have these errors, in percent. It holds if all are at most
    `within` away.
    """
    printed = {row: _error(table, row, network) for row in rows}
    holds = all(
        error is not None and abs(error - rows[row]) <= within for row, error in printed.items()
    )
    listed = "; ".join(f"{row} {_text(error)}" for row, error in printed.items())
    return decided(holds, f"Table {table}, {network}: {listed}.", errors=list(printed.values()))


def fail(row: str, network: str = "ResNet-110", table: str = "1") -> Finding:
    """A row did not train. It holds if the paper prints "fail", an error over 20 %."""
    printed = _error(table, row, network)
    return decided(printed is None, f"Table {table}, {network}: {row} {_text(printed)}.")


def fails_if(rows: Sequence[str], others: Sequence[str], condition: str) -> Finding:
    """Rows of Table 1 did not train. It holds for the rows that are printed as "fail"."""
    there, elsewhere = (
        {row: _error("1", row, "ResNet-110") for row in each} for each in (rows, others)
    )
    listed = "; ".join(f"{row} {_text(error)}" for row, error in (there | elsewhere).items())
    return conditional(
        condition,
        all(error is None for error in there.values()),
        all(error is None for error in elsewhere.values()),
        f"Table 1, ResNet-110: {listed}.",
    )


def has_row(arrangement: str) -> Finding:
    """An arrangement has an error in Table 2. It holds if the table has such a row."""
    rows = dict.fromkeys(result.row for result in kp.published.results(table="2"))
    return decided(arrangement in rows, f"The rows of Table 2: {', '.join(rows)}.")


def gains(claimed: dict[str, float]) -> Finding:
    """Pre-activation lowers the errors of networks by so many percentage points. It holds
    if Table 3 says so, to 0.005.
    """
    printed = _gains(list(claimed))
    holds = all(abs(printed[name] - gain) <= 0.005 for name, gain in claimed.items())
    listed = ", ".join(f"{name} {gain:.2f}" for name, gain in printed.items())
    return decided(holds, f"Table 3: {listed}.", gains=printed)


def gain_grows(networks: Sequence[str]) -> Finding:
    """Deeper networks gain more. It holds if the differences in Table 3 increase."""
    printed = list(_gains(networks).values())
    listed = ", ".join(f"{gain:.2f}" for gain in printed)
    return decided(
        printed == sorted(printed),
        f"Table 3: {', '.join(networks)} gain {listed} percentage points.",
        gains=printed,
    )


def _gains(networks: Sequence[str]) -> dict[str, float]:
    def gain(network: str) -> float:
        before, after = (_error("3", row, network) for row in ("original", "full_preactivation"))
        assert before is not None
        assert after is not None
        return round(before - after, 2)

    return {network: gain(network) for network in networks}


def imagenet() -> Finding:
    """Pre-activation is better on ImageNet. It holds if it has the lower top-1 error at
    every depth of Table 5, tested at 320 pixels.
    """
    errors: dict[str, list[float]] = {}
    for network in ("ResNet-152", "ResNet-200"):
        for arrangement in ("original", "full_preactivation"):
            found = [
                result.error
                for result in kp.published.results("5", network)
                if result.row == f"{arrangement}, tested at 320" and "aspect" not in result.remark
            ]
            errors.setdefault(network, []).append(found[0] or 0.0)
    listed = "; ".join(f"{name} {a:.1f} to {b:.1f} %" for name, (a, b) in errors.items())
    return decided(all(b < a for a, b in errors.values()), f"Table 5: {listed}.", errors=errors)


def parameters(network: str, millions: float) -> Finding:
    """A network has about so many million parameters. It holds within 5 %."""
    count = kp.published.PARAMETER_COUNTS[network].trainable
    holds = abs(count / 1e6 - millions) <= 0.05 * millions
    return decided(holds, f"{network} has {count:,} trained parameters.", count=count)


def arrangement(
    name: str,
    first: Sequence[str] = (),
    between: Sequence[str] = (),
    last: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Finding:
    """An arrangement has this order. It holds if Fig. 4 has the same."""
    row = kp.ARRANGEMENTS[name]
    words: dict[str, Any] = {"norm": "BN", "activation": "ReLU"}
    holds = (row.first, row.between, row.last, row.after_addition) == tuple(
        tuple(part) for part in (first, between, last, after)
    )
    order = [*row.first, "W", *row.between, "W", *row.last]
    text = " ".join(words.get(part, part) for part in order)
    f = " ".join(words[part] for part in row.after_addition) or "nothing"
    return decided(holds, f"Fig. 4: F is {text}; after the addition: {f}.")


def units_per_stage(depth: int, units: int) -> Finding:
    """Each stage has so many units. It holds for the network of this depth on CIFAR."""
    stages = (depth - 2) // 9
    return decided(
        stages == units,
        f"ResNet-{depth} has 3 stages of {stages} bottlenecks: 9 x {stages} + 2 layers.",
        units=stages,
    )
