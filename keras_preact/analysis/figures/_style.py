"""The look of the figures: colours, axes, legends, and matplotlib through its objects alone, without a global state."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

#: Colours that colour-blind readers tell apart (Okabe and Ito, https://jfly.uni-koeln.de/color/), the light yellow left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Taken in turn once the colours are used up.
DASHES = ("-", "--", ":", "-.")
GREY = "#6b6b6b"
#: Values that span more than this are drawn on a logarithmic axis.
DECADE = 10.0


def new_figure(width: float = 7.0, height: float = 4.2) -> Any:
    """Return an empty figure of so many inches.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'keras-preact[training]'.") from error
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
    FigureCanvasAgg(figure)
    return figure


def styled(axes, title: str = "", x: str = "", y: str = "") -> Any:
    """Give axes their labels, a light grid and no frame; return them."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelcolor="#303030")
    return axes


def lines(axes, series: Mapping[str, tuple[Any, Any]], **settings) -> None:
    """Draw a line for each label, `(x, y)`; with a marker at each point where there are few."""
    for i, (label, (x, y)) in enumerate(series.items()):
        marker = {"marker": "o", "markersize": 3.5} if len(x) <= 30 else {}
        look = {"color": colour(i), "linestyle": DASHES[i // len(COLOURS) % len(DASHES)], "linewidth": 1.6}
        axes.plot(x, y, label=label, **(look | marker | settings))


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


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
    axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=11, pad=14)  # above the names of the stages
    for i, (before, name) in enumerate(zip(["", *names], names, strict=False)):
        if name != before:
            if i:
                axes.axvline(i, color="#b8b8b8", linewidth=0.8, zorder=1)
            place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "bottom"}
            place |= {"ha": "right", "xytext": (-2, 1)} if i > 0.9 * (len(names) - 1) else {"ha": "left", "xytext": (2, 1)}
            text = axes.annotate(name.replace("stage", "stage "), (i, 1.0), fontsize=7, color=GREY, **place)
            text.set_in_layout(False)  # the title leaves it room


def decades(axes, values: Iterable) -> None:
    """Make the vertical axis logarithmic where the values span more than a decade; it then shows positive ones alone."""
    flat = np.concatenate([np.ravel(each) for each in values] or [np.zeros(0)])
    positive = flat[np.isfinite(flat) & (flat > 0)]
    if positive.size and positive.max() / positive.min() > DECADE:
        axes.set_yscale("log", nonpositive="mask")


def legend(figure, axes) -> None:
    """Put one legend below everything, so that it covers nothing; none for a single line."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        longest = max(map(len, labels))
        columns = max(1, min(len(labels), int(figure.get_figwidth() * 11 / (longest + 6))))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def spread(values: Iterable[float], form: str = ".3g") -> str:
    """Return the range of some figures as a title has it, `0.5 to 2`; the figure itself where they read alike."""
    values = list(values)
    ends = [format(end, form) for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))
