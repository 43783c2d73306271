"""Residual units as diagrams, drawn from the tables: Fig. 1, 2 and 4 of the paper, and
any row that is added to them.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from keras_preact import arrangements, blocks, published, shortcuts
from keras_preact.analysis.figures import _style

#: Component of an arrangement to the colour of its box.
COLOURS: Mapping[str, str] = MappingProxyType(
    {"norm": _style.BLUE, "activation": _style.ORANGE, "shift": _style.PALE, "scale": _style.PALE}
)
#: Names of normalisations and activations to what a box says; others keep their names.
SHORT: Mapping[str, str] = MappingProxyType(
    {
        "batch": "BN",
        "layer": "LN",
        "group": "GN",
        "rms": "RMS norm",
        "relu": "ReLU",
        "shift": "+ b",
        "scale": "* a",
    }
)
#: Part of a name in `kp.ARRANGEMENTS` or `kp.SHORTCUTS` to how the paper writes it.
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "_only_": "-only ",
        "preactivation": "pre-activation",
        "bn": "BN",
        "relu": "ReLU",
        "conv1x1": "1x1 conv",
        "_": " ",
    }
)
WEIGHT_COLOUR = _style.GREEN
OTHER_COLOUR = _style.PINK

#: Size of a box, distance from one to the next, and from the shortcut to the branch without and
#: with boxes on it, in units of which an inch has `UNITS`.
BOX_WIDTH, BOX_HEIGHT, STEP, NEAR, APART = 1.9, 0.58, 0.8, 1.6, 2.15
UNITS = 2.5
#: Size of text in a box, in points: of short words, and of those that would not fit.
TEXT, LONG_TEXT = 10.0, 8.8


@dataclasses.dataclass(frozen=True)
class Box:
    """A part of a unit.

    Args:
        path: `"branch"` (F), `"shortcut"` (h), `"gate"`, or `"after_addition"` (f).
        text: What it says.
        colour: Of its inside.
    """

    path: str
    text: str
    colour: str = OTHER_COLOUR


@dataclasses.dataclass(frozen=True)
class Diagram:
    """The parts of a unit, each path from its beginning to its end.

    Args:
        branch, shortcut, gate, after_addition: The boxes of the paths; a gate acts on
            the last boxes of the paths that it scales.
        connected: Whether there is a shortcut at all.
    """

    branch: tuple[Box, ...]
    shortcut: tuple[Box, ...]
    gate: tuple[Box, ...]
    after_addition: tuple[Box, ...]
    connected: bool

    @property
    def boxes(self) -> tuple[Box, ...]:
        return self.branch + self.shortcut + self.gate + self.after_addition


#: Class of a shortcut to what is on the shortcut, at the end of the branch and in the gate, from an
#: instance. A class that is not here gets a box with its name on the shortcut.
_ON_PATHS: Mapping[
    type, Callable[[Any], tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]
] = MappingProxyType(
    {
        shortcuts.Identity: lambda h: ((), (), ()),
        shortcuts.NoShortcut: lambda h: ((), (), ()),
        shortcuts.ConstantScaling: lambda h: (
            (f"* {h.shortcut:g}",),
            (f"* {h.residual:g}",) * (h.residual != 1),
            (),
        ),
        shortcuts.ExclusiveGating: lambda h: (("* (1 - g)",), ("* g",), ("1x1 conv", "sigmoid")),
        shortcuts.ShortcutOnlyGating: lambda h: (("* (1 - g)",), (), ("1x1 conv", "sigmoid")),
        shortcuts.Conv1x1: lambda h: (("1x1 conv",), (), ()),
        shortcuts.Dropout: lambda h: ((f"dropout {h.rate:g}",), (), ()),
    }
)

#: Block to the network of which Table 2 has the errors.
_COMPARED: Mapping[str, str] = MappingProxyType({"basic": "ResNet-110", "bottleneck": "ResNet-164"})


def diagram(
    arrangement: str | arrangements.Arrangement,
    shortcut: str | shortcuts.Shortcut = "identity",
    block: str | blocks.Block = "basic",
    *,
    normalization: str = "batch",
    activation: str = "relu",
) -> Diagram:
    """Return the parts of a unit that keeps the shape, read from `kp.ARRANGEMENTS`,
    `kp.SHORTCUTS` and `kp.BLOCKS`.

    Args:
        arrangement, shortcut, block, normalization, activation: As those of
            `kp.ResidualUnit`; the last two by name.

    Raises:
        ValueError: for unknown names.

    Example:

    >>> parts = diagram("full_preactivation", "constant_scaling", block="basic")
    >>> [box.text for box in parts.branch]
    ['BN', 'ReLU', '3x3 conv', 'BN', 'ReLU', '3x3 conv', '* 0.5']
    >>> [box.text for box in parts.shortcut]
    ['* 0.5']
    """
    row = arrangements.get(arrangement)
    weights = blocks.get(block)
    h = shortcuts.get(shortcut)
    on_shortcut, on_branch, gate = _on_paths(h)
    words = {"norm": normalization, "activation": weights.activation or activation}

    def components(names: Sequence[str], path: str) -> list[Box]:
        kept = [name for name in names if words.get(name) != "none"]
        return [
            Box(path, SHORT.get(word := words.get(name, name), word), COLOURS[name])
            for name in kept
        ]

    branch = components(row.first, "branch")
    for i, kind in enumerate(weights.kinds, 1):
        is_last = i == len(weights.kinds)
        branch.append(Box("branch", kind, WEIGHT_COLOUR))
        branch += components(row.last if is_last else row.between, "branch")
        if weights.gated and not is_last:
            branch.append(Box("branch", f"* {kind}", WEIGHT_COLOUR))
    return Diagram(
        branch=(*branch, *(Box("branch", text) for text in on_branch)),
        shortcut=tuple(Box("shortcut", text) for text in on_shortcut),
        gate=tuple(Box("gate", text) for text in gate),
        after_addition=tuple(components(row.after_addition, "after_addition")),
        connected=h.reads_input,
    )


def unit_diagram(
    arrangement: str | arrangements.Arrangement,
    shortcut: str | shortcuts.Shortcut = "identity",
    block: str | blocks.Block = "basic",
) -> Any:
    """Draw a unit: x_l above, the shortcut to the left, F to the right, the addition,
    f, and x_{l+1} below.

    Args:
        arrangement, shortcut, block: As in `diagram`.

    Returns:
        A `matplotlib.figure.Figure`.

    Example:

    >>> from keras_preact.analysis import figures
    >>> figure = figures.unit_diagram("original", "exclusive_gating", block="bottleneck")
    >>> [text.get_text() for text in figure.axes[0].texts if text.get_text() == "sigmoid"]
    ['sigmoid']

    Source: Fig. 1, 2 and 4 of arXiv 1603.05027.
    """
    parts = diagram(arrangement, shortcut, block)
    name = arrangements.serialize(arrangements.get(arrangement))
    return diagrams_figure({name if isinstance(name, str) else "unit": parts})


def diagrams_figure(diagrams: Mapping[str, Diagram], below: str = "") -> Any:
    """Draw several units side by side, as in `unit_diagram`.

    Args:
        diagrams: Title of each unit to what `diagram` returned.
        below: A line below them all.

    Raises:
        ValueError: for no unit.
    """
    if not diagrams:
        raise ValueError("There must be a unit to draw. Received: an empty mapping")
    height = max(map(_height, diagrams.values()))
    widths = list(map(_width, diagrams.values()))
    titles = [_wrapped(title, width) for title, width in zip(diagrams, widths, strict=True)]
    above = 0.19 * max(title.count("\n") + 1 for title in titles)
    figure = _style.new_figure(
        0.2 + sum(widths) / UNITS, 0.25 + above + height / UNITS + (0.25 if below else 0)
    )
    every = figure.subplots(1, len(diagrams), squeeze=False, width_ratios=widths)[0]
    for axes, title, parts in zip(every, titles, diagrams.values(), strict=True):
        draw_diagram(axes, title, parts, height)
        axes.set_aspect("equal", anchor="N")
    if below:
        figure.supxlabel(below, fontsize=_style.SMALL, color=_style.GREY)
    return figure


def draw_diagram(axes, title: str, parts: Diagram, height: float | None = None) -> None:
    """Draw a unit into axes of a figure, as in `unit_diagram`.

    Args:
        axes: Empty axes.
        title: Text above the unit.
        parts: What `diagram` returned.
        height: Height of the axes, in the length of which a box is 0.58 high. None:
            that of the unit.
    """
    axes.set_axis_off()
    axes.set_xlim(-1.05, _width(parts) - 1.05)
    axes.set_ylim(-(height or _height(parts)), 0.5)
    axes.set_title(title, fontsize=_style.SMALL, color=_style.INK)
    _draw(axes, parts)


def arrangements_figure(block: str = "basic") -> Any:
    """Draw a unit of every row of `kp.ARRANGEMENTS` side by side, with its published
    error if it has one.

    Source: Fig. 4 and Table 2 of arXiv 1603.05027.
    """
    network = _COMPARED.get(block)
    rows = published.results(table="2", network=network) if network else ()
    errors = {row.row: f"{row.error:.2f} %" for row in rows}
    columns = {
        _titled(name, errors): diagram(name, block=block) for name in arrangements.ARRANGEMENTS
    }
    return diagrams_figure(
        columns,
        f"Published test error of {network} on CIFAR-10 (Table 2, medians of 5)" if network else "",
    )


def shortcuts_figure() -> Any:
    """Draw a unit with every row of `kp.SHORTCUTS` side by side, in the original
    arrangement, with the published error.

    Source: Fig. 2 and Table 1 of arXiv 1603.05027.
    """
    by_config = {}
    for row in published.results(table="1"):
        h = shortcuts.get(row.arguments.get("shortcut", "identity"), row.arguments.get("gate_bias"))
        by_config[_key(h)] = "fail (> 20 %)" if row.error is None else f"{row.error:.2f} %"
    keys = {name: _key(kind()) for name, kind in shortcuts.SHORTCUTS.items()}
    errors = {name: by_config[key] for name, key in keys.items() if key in by_config}
    columns = {_titled(name, errors): diagram("original", name) for name in shortcuts.SHORTCUTS}
    return diagrams_figure(
        columns, "Published test error of ResNet-110 on CIFAR-10 (Table 1, medians of 5)"
    )


def _on_paths(h: shortcuts.Shortcut) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    known = next((kind for kind in type(h).__mro__ if kind in _ON_PATHS), None)
    return ((type(h).__name__,), (), ()) if known is None else _ON_PATHS[known](h)


def _key(h: shortcuts.Shortcut) -> str:
    """Return what is equal for equal shortcuts."""
    config = {
        key: value
        for key, value in h.get_config().items()
        if key not in ("name", "kernel_initializer", "seed")
    }
    return f"{type(h).__name__} {config}"


def in_words(name: str) -> str:
    """Return the name of an arrangement or a shortcut as the paper writes it.

    Example:

    >>> in_words("relu_only_preactivation")
    'ReLU-only pre-activation'
    """
    for part, word in _WORDS.items():
        name = name.replace(part, word)
    return name


def _titled(name: str, errors: Mapping[str, str]) -> str:
    return in_words(name) + "\n" + errors.get(name, "no published error")


def _wrapped(title: str, width: float) -> str:
    """Return a title in lines that are not wider than so many units."""
    characters = int(72 * width / UNITS / (_style.CHARACTER_WIDTH * _style.SMALL))
    return "\n".join(
        textwrap.fill(line, characters, break_on_hyphens=False) for line in title.split("\n")
    )


def _right(parts: Diagram) -> float:
    """Return the place of the branch; the shortcut is at 0."""
    return 2 * APART if parts.gate else APART if parts.shortcut else NEAR


def _width(parts: Diagram) -> float:
    return _right(parts) + BOX_WIDTH / 2 + 1.15


def _paths(parts: Diagram) -> int:
    """Return how many boxes the longest path to the addition has."""
    return max(len(parts.branch), len(parts.gate) + len(parts.shortcut))


def _height(parts: Diagram) -> float:
    return STEP * (_paths(parts) + 1 + len(parts.after_addition)) + 1.5


def _draw(axes, parts: Diagram) -> None:
    """Draw the parts from y = 0 downwards."""
    left, right = 0.0, _right(parts)
    end = -STEP * _paths(parts)
    addition, fork = end - STEP, -0.35

    def line(*points, **settings):
        x, y = zip(*points, strict=True)
        axes.plot(
            x,
            y,
            **{"color": _style.GREY, "linewidth": 1.4, "zorder": 1, "solid_joinstyle": "round"}
            | settings,
        )

    def arrow(start, end):
        style = {
            "arrowstyle": "-|>",
            "color": _style.GREY,
            "linewidth": 1.4,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        axes.annotate("", end, xytext=start, arrowprops=style, zorder=1)

    axes.text(left, 0.0, "$x_l$", ha="center", va="bottom", fontsize=_style.LABEL, color=_style.INK)
    if parts.connected:
        line((left, 0.0), (left, addition + 0.5), linewidth=2.8, color=_style.GREY)
        line((left, fork), (right, fork), (right, addition), (left + 0.5, addition))
        arrow((left, addition + 0.5), (left, addition + 0.25))
        arrow((left + 0.5, addition), (left + 0.25, addition))
        circle = {"boxstyle": "circle,pad=0.1", "facecolor": "none", "edgecolor": _style.GREY}
        look = {"ha": "center", "va": "center", "color": _style.INK, "bbox": circle}
        axes.text(left, addition, "+", fontsize=TEXT, **look)
    else:
        line(
            (left, 0.0),
            (left, fork),
            (right, fork),
            (right, addition),
            (left, addition),
            (left, addition - 0.25),
        )
    for i, box in enumerate(parts.branch):
        _box(axes, box, right, -STEP * (i + 1))
    for i, box in enumerate(reversed(parts.shortcut)):
        _box(axes, box, left, end + STEP * i)
    if parts.gate:
        middle = (left + right) / 2
        line((middle, fork), (middle, end))
        for i, box in enumerate(reversed(parts.gate), len(parts.shortcut)):
            _box(axes, box, middle, end + STEP * i)
        arrow((middle, end), (left + BOX_WIDTH / 2, end))
        if parts.branch[-1].colour == OTHER_COLOUR:  # the gate scales F too
            arrow((middle, end), (right - BOX_WIDTH / 2, -STEP * len(parts.branch)))
    y = addition
    for box in parts.after_addition:
        line((left, y - 0.25), (left, y - STEP))
        y -= STEP
        _box(axes, box, left, y)
    arrow((left, y - 0.25), (left, y - 0.8))
    axes.text(
        left, y - 0.85, "$x_{l+1}$", ha="center", va="top", fontsize=_style.LABEL, color=_style.INK
    )


def _box(axes, box: Box, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2)
    look: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=0.12",
        "facecolor": box.colour,
        "edgecolor": _style.EDGE,
        "linewidth": 0.8,
    }
    axes.add_patch(FancyBboxPatch(corner, BOX_WIDTH, BOX_HEIGHT, zorder=2, **look))
    text = box.text.replace("* ", "\N{MULTIPLICATION SIGN} ")
    size = TEXT if len(text) < 9 else LONG_TEXT
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=_style.INK, zorder=3)
