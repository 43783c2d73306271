"""The look of every figure: colours for light and dark pages, axes, and names of lines.

Figures are objects without global state.
"""

import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from keras_preact.analysis import _optional


class Hue(NamedTuple):
    """A colour of lines on a white page, of text there, and of both on a dark page."""

    line: str
    text: str
    dark: str


#: Colours that colour-blind readers can tell apart: those of Okabe and Ito
#: (https://jfly.uni-koeln.de/color/) without the light yellow. Text is darker and dark pages have
#: brighter ones, for a contrast of 4.5.
HUES = (
    Hue("#0072B2", "#0072B2", "#4AA8E8"),
    Hue("#D55E00", "#B84F00", "#F58A3C"),
    Hue("#009E73", "#007A58", "#2FC79C"),
    Hue("#CC79A7", "#A8517F", "#E29AC2"),
    Hue("#E69F00", "#8F6200", "#F2BE4E"),
    Hue("#56B4E9", "#1F76A8", "#A3DAF8"),
    Hue("#1C1C1C", "#1C1C1C", "#E6E6E6"),
)
COLOURS = tuple(hue.line for hue in HUES)
#: Dashes of the lines after the last colour is used.
DASHES = ("-", "--", ":", "-.")

INK = "#1C1C1C"
GREY = "#5E5E5E"
LINE = "#B8B8B8"
GRID = "#E4E4E4"
EDGE = "#4A4A4A"
#: Insides of boxes, pale enough for text in `INK`.
BLUE, ORANGE, GREEN, PINK, PALE = "#D7E8F5", "#FBE2D0", "#D5EFE4", "#F6E3EF", "#F3F3F3"
#: Colour on a white page to that on a dark one. Any other colour is the same on both.
DARK: Mapping[str, str] = MappingProxyType(
    {colour: hue.dark for hue in HUES for colour in (hue.line, hue.text)}
    | {GREY: "#A9ACB2", LINE: "#62666E", GRID: "#3A3E46", EDGE: "#8E939B"}
    | {BLUE: "#1F405C", ORANGE: "#5C3517", GREEN: "#17493A", PINK: "#512B47", PALE: "#363A42"}
)

#: Sizes of text in points, for figures 7 inches wide: legible at half their size.
TITLE, LABEL, TICK, SMALL = 13, 12, 11, 10
#: Mean width and height of a character, relative to its size.
CHARACTER_WIDTH, CHARACTER_HEIGHT = 0.52, 1.25
#: An axis is logarithmic if its values span more than the first ratio. Below the second, its
#: numbers are written without powers of ten.
DECADE, FEW_DECADES = 10.0, 2e3
#: Lines are named at their ends if there are at most this many, their names have at most this many
#: characters, and no name is moved by more lines of text. Else there is a legend.
FEW, SHORT, FAR = 6, 24, 1.6


def new_figure(width: float = 7.0, height: float = 4.2) -> Any:
    """Return an empty figure of this size in inches.

    Raises:
        ImportError: without matplotlib.
    """
    layout = _optional.load("matplotlib.layout_engine").ConstrainedLayoutEngine(
        w_pad=0.08, h_pad=0.06
    )
    figure = _optional.load("matplotlib.figure").Figure(figsize=(width, height), layout=layout)
    _optional.load("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def svg(figure, dark: bool = False) -> str:
    """Return a figure as SVG on a transparent background, the same text each time.

    Args:
        figure: A figure in the colours of this module.
        dark: Whether it is for a dark page: see `darkened`.
    """
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "keras-preact"}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = buffer.getvalue().decode()
    return darkened(text) if dark else text


def darkened(svg: str) -> str:
    """Return the text of an SVG file with the colours of a dark page: see `DARK`.

    Source of the contrasts: WCAG 2.2, success criteria 1.4.3 and 1.4.11.
    """
    counterparts = {light.lower(): dark.lower() for light, dark in DARK.items()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda colour: counterparts.get(colour[0], colour[0]), svg)


def styled(axes, title: str = "", x: str = "", y: str = "") -> Any:
    """Give axes a title, labels and a light grid, without a frame; return them."""
    set_title(axes, title)
    axes.set_xlabel(x, fontsize=LABEL, color=INK)
    axes.set_ylabel(y, fontsize=LABEL, color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(which="both", colors=GREY, labelcolor=INK, labelsize=TICK)
    return axes


def set_title(axes, title: str) -> None:
    """Set the title above the left end of axes, wrapped to their width."""
    place = axes.get_subplotspec()
    share = len(place.colspan) / place.get_gridspec().ncols if place else 1.0
    width = 72 * (share * axes.figure.bbox.width / axes.figure.dpi - 0.9)  # of a subfigure too
    axes.set_title(_wrapped(title, width), loc="left", fontsize=TITLE, color=INK)


def heading(figure, title: str) -> None:
    """Set the title of a figure with several axes."""
    if title:
        text = _wrapped(title, 72 * (figure.get_figwidth() - 0.3))
        figure.suptitle(text, x=0.012, ha="left", fontsize=TITLE, color=INK)


def _wrapped(title: str, points: float) -> str:
    columns = max(12, int(points / (CHARACTER_WIDTH * TITLE)))
    return textwrap.fill(title, columns, break_long_words=False)


def lines(axes, series: Mapping[str, tuple[Any, Any]], **settings) -> None:
    """Draw one line per label, `(x, y)`. A line of few points has a marker at each."""
    for i, (label, (x, y)) in enumerate(series.items()):
        marker: dict[str, Any] = {"marker": "o", "markersize": 3.5} if len(x) <= 30 else {}
        axes.plot(x, y, label=label, **(look(i) | marker | settings))


def look(i: int) -> dict[str, Any]:
    """Return how line number i of a figure is drawn."""
    dashes = DASHES[i // len(COLOURS) % len(DASHES)]
    return {"color": colour(i), "linestyle": dashes, "linewidth": 1.8}


def colour(i: int) -> str:
    """Return the colour of line number i of a figure."""
    return COLOURS[i % len(COLOURS)]


def text_colour(line: str) -> str:
    """Return the colour of text about a line of this colour."""
    return next((hue.text for hue in HUES if hue.line.lower() == line.lower()), line)


class Panel(NamedTuple):
    """Axes of a figure by depth.

    Args:
        title: What the lines show.
        label: Label of the vertical axis.
        series: Name of a line to its values, one per unit or depth.
        units: Names of the units, for marking the stages; empty for no marks.
        gaps: Whether NaN interrupts a line.
        percent: Whether the values are shares of 1, to be labelled in percent.
        limits: Ends of a linear axis; None: see `decades`.
    """

    title: str
    label: str
    series: Mapping[str, np.ndarray]
    units: Sequence[str] = ()
    gaps: bool = True
    percent: bool = False
    limits: tuple[float, float] | None = None


def depth_figure(
    panels: Sequence[Panel],
    depth: str,
    width: float = 7.0,
    height: float = 4.2,
    *,
    sharey: bool = False,
    **settings,
) -> tuple[Any, Sequence[Any]]:
    """Draw panels one above the other; a line with the same name looks the same in all.

    Args:
        panels: What to draw.
        depth: Label of the horizontal axis.
        width, height: Size in inches.
        sharey: Whether the vertical axes are equal.
        **settings: Further looks of the lines, as in `lines`.

    Returns:
        The figure and its axes, whose lines are still to be named: see `name_lines`.
    """
    figure = new_figure(width, height)
    every = figure.subplots(len(panels), 1, sharex=True, sharey=sharey, squeeze=False)[:, 0]
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    for axes, panel in zip(every, panels, strict=True):
        styled(axes, panel.title, depth if axes is every[-1] else "", panel.label)
        for name, values in panel.series.items():
            x = np.arange(len(values)) if panel.gaps else np.flatnonzero(~np.isnan(values))
            lines(axes, {name: (x, values[x])}, **look(names.index(name)) | settings)
        if panel.limits is None:
            decades(axes, panel.series.values())
        else:
            axes.set_ylim(*panel.limits)
        if panel.percent:
            shares(axes.yaxis)
        stages(axes, panel.units)
        by_depth(axes)
    return figure, every


def by_depth(axes) -> None:
    """Mark only whole numbers on the horizontal axis: those of units or epochs."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.margins(x=0.02)


def stages(axes, units: Sequence[str]) -> None:
    """Mark the start of each stage, if the units are named as in `stage2_unit1`."""
    names = [name.split("_")[0] for name in units]
    if not names or not all(name.startswith("stage") for name in names):
        return
    # The stages' names stand between the axes and the title.
    axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=TITLE, color=INK, pad=18)
    # The axes may have no value to draw.
    axes.update_datalim([(0, 0), (len(names) - 1, 0)], updatey=False)
    for i, (before, name) in enumerate(zip(["", *names], names, strict=False)):
        if name == before:
            continue
        if i:
            axes.axvline(i, color=LINE, linewidth=0.8, zorder=1)
        is_last = i > 0.9 * (len(names) - 1)
        text = axes.annotate(
            name.replace("stage", "stage "),
            (i, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-2, 1) if is_last else (2, 1),
            textcoords="offset points",
            ha="right" if is_last else "left",
            va="bottom",
            fontsize=SMALL,
            color=GREY,
        )
        text.set_in_layout(False)  # the title leaves it room


def decades(axes, values: Iterable) -> None:
    """Make the vertical axis logarithmic if the values span more than a decade. It then
    shows only positive values.
    """
    flat = np.concatenate([np.ravel(each) for each in values] or [np.zeros(0)])
    positive = flat[np.isfinite(flat) & (flat > 0)]
    if positive.size and positive.max() / positive.min() > DECADE:
        logarithmic(axes)


def logarithmic(axes) -> None:
    """Make the vertical axis logarithmic; values that are not positive are not shown."""
    axes.set_yscale("log", nonpositive="mask")
    plain_numbers(axes.yaxis)


def plain_numbers(axis) -> None:
    """Label a logarithmic axis of few decades with 0.5, 1, 2 instead of powers of ten;
    a horizontal one with fewer numbers.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if high / low < FEW_DECADES:
        dense = high / low < (FEW_DECADES if axis.axis_name == "y" else 200)
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if dense else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def shares(axis) -> None:
    """Label shares of 1 as percentages, without a sign: the axis label has it."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))


def name_lines(figure, *panels) -> None:
    """Name the lines: at their ends if they are few and end apart, else in one legend
    below everything. A single line has no name.

    Args:
        figure: The figure of the axes.
        panels: Axes with their final scales and limits. Lines with one label have one
            look in all of them.
    """
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if len(handles) < 2:
        return
    if len(handles) <= FEW and max(map(len, handles)) <= SHORT:
        figure.draw_without_rendering()  # the layout decides where the ends are
        ends = {axes: _ends(axes) for axes in panels}
        if handles.keys() == {line.get_label() for found in ends.values() for line, *_ in found}:
            for axes, found in ends.items():
                _label_ends(axes, found)
            return
    legend(figure, handles)


def legend(figure, handles: Mapping[str, Any]) -> None:
    """Put a legend below everything, so that it covers nothing.

    Args:
        figure: Its height grows, so that the axes keep theirs.
        handles: Label to an artist with the look to show.
    """
    longest = max(map(len, handles))
    fitting = int(72 * figure.get_figwidth() / (TICK * CHARACTER_WIDTH * (longest + 7)))
    rows = -(-len(handles) // max(1, min(len(handles), fitting)))
    figure.set_figheight(figure.get_figheight() + 2 * TICK / 72 * (rows - 1))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=-(-len(handles) // rows),  # rows of equal length
        frameon=False,
        fontsize=TICK,
        labelcolor=INK,
    )


def sample(look: Mapping[str, Any]) -> Any:
    """Return a line without points, for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)


def _ends(axes) -> list[tuple[Any, float, float]]:
    """Return each labelled line, its last value, and how far above it the label is, in
    points. Return nothing if there is no room.
    """
    ends = []
    to_points = 72 / axes.figure.dpi
    low, high = sorted(axes.get_xlim())
    for line in axes.lines:
        if line.get_label().startswith("_"):
            continue
        x, y = (np.asarray(values, "float64") for values in line.get_data())
        is_log = axes.get_yscale() == "log"
        shown = np.flatnonzero(np.isfinite(x) & np.isfinite(y) & ((y > 0) | (not is_log)))
        if not shown.size or x[shown[-1]] < low + 0.94 * (high - low):
            return []
        end = float(y[shown[-1]])
        ends.append((line, end, to_points * float(axes.transData.transform((0, end))[1])))
    if not ends:
        return []
    heights = [height for *_, height in ends]
    box = axes.get_window_extent()
    step = CHARACTER_HEIGHT * TICK
    moved = apart(heights, step, to_points * box.y0 + step / 2, to_points * box.y1 - step / 2)
    if moved is None or np.abs(np.subtract(moved, heights)).max(initial=0) > FAR * step:
        return []
    return [(line, end, new - old) for (line, end, old), new in zip(ends, moved, strict=True)]


def apart(places: Sequence[float], step: float, low: float, high: float) -> list[float] | None:
    """Move places as little as needed to have them at least `step` apart between `low`
    and `high`; None if they do not fit.

    Example:

    >>> apart([1.0, 1.0, 9.0], 2.0, 0.0, 10.0)
    [0.0, 2.0, 9.0]
    """
    if (len(places) - 1) * step > high - low:
        return None
    # With the steps taken off, places in order must not fall: that is isotonic regression.
    order = np.argsort(places, kind="stable")
    steps = step * np.arange(len(places))
    wanted = np.clip(np.asarray(places)[order], low, high) - steps
    fitted = _optional.load("scipy.optimize").isotonic_regression(wanted).x
    moved = np.empty(len(places))
    moved[order] = np.clip(fitted, low, high - steps[-1]) + steps
    return moved.tolist()


def _label_ends(axes, ends: Sequence[tuple[Any, float, float]]) -> None:
    right = axes.get_xlim()[1]
    for line, end, above in ends:
        axes.annotate(
            line.get_label(),
            (right, end),
            xytext=(5, above),
            textcoords="offset points",
            fontsize=TICK,
            color=text_colour(line.get_color()),
            va="center",
            annotation_clip=False,
        )


def colour_bar(figure, axes, picture, label: str) -> None:
    """Draw the scale of a picture's colours beside it."""
    bar = figure.colorbar(picture, ax=axes)
    bar.set_label(label, fontsize=LABEL, color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", colors=GREY, labelcolor=INK, labelsize=TICK)


def spread(values: Iterable[float], form: str = ".3g") -> str:
    """Return the range of values for a title, `0.5 to 2`; one number if both ends read
    the same.
    """
    values = list(values)
    ends = [format(end, form) for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def need(networks: Mapping, noun: str = "network") -> None:
    """Check that there is something to draw."""
    if not networks:
        raise ValueError(f"There must be a {noun} to draw. Received: an empty mapping")
