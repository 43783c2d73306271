"""The look of every figure: colours for light and dark pages, axes, and names of lines.

Figures are objects without global state.
"""

import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_preact import _optional


class Hue(NamedTuple):
    """A colour: of lines and of text on a white page, and of both on a dark page."""

    line: str
    text: str
    dark: str


#: Colours that colour-blind readers can tell apart: Okabe and Ito's
#: (https://jfly.uni-koeln.de/color/) without the light yellow. Text has darker colours, and dark
#: pages have brighter ones, for a contrast of 4.5.
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
_BLUE, _ORANGE, _GREEN, _PINK, _AMBER, _SKY, _BLACK = HUES
#: Styles of lines: the next one is used after the last colour.
DASHES = ("-", "--", ":", "-.")

#: Ends of the scale of ordered colours that have enough contrast: on white and on dark pages.
_PALEST, _DIMMEST = 0.85, 0.4

INK = "#1C1C1C"
GREY = "#5E5E5E"
LINE = "#B8B8B8"
GRID = "#E4E4E4"
EDGE = "#4A4A4A"
#: Insides of boxes, pale enough for text in `INK`.
BLUE, ORANGE, GREEN, PINK, PALE = "#D7E8F5", "#FBE2D0", "#D5EFE4", "#F6E3EF", "#F3F3F3"
#: Colour on a white page to that on a dark one. Any other colour is the same on both.
DARK = {colour: hue.dark for hue in HUES for colour in (hue.line, hue.text)}
DARK |= {GREY: "#A9ACB2", LINE: "#62666E", GRID: "#3A3E46", EDGE: "#8E939B"}
DARK |= {BLUE: "#1F405C", ORANGE: "#5C3517", GREEN: "#17493A", PINK: "#512B47", PALE: "#363A42"}

#: The attribute of an SVG picture that has its own background.
BACKGROUND = ' style="background: white"'

#: The colour of each arrangement and each shortcut, in every figure that compares them. A network
#: with identity shortcuts has the colour of its arrangement: see `hue`.
NAMED_HUES: Mapping[str, Hue] = {
    "original": _BLUE,
    "full_preactivation": _ORANGE,
    "bn_after_addition": _GREEN,
    "relu_before_addition": _PINK,
    "relu_only_preactivation": _AMBER,
    "bn_only_preactivation": _SKY,
    "constant_scaling": _GREEN,
    "exclusive_gating": _PINK,
    "shortcut_only_gating": _SKY,
    "conv1x1": _AMBER,
    "dropout": _BLACK,
    "none": Hue(GREY, GREY, DARK[GREY]),
    "scaled_residual": _GREEN,
    "depth_scaling": _AMBER,
    "orthogonal": _PINK,
    "decayed_identity": _SKY,
    "hyper_connections": _GREEN,
}

#: Sizes of text in points, for figures 7 inches wide: legible at half their size.
TITLE, LABEL, TICK, SMALL = 13, 12, 11, 10
#: Mean width of a character, relative to its size.
CHARACTER_WIDTH = 0.52
#: An axis is logarithmic if its values span more than the first ratio. Below the second ratio, its
#: numbers are written without powers of ten.
DECADE, FEW_DECADES = 10.0, 2e3


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


def svg(figure) -> str:
    """Return a figure as SVG on a transparent background, the same text each time."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "keras-preact"}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return buffer.getvalue().decode()


def on_white(svg: str) -> str:
    """Return the text of an SVG file with a white background, for a page that may be dark
    and does not know about it, such as GitHub's.
    """
    return svg.replace("<svg", f"<svg{BACKGROUND}", 1)


def darkened(svg: str) -> str:
    """Return the text of an SVG file with the colours of a dark page, see `DARK`, and
    without a background.

    Source of the contrasts: WCAG 2.2, success criteria 1.4.3 and 1.4.11.
    """
    text = svg.replace(BACKGROUND, "", 1)
    counterparts = _ordered_in_the_dark()
    counterparts |= {light.lower(): dark.lower() for light, dark in DARK.items()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda colour: counterparts.get(colour[0], colour[0]), text)


def styled(axes, title: str = "", x: str = "", y: str = "") -> Any:
    """Give axes a title, wrapped to their width, labels and a light grid, without a
    frame; return them.
    """
    subplot = axes.get_subplotspec()
    share = len(subplot.colspan) / subplot.get_gridspec().ncols if subplot else 1.0
    # `bbox` also holds the width of a subfigure.
    width = 72 * (share * axes.figure.bbox.width / axes.figure.dpi - 0.9)
    axes.set_title(wrapped(title, width), loc="left", fontsize=TITLE, color=INK)
    axes.set_xlabel(x, fontsize=LABEL, color=INK)
    axes.set_ylabel(y, fontsize=LABEL, color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(which="both", colors=GREY, labelcolor=INK, labelsize=TICK)
    return axes


def heading(figure, title: str) -> None:
    """Set the title of a figure with several axes."""
    if title:
        text = wrapped(title, 72 * (figure.get_figwidth() - 0.3))
        figure.suptitle(text, x=0.012, ha="left", fontsize=TITLE, color=INK)


def wrapped(title: str, points: float, size: float = TITLE) -> str:
    """Return the lines of a title of this size, wrapped to a width."""
    columns = max(12, int(points / (CHARACTER_WIDTH * size)))
    return "\n".join(
        textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        for line in title.split("\n")
    )


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


def hue(arrangement: str, shortcut: str = "identity") -> Hue:
    """Return the colour of networks with this arrangement and this shortcut."""
    return NAMED_HUES[arrangement if shortcut == "identity" else shortcut]


def ordered(i: int, count: int) -> Any:
    """Return colour number i of an ordered scale, such as depths. The last is the darkest on
    a white page, the brightest on a dark one.
    """
    import matplotlib

    return matplotlib.colormaps["viridis"](_PALEST * (1 - i / max(1, count - 1)))


def _ordered_in_the_dark() -> dict[str, str]:
    """Return the counterparts of the colours of `ordered`."""
    import matplotlib
    from matplotlib.colors import to_hex

    scale = matplotlib.colormaps["viridis"]
    counterparts = {}
    for i in range(scale.N):
        share = max(0.0, 1 - i / (scale.N - 1) / _PALEST)
        counterparts[to_hex(scale(i))] = to_hex(scale(_DIMMEST + (1 - _DIMMEST) * share))
    return counterparts


def clipped(axes, x, y, **look) -> None:
    """Mark at the edge of the axes where a line leaves them and comes back, above and below."""
    low, high = axes.get_ylim()
    for is_outside, edge, marker in ((y > high, high, "^"), (y < low, low, "v")):
        is_first, is_last = ~np.append(False, is_outside[:-1]), ~np.append(is_outside[1:], False)
        ends = x[is_outside & (is_first | is_last)]
        [line] = axes.plot(
            ends, np.full(len(ends), edge), clip_on=False, linestyle="", marker=marker, **look
        )
        line.set_in_layout(False)


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Return rising numbers that are at least `gap` apart, as near as possible to the
    wanted ones, which rise too: by least squares.

    Example:

    >>> apart([1.0, 1.0, 9.0], 2.0)
    [0.0, 2.0, 9.0]
    """
    blocks: list[tuple[float, int]] = []  # sum and length of neighbours that touch
    for i, value in enumerate(wanted):
        total, count = value - gap * i, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before, length = blocks.pop()
            total, count = total + before, count + length
        blocks.append((total, count))
    levels = [total / count for total, count in blocks for _ in range(count)]
    return [level + gap * i for i, level in enumerate(levels)]


def name_ends(axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the names of lines beside their ends, right of the axes, moved apart.

    Args:
        axes: Their place in the figure is final, with room for the names.
        ends: Last point of a line, its name, and the colour of the text.
    """
    box, point = axes.get_window_extent(), axes.figure.dpi / 72
    (_, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    wanted = axes.transData.transform([(right, np.clip(end[1], low, high)) for end in ends])[:, 1]
    order = np.argsort(wanted, kind="stable")
    gap = 1.25 * SMALL * point
    steps = gap * np.arange(len(order))
    places = np.clip(apart(wanted[order], gap), box.y0 + steps, box.y1 - steps[::-1])
    for i, place in zip(order, places, strict=True):
        x, y, text, colour = ends[i]
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "relpos": (0, 0.5)}
        axes.annotate(
            text,
            (x, np.clip(y, low, high)),
            (1 + 14 * point / box.width, (place - box.y0) / box.height),
            textcoords="axes fraction",
            va="center",
            fontsize=SMALL,
            color=colour,
            annotation_clip=False,
            arrowprops=line | {"shrinkA": 1, "shrinkB": 0} if x == right else None,
        ).set_in_layout(False)


class Panel(NamedTuple):
    """Axes of a figure by depth.

    Args:
        title: What the lines show.
        label: Label of the vertical axis.
        series: Name of a line to its values, one per unit or depth.
        units: Names of the units, for marking the stages; empty for no marks.
        gaps: Whether NaN interrupts a line.
        percent: Whether the values are shares of 1, which are labelled in percent.
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
) -> Any:
    """Draw panels one above the other; a line with the same name looks the same in all.

    Args:
        panels: What to draw.
        depth: Label of the horizontal axis.
        width, height: Size in inches.
        sharey: Whether the vertical axes are equal.
        **settings: Further looks of the lines, as in `lines`.

    Returns:
        The figure, with a legend.
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
    legend(figure)
    return figure


def by_depth(axes) -> None:
    """Mark only whole numbers, such as units or epochs, on the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.margins(x=0.02)


def stages(axes, units: Sequence[str]) -> None:
    """Mark the stages above the axes, if the units are named as in `stage2_unit1`."""
    names = [name.split("_")[0] for name in units]
    if not names or not all(name.startswith("stage") for name in names):
        return
    starts = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    for start in starts[1:]:
        axes.axvline(start, color=LINE, linewidth=0.8, zorder=1)
    above = axes.secondary_xaxis("top")
    above.spines["top"].set_visible(False)
    labels = [names[start].replace("stage", "stage ") for start in starts]
    above.set_xticks(starts, labels, ha="left", fontsize=SMALL, color=GREY)
    above.tick_params(length=0, pad=1)


def decades(axes, values: Iterable) -> None:
    """Make the vertical axis logarithmic if the values span more than a decade. It then
    shows only positive values.
    """
    flat = np.concatenate([np.ravel(array) for array in values] or [np.zeros(0)])
    positive = flat[np.isfinite(flat) & (flat > 0)]
    if positive.size and positive.max() / positive.min() > DECADE:
        logarithmic(axes)


def logarithmic(axes) -> None:
    """Make the vertical axis logarithmic. It hides values that are not positive."""
    axes.set_yscale("log", nonpositive="mask")
    plain_numbers(axes.yaxis)


def plain_numbers(axis) -> None:
    """Label a logarithmic axis of few decades with 0.5, 1, 2 instead of powers of ten.
    A horizontal axis gets fewer numbers.
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


def legend(figure, handles: Mapping[str, Any] | None = None) -> None:
    """Put a legend below everything, so that it covers nothing. One line needs none.

    Args:
        figure: Its height grows, so that the axes keep theirs.
        handles: Label to an artist with the look to show. None: the lines of all axes;
            lines with the same label have the same look.
    """
    if handles is None:
        drawn: dict[str, Any] = {}
        for axes in figure.axes:
            for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
                drawn.setdefault(label, line)
        handles = drawn
    if len(handles) < 2:
        return
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
