"""The look of every figure: colours for light and dark pages, axes, labels;
matplotlib's objects alone, no global state.
"""

import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np


class Hue(NamedTuple):
    """A colour of lines on a white page, of text on it, and of both on a dark page."""

    line: str
    text: str
    dark: str


#: Colours that colour-blind readers tell apart: those of Okabe and Ito
#: (https://jfly.uni-koeln.de/color/) without the light yellow. Text is darker, dark pages have
#: brighter ones: a contrast of 4.5 for text.
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
#: Taken in turn once the colours are used up.
DASHES = ("-", "--", ":", "-.")

INK = "#1C1C1C"
#: What is drawn over a coloured map, which is the same on dark pages.
ON_MAP = "#101010"
GREY = "#5E5E5E"
LINE = "#B8B8B8"
GRID = "#E4E4E4"
EDGE = "#4A4A4A"
#: Insides of boxes, pale enough for text in `INK`.
BLUE, ORANGE, GREEN, PINK, PALE = "#D7E8F5", "#FBE2D0", "#D5EFE4", "#F6E3EF", "#F3F3F3"
#: Colour on a white page to that on a dark one. A colour that is not listed is the same on both.
DARK: Mapping[str, str] = MappingProxyType(
    {colour: hue.dark for hue in HUES for colour in (hue.line, hue.text)}
    | {GREY: "#A9ACB2", LINE: "#62666E", GRID: "#3A3E46", EDGE: "#8E939B"}
    | {BLUE: "#1F405C", ORANGE: "#5C3517", GREEN: "#17493A", PINK: "#512B47", PALE: "#363A42"}
)

#: Sizes of text in points, for figures of 7 inches: legible at half their size.
TITLE, LABEL, TICK, SMALL = 13, 12, 11, 10
#: Mean width and height of a character, relative to its size.
CHARACTER_WIDTH, CHARACTER_HEIGHT = 0.52, 1.25
#: Values that span more than this are drawn on a logarithmic axis; if they span less than that,
#: with plain numbers.
DECADE, FEW_DECADES = 10.0, 2e3
#: The most lines that are labelled at their ends, the most characters of such a label, and how far
#: it may be moved away from other labels, in lines of text; else there is a legend.
FEW, SHORT, FAR = 6, 24, 1.6


def new_figure(width: float = 7.0, height: float = 4.2) -> Any:
    """Return an empty figure, its size in inches.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib: pip install 'keras-preact[training]'."
        ) from error
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
    FigureCanvasAgg(figure)
    return figure


def svg(figure, dark: bool = False) -> str:
    """Return a figure as SVG on a transparent background, the same text each time.

    Args:
        figure: A figure drawn with the colours of this module.
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
    """Return the text of an SVG file with each colour of a white page replaced by that
    of a dark one, as in `DARK`.

    Source of the contrasts: WCAG 2.2, success criteria 1.4.3 and 1.4.11.
    """
    counterparts = {light.lower(): dark.lower() for light, dark in DARK.items()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda colour: counterparts.get(colour[0], colour[0]), svg)


def styled(axes, title: str = "", x: str = "", y: str = "") -> Any:
    """Give axes their labels, a light grid and no frame; return them."""
    set_title(axes, title)
    axes.set_xlabel(x, fontsize=LABEL, color=INK)
    axes.set_ylabel(y, fontsize=LABEL, color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(which="both", colors=GREY, labelcolor=INK, labelsize=TICK)
    return axes


def set_title(axes, title: str, **settings) -> None:
    """Set the title above the left end of axes, in as many lines as their width asks
    for.
    """
    place = axes.get_subplotspec()
    share = (
        (place.colspan.stop - place.colspan.start) / place.get_gridspec().ncols if place else 1.0
    )
    width = 72 * (share * axes.figure.bbox.width / axes.figure.dpi - 0.9)  # of a subfigure too
    text = textwrap.fill(
        title, max(12, int(width / (CHARACTER_WIDTH * TITLE))), break_long_words=False
    )
    axes.set_title(text, loc="left", fontsize=TITLE, color=INK, **settings)


def heading(figure, title: str) -> None:
    """Set the title of a figure with several axes."""
    if title:
        width = 72 * (figure.get_figwidth() - 0.3)
        text = textwrap.fill(title, int(width / (CHARACTER_WIDTH * TITLE)))
        figure.suptitle(text, x=0.012, ha="left", fontsize=TITLE, color=INK)


def lines(axes, series: Mapping[str, tuple[Any, Any]], **settings) -> None:
    """Draw one line per label, `(x, y)`. Lines of few points have a marker at each."""
    for i, (label, (x, y)) in enumerate(series.items()):
        marker = {"marker": "o", "markersize": 3.5} if len(x) <= 30 else {}
        look = {
            "color": colour(i),
            "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
            "linewidth": 1.8,
        }
        axes.plot(x, y, label=label, **(look | marker | settings))


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def text_colour(line: str) -> str:
    """Return the colour of text about a line of this colour."""
    return next((hue.text for hue in HUES if hue.line.lower() == line.lower()), line)


def by_depth(axes) -> None:
    """Mark whole numbers on the horizontal axis: those of units."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.margins(x=0.02)


def stages(axes, units: Sequence[str]) -> None:
    """Mark where a stage begins, for units that are named after theirs: `stage2_unit1`."""
    names = [name.split("_")[0] for name in units]
    if not all(name.startswith("stage") for name in names):
        return
    axes.set_title(
        axes.get_title(loc="left"), loc="left", fontsize=TITLE, color=INK, pad=18
    )  # above the stages' names
    axes.update_datalim(
        [(0, 0), (len(names) - 1, 0)], updatey=False
    )  # if there is no number to draw
    for i, (before, name) in enumerate(zip(["", *names], names, strict=False)):
        if name != before:
            if i:
                axes.axvline(i, color=LINE, linewidth=0.8, zorder=1)
            place: dict[str, Any] = {
                "xycoords": ("data", "axes fraction"),
                "textcoords": "offset points",
                "va": "bottom",
            }
            place |= (
                {"ha": "right", "xytext": (-2, 1)}
                if i > 0.9 * (len(names) - 1)
                else {"ha": "left", "xytext": (2, 1)}
            )
            text = axes.annotate(
                name.replace("stage", "stage "), (i, 1.0), fontsize=SMALL, color=GREY, **place
            )
            text.set_in_layout(False)  # the title leaves it room


def decades(axes, values: Iterable) -> None:
    """Make the vertical axis logarithmic where the values span more than a decade; it
    then shows positive ones alone.
    """
    flat = np.concatenate([np.ravel(each) for each in values] or [np.zeros(0)])
    positive = flat[np.isfinite(flat) & (flat > 0)]
    if positive.size and positive.max() / positive.min() > DECADE:
        axes.set_yscale("log", nonpositive="mask")
        plain_numbers(axes.yaxis)


def plain_numbers(axis) -> None:
    """Write 0.5, 1, 2 at a logarithmic axis of few decades, in place of powers of ten;
    fewer numbers at a horizontal one.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if high / low < FEW_DECADES:
        dense = high / low < (FEW_DECADES if axis.axis_name == "y" else 200)
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if dense else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def shares(axis) -> None:
    """Write shares of 1 as percentages, without a sign: the label has it."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))


def name_lines(figure, *panels) -> None:
    """Say which line is which: at the lines' ends if they are few and end apart, else
    in one legend below everything.

    Single lines stay without a name. The axes must have their scales and limits
    already.

    Args:
        figure: The figure of the axes.
        panels: Axes. Lines with one label have one look in all of them.
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
    """Put a legend below everything, so that it covers nothing: label to what has this
    look.
    """
    longest = max(map(len, handles))
    columns = max(
        1,
        min(
            len(handles), int(72 * figure.get_figwidth() / (TICK * CHARACTER_WIDTH * (longest + 7)))
        ),
    )
    rows = -(-len(handles) // columns)
    columns = -(-len(handles) // rows)  # rows of one length
    figure.set_figheight(
        figure.get_figheight() + 2 * TICK / 72 * (rows - 1)
    )  # axes keep their height
    look = {"frameon": False, "fontsize": TICK, "labelcolor": INK}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, **look
    )


def sample(look: Mapping[str, Any]) -> Any:
    """Return a line without a point, for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)


def _ends(axes) -> list[tuple[Any, float, float]]:
    """Return each labelled line, its last value, and how far above that its label is,
    in points; nothing without room.
    """
    found = []
    to_points = 72 / axes.figure.dpi
    low, high = sorted(axes.get_xlim())
    for line in axes.lines:
        if line.get_label().startswith("_"):
            continue
        x, y = (np.asarray(values, "float64") for values in line.get_data())
        there = np.flatnonzero(
            np.isfinite(x) & np.isfinite(y) & ((y > 0) | (axes.get_yscale() != "log"))
        )
        if not there.size or x[there[-1]] < low + 0.94 * (high - low):
            return []
        end = float(y[there[-1]])
        found.append((line, end, to_points * float(axes.transData.transform((0, end))[1])))
    heights = [height for *_, height in found]
    box = axes.get_window_extent()
    step = CHARACTER_HEIGHT * TICK
    moved = apart(heights, step, to_points * box.y0 + step / 2, to_points * box.y1 - step / 2)
    if moved is None or any(
        abs(new - old) > FAR * step for new, old in zip(moved, heights, strict=True)
    ):
        return []
    return [(line, end, new - old) for (line, end, old), new in zip(found, moved, strict=True)]


def apart(places: Sequence[float], step: float, low: float, high: float) -> list[float] | None:
    """Move places as little as needed to have them at least `step` apart between `low`
    and `high`; None if they do not fit.

    Example:

    >>> apart([1.0, 1.0, 9.0], 2.0, 0.0, 10.0)
    [0.0, 2.0, 9.0]
    """
    if (len(places) - 1) * step > high - low:
        return None
    order = np.argsort(places, kind="stable")
    groups: list[
        list[float]
    ] = []  # of places that touch: their number and the mean of where the first of them would be
    for i, index in enumerate(order):
        groups.append([1, float(np.clip(places[index], low, high)) - i * step])
        while len(groups) > 1 and groups[-2][1] > groups[-1][1]:
            count, first = groups.pop()
            total = groups[-1][0] + count
            groups[-1] = [total, (groups[-1][0] * groups[-1][1] + count * first) / total]
    firsts = np.repeat([first for _, first in groups], [int(count) for count, _ in groups])
    firsts = np.clip(firsts, low, high - (len(places) - 1) * step)
    moved = np.empty(len(places))
    moved[order] = firsts + step * np.arange(len(places))
    return [float(place) for place in moved]


def _label_ends(axes, ends: Sequence[tuple[Any, float, float]]) -> None:
    right = axes.get_xlim()[1]
    for line, end, above in ends:
        look = {
            "fontsize": TICK,
            "color": text_colour(line.get_color()),
            "va": "center",
            "annotation_clip": False,
        }
        axes.annotate(
            line.get_label(), (right, end), xytext=(5, above), textcoords="offset points", **look
        )


def colour_bar(figure, axes, picture, label: str) -> None:
    """Draw the scale of a picture's colours beside it."""
    bar = figure.colorbar(picture, ax=axes)
    bar.set_label(label, fontsize=LABEL, color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", colors=GREY, labelcolor=INK, labelsize=TICK)


def spread(values: Iterable[float], form: str = ".3g") -> str:
    """Return the range of some figures as a title has it, `0.5 to 2`; the figure itself
    where they read alike.
    """
    values = list(values)
    ends = [format(end, form) for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))
