"""What the runs of a sweep have measured: losses by depth and rate, the best rates, a table
and a figure.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..cli.terminal import lines
from ..config import Config, read_option
from ..directory import histories, runs
from ..ranks import median
from . import several

#: Share of a run over whose last part the training loss is averaged.
LAST = 0.1


@dataclasses.dataclass(frozen=True)
class Point:
    """A run of a sweep.

    Args:
        depth: Number of layers; None if the sweep has only the recipe's depth.
        rate: Learning rate.
        seed: Seed.
        loss: Mean training loss over the last tenth of the run; None if it diverged.
        error: Error in percent after the last epoch, on held-out or test images; None if
            it was not measured or the run diverged.
        diverged_at: Iteration in which the loss became infinite or NaN; else None.
        seconds: Time of the run.
    """

    depth: int | None
    rate: float
    seed: int
    loss: float | None
    error: float | None = None
    diverged_at: int | None = None
    seconds: float | None = None


def measured(config: Config) -> Point:
    """Return what a run that has ended has measured."""
    run = several.directory(config)
    history = histories.read(run / "history.csv")
    place = depth_of(config), config.optimizer.learning_rate, config.seed
    seconds = float(history["seconds"][-1]) if history else None
    diverged_at = runs.diverged_at(run)
    if diverged_at is not None:
        return Point(*place, None, None, diverged_at, seconds)
    loss, error = final_loss(history), None
    if histories.measured(history, "val_accuracy"):
        error = 100 * (1 - float(history["val_accuracy"][-1]))
    return Point(*place, loss, error, None, seconds)


def depth_of(config: Config) -> int | None:
    """Return the option `depth` of a network."""
    return dict(map(read_option, config.model.options)).get("depth")


def size(config: Config) -> float:
    """Return what the time of a run is about proportional to: its depth."""
    return depth_of(config) or 1


def final_loss(history: histories.Columns) -> float:
    """Return the mean training loss over the last tenth of the iterations. history.csv has
    the mean of each epoch: an epoch counts with its iterations in this tenth.

    Example:

    >>> import numpy as np
    >>> losses, ends = np.array([9.0, 4.0, 1.0]), np.array([80, 95, 100])
    >>> round(final_loss({"loss": losses, "iteration": ends}), 6)
    2.5
    """
    ends = history["iteration"]
    begins = np.concatenate([[0], ends[:-1]])
    within = np.clip(ends - np.maximum(begins, (1 - LAST) * ends[-1]), 0, None)
    return float(np.average(history["loss"], weights=within))


def medians(points: Sequence[Point]) -> dict[int | None, dict[float, float]]:
    """Return the median loss over the seeds by depth and rate, both sorted; infinite if
    most runs diverged.
    """
    found: dict[int | None, dict[float, list[float | None]]] = {}
    for point in sorted(points, key=lambda point: (point.depth or 0, point.rate)):
        found.setdefault(point.depth, {}).setdefault(point.rate, []).append(point.loss)
    return {
        depth: {rate: median(losses) for rate, losses in of_rate.items()}
        for depth, of_rate in found.items()
    }


def best(losses: Mapping[float, float]) -> float | None:
    """Return the rate with the least loss; None if all runs diverged."""
    rate = min(losses, key=losses.__getitem__)
    return rate if math.isfinite(losses[rate]) else None


def table(points: Sequence[Point], form: Callable[..., str] = lines) -> str:
    """Return a table with a line per depth and a column per rate: median loss, median
    error in brackets, and a star at the best rate.
    """
    every = medians(points)
    rates = sorted({point.rate for point in points})
    rows = [["layers", *(f"rate {rate:g}" for rate in rates)]]
    for depth, losses in every.items():
        row = ["as the recipe" if depth is None else f"{depth:,}"]
        for rate in rates:
            here = [point for point in points if (point.depth, point.rate) == (depth, rate)]
            row.append(_cell(here) + " *" * (rate == best(losses)))
        rows.append(row)
    return form(rows)


def _cell(points: Sequence[Point]) -> str:
    if not points:
        return "-"
    loss = median([point.loss for point in points])
    if not math.isfinite(loss):
        return "diverged"
    errors = [point.error for point in points if point.error is not None]
    return f"{loss:.3g}" + (f" ({median(errors):.2f} %)" if errors else "")


def sentence(points: Sequence[Point]) -> str:
    """Return the best rates in words, and whether one of them is at the end of the grid.

    Example:

    >>> points = [Point(20, 0.1, 0, 0.5), Point(20, 0.2, 0, 0.3), Point(56, 0.2, 0, 0.4)]
    >>> print(sentence(points))
    Best rate: 0.2 at 20 layers, 0.2 at 56. Extend --rates above 0.2.
    """
    every = medians(points)
    rates = sorted({point.rate for point in points})
    found = {depth: best(losses) for depth, losses in every.items()}
    unit = " layers"
    texts = []
    for depth, rate in found.items():
        where = "" if depth is None else f" at {depth:,}{unit}"
        texts.append(f"none{where} (all runs diverged)" if rate is None else f"{rate:g}{where}")
        unit = ""
    text = f"Best rate: {', '.join(texts)}."
    several_rates = len(rates) > 1
    if None in found.values() or (several_rates and rates[0] in found.values()):
        text += f" Extend --rates below {rates[0]:g}."
    if several_rates and rates[-1] in found.values():
        text += f" Extend --rates above {rates[-1]:g}."
    return text


def figure(panels: Mapping[str, Sequence[Point]], title: str) -> Any:
    """Draw the median loss against the rate: a panel per title, a curve per depth, and a
    star at its best rate. With a single rate at known depths: the loss against the depth.

    Curves end where the training diverges.

    Raises:
        ImportError: without matplotlib.
    """
    from keras_preact.analysis.figures import style

    depths = sorted({point.depth or 0 for points in panels.values() for point in points})
    rates = sorted({point.rate for points in panels.values() for point in points})
    by_rate = len(rates) > 1 or depths == [0]
    looks = {depth: {"color": style.ordered(i, len(depths))} for i, depth in enumerate(depths)}
    drawn = style.new_figure(1.2 + 3.6 * max(1.6, len(panels)), 4.6)
    style.heading(drawn, title)
    row = drawn.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (name, points) in zip(row, panels.items(), strict=True):
        style.styled(axes, name, "Learning rate" if by_rate else "Layers")
        axes.set_xscale("log")
        every = medians(points)
        if not by_rate:
            losses = [of_rate[rates[0]] for of_rate in every.values()]
            _curve(axes, depths, losses, {"color": style.colour(0)})
        for depth, of_rate in every.items() if by_rate else ():
            _curve(axes, list(of_rate), list(of_rate.values()), looks[depth or 0])
            if (rate := best(of_rate)) is not None:
                star = {"marker": "*", "markersize": 14, "markeredgecolor": "white", "zorder": 4}
                axes.plot([rate], [of_rate[rate]], **star, **looks[depth or 0])
        ticks = rates if by_rate else depths
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45 * (len(ticks) > 6))
        axes.minorticks_off()
    style.decades(row[0], [_losses(points) for points in panels.values()])
    row[0].set_ylabel("Training loss, last tenth of the run", fontsize=style.LABEL)
    if by_rate:
        samples = {f"{depth:,} layers": style.sample(look) for depth, look in looks.items()}
        style.legend(drawn, samples)
    return drawn


def _losses(points: Sequence[Point]) -> list[float]:
    """Return all median losses."""
    return [loss for of_rate in medians(points).values() for loss in of_rate.values()]


def _curve(axes: Any, x: Sequence[float], losses: Sequence[float], look: Mapping) -> None:
    finite = np.where(np.isfinite(losses), losses, np.nan)
    axes.plot(x, finite, marker="o", markersize=3.5, linewidth=1.6, **look)
