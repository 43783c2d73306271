"""Draw diagrams of residual units and networks from the tables: Fig. 1, 2 and 4 of the
paper, and any row that is added to the tables.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_preact import arrangements, blocks, published, shortcuts
from keras_preact.analysis.figures import style

#: Component of an arrangement to the colour of its box.
COLOURS = {
    "norm": style.BLUE,
    "activation": style.ORANGE,
    "shift": style.PALE,
    "scale": style.PALE,
}
#: Names of normalisations and activations to the texts of their boxes. Others keep their names.
SHORT = {
    "batch": "BN",
    "layer": "LN",
    "group": "GN",
    "rms": "RMS norm",
    "relu": "ReLU",
    "shift": "+ b",
    "scale": "* a",
}
#: Part of a name in `kp.ARRANGEMENTS` or `kp.SHORTCUTS` to how the paper writes it.
_WORDS = {
    "_only_": "-only ",
    "preactivation": "pre-activation",
    "bn": "BN",
    "relu": "ReLU",
    "conv1x1": "1x1 conv",
    "_": " ",
}
WEIGHT_COLOUR = style.GREEN
OTHER_COLOUR = style.PINK

#: Size of a box, distance between boxes, and distance from the shortcut to the branch without and
#: with boxes on the shortcut. An inch has `UNITS` of these.
BOX_WIDTH, BOX_HEIGHT, STEP, NEAR, APART = 1.9, 0.58, 0.8, 1.6, 2.15
UNITS = 2.5
#: Size of a short text in a box, in points.
TEXT = 10.0
#: Inches of a figure that texts can be read in on a page; wider ones have several rows.
WIDEST = 9.0


@dataclasses.dataclass(frozen=True)
class Box:
    """A part of a unit.

    Args:
        text: Text in the box.
        colour: Colour of its inside.
    """

    text: str
    colour: str = OTHER_COLOUR


@dataclasses.dataclass(frozen=True)
class Diagram:
    """The parts of a unit, each path from start to end.

    Args:
        branch, shortcut, gate, after_addition: Boxes of F, of h, of the gate and of f.
            A gate acts on the last boxes of the paths that it scales.
        connected: Whether there is a shortcut.
        ends: Texts at the top and at the bottom.
    """

    branch: tuple[Box, ...]
    shortcut: tuple[Box, ...]
    gate: tuple[Box, ...]
    after_addition: tuple[Box, ...]
    connected: bool
    ends: tuple[str, str] = ("$x_l$", "$x_{l+1}$")


#: Texts on the shortcut, at the end of the branch and in the gate.
Texts = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
_GATE = ("1x1 conv", "sigmoid")
#: Class of a shortcut to a function from an instance to its texts. Any other class gets a box with
#: its name on the shortcut.
_ON_PATHS: dict[type, Callable[[Any], Texts]] = {
    shortcuts.Shortcut: lambda h: ((type(h).__name__,), (), ()),
    shortcuts.Identity: lambda h: ((), (), ()),
    shortcuts.NoShortcut: lambda h: ((), (), ()),
    shortcuts.ConstantScaling: lambda h: (
        (f"* {h.shortcut:g}",),
        (f"* {h.residual:g}",) * (h.residual != 1),
        (),
    ),
    shortcuts.ExclusiveGating: lambda h: (("* (1 - g)",), ("* g",), _GATE),
    shortcuts.ShortcutOnlyGating: lambda h: (("* (1 - g)",), (), _GATE),
    shortcuts.Conv1x1: lambda h: (("1x1 conv",), (), ()),
    shortcuts.Dropout: lambda h: ((f"dropout {h.rate:g}",), (), ()),
    shortcuts.ScaledResidual: lambda h: ((), ("* a",), ()),
    shortcuts.Orthogonal: lambda h: ((), ("\N{UP TACK} x",), ()),
    shortcuts.DecayedIdentity: lambda h: (
        ("* a_l" if h.factor is None else f"* {h.factor:g}",),
        (),
        (),
    ),
    shortcuts.DepthScaling: lambda h: ((), ("* a",), ()),
    shortcuts.HyperConnections: lambda h: (("* H_res",), ("* h_post",), ()),
}

#: Block to the network that has its errors in Table 2.
_COMPARED = {"basic": "ResNet-110", "bottleneck": "ResNet-164"}


def diagram(
    arrangement: str | arrangements.Arrangement,
    shortcut: str | shortcuts.Shortcut = "identity",
    block: str | blocks.Block = "basic",
    *,
    normalization: str = "batch",
    activation: str = "relu",
) -> Diagram:
    """Return the parts of a unit that keeps the shape, from `kp.ARRANGEMENTS`,
    `kp.SHORTCUTS` and `kp.BLOCKS`.

    Args:
        arrangement, shortcut, block, normalization, activation: Options of
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
    known = next(cls for cls in type(h).__mro__ if cls in _ON_PATHS)
    on_shortcut, on_branch, gate = _ON_PATHS[known](h)
    words = {"norm": normalization, "activation": weights.activation or activation}

    def components(names: Sequence[str]) -> list[Box]:
        return _components(names, words)

    branch = components(row.first)
    for i, kind in enumerate(weights.kinds, 1):
        is_last = i == len(weights.kinds)
        branch.append(Box(kind, WEIGHT_COLOUR))
        branch += components(row.last if is_last else row.between)
        if weights.gated and not is_last:
            branch.append(Box(f"* {kind}", WEIGHT_COLOUR))
    return Diagram(
        branch=(*branch, *map(Box, on_branch)),
        shortcut=tuple(map(Box, on_shortcut)),
        gate=tuple(map(Box, gate)),
        after_addition=tuple(components(row.after_addition)),
        connected=h.reads_input,
    )


def _components(names: Sequence[str], words: Mapping[str, str]) -> list[Box]:
    """Return the boxes of components; `words` has the names of the normalisation and of
    the activation.
    """
    texts = {name: words.get(name, name) for name in names}
    return [
        Box(SHORT.get(texts[name], texts[name]), COLOURS[name])
        for name in names
        if texts[name] != "none"
    ]


def unit_diagram(
    arrangement: str | arrangements.Arrangement,
    shortcut: str | shortcuts.Shortcut = "identity",
    block: str | blocks.Block = "basic",
) -> Any:
    """Draw a unit: x_l at the top, the shortcut on the left, F on the right, then the
    addition, f and x_{l+1}.

    Args:
        arrangement, shortcut, block: See `diagram`.

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


def network_diagram(
    arrangement: str | arrangements.Arrangement, block: str | blocks.Block = "basic"
) -> Any:
    """Draw the parts of a network from left to right: its stem, its first unit, the other
    units and its head.

    Args:
        arrangement: Name or instance, as `kp.ResidualUnit` takes it.
        block: Name or instance of a block of convolutions.

    Returns:
        A `matplotlib.figure.Figure`.

    Example:

    >>> from keras_preact.analysis import figures
    >>> figure = figures.network_diagram("full_preactivation")
    >>> [text.get_text() for text in figure.axes[-1].texts if text.get_text() == "pooling"]
    ['pooling']

    Source: the appendix of arXiv 1603.05027.
    """
    row = arrangements.get(arrangement)
    words = {"norm": "batch", "activation": "relu"}
    stem = [Box("conv1", WEIGHT_COLOUR), *_components(row.stem, words)]
    head = [*_components(row.head, words), Box("pooling"), Box("classifier", WEIGHT_COLOUR)]

    def chain(boxes: Sequence[Box], above: str, below: str) -> Diagram:
        return Diagram((), (), (), tuple(boxes), connected=False, ends=(above, below))

    first = dataclasses.replace(diagram(row.of_first_unit(), block=block), ends=("$x_0$", "$x_1$"))
    return diagrams_figure(
        {
            "stem": chain(stem, "image", "$x_0$"),
            "first unit": first,
            "other units": diagram(row, block=block),
            "head": chain(head, "$x_L$", "logits"),
        }
    )


def diagrams_figure(diagrams: Mapping[str, Diagram], below: str = "") -> Any:
    """Draw several units side by side, as in `unit_diagram`, in as many rows as a page
    needs.

    Args:
        diagrams: Title of each unit to what `diagram` returned.
        below: Line of text below all units.

    Raises:
        ValueError: for no unit.
    """
    style.need(diagrams, "unit")
    height = max(map(_height, diagrams.values()))
    own = list(map(_width, diagrams.values()))
    rows = math.ceil(sum(own) / UNITS / WIDEST)
    columns = math.ceil(len(own) / rows)
    widths = [max(own[i::columns]) for i in range(columns)]
    titles = [
        style.wrapped(title, 72 * width / UNITS, style.SMALL)
        for title, width in zip(diagrams, own, strict=True)
    ]
    above = 0.19 * max(title.count("\n") + 1 for title in titles)
    figure = style.new_figure(
        0.2 + sum(widths) / UNITS, rows * (0.25 + above + height / UNITS) + (0.25 if below else 0)
    )
    every = figure.subplots(rows, columns, squeeze=False, width_ratios=widths).flat
    for axes, title, parts in zip(every, titles, diagrams.values(), strict=False):
        draw_diagram(axes, title, parts, height)
        axes.set_aspect("equal", anchor="N")
    for axes in every[len(own) :]:
        axes.remove()
    if below:
        figure.supxlabel(below, fontsize=style.SMALL, color=style.GREY)
    return figure


def draw_diagram(axes, title: str, parts: Diagram, height: float | None = None) -> None:
    """Draw a unit into axes of a figure, as in `unit_diagram`.

    Args:
        axes: Empty axes.
        title: Text above the unit.
        parts: What `diagram` returned.
        height: Height of the axes, in units in which a box is 0.58 high. None: the
            height of the unit.
    """
    axes.set_axis_off()
    axes.set_xlim(-1.05, _width(parts) - 1.05)
    axes.set_ylim(-(height or _height(parts)), 0.5)
    axes.set_title(title, fontsize=style.SMALL, color=style.INK)
    _draw(axes, parts)


def arrangements_figure(block: str = "basic") -> Any:
    """Draw a unit of every row of `kp.ARRANGEMENTS` side by side, with its published
    error if it has one.

    Source: Fig. 4 and Table 2 of arXiv 1603.05027.
    """
    columns = {name: diagram(name, block=block) for name in arrangements.ARRANGEMENTS}
    network = _COMPARED.get(block)
    if network is None:
        return _with_errors(columns, {})
    rows = published.results(table="2", network=network)
    return _with_errors(columns, {row.row: row for row in rows}, f"{network} on CIFAR-10 (Table 2")


def shortcuts_figure() -> Any:
    """Draw a unit with every shortcut of Table 1 side by side, in the original
    arrangement, with the published error.

    Source: Fig. 2 and Table 1 of arXiv 1603.05027.
    """
    rows = {}
    for row in published.results(table="1"):
        h = shortcuts.get(row.arguments.get("shortcut", "identity"), row.arguments.get("gate_bias"))
        rows[h] = row
    own = {name: cls() for name, cls in shortcuts.SHORTCUTS.items()}
    published_rows = {name: rows[h] for name, h in own.items() if h in rows}
    return _with_errors(
        {name: diagram("original", name) for name in published_rows},
        published_rows,
        "ResNet-110 on CIFAR-10 (Table 1",
    )


def _with_errors(
    diagrams: Mapping[str, Diagram], rows: Mapping[str, published.Result], of: str = ""
) -> Any:
    """Draw units with their published errors, by name, in the titles."""

    def error(name: str) -> str:
        if name not in rows:
            return "no published error"
        percent = rows[name].error
        return "fail (> 20 %)" if percent is None else f"{percent:.2f} %"

    titled = {f"{in_words(name)}\n{error(name)}": parts for name, parts in diagrams.items()}
    return diagrams_figure(titled, f"Published test error of {of}, medians of 5)" if of else "")


def in_words(name: str) -> str:
    """Return the name of an arrangement or a shortcut as the paper writes it.

    Example:

    >>> in_words("relu_only_preactivation")
    'ReLU-only pre-activation'
    """
    for part, word in _WORDS.items():
        name = name.replace(part, word)
    return name


def _right(parts: Diagram) -> float:
    """Return the horizontal position of the branch; the shortcut is at 0."""
    if not (parts.branch or parts.connected):
        return 0.0
    return 2 * APART if parts.gate else APART if parts.shortcut else NEAR


def _width(parts: Diagram) -> float:
    return _right(parts) + BOX_WIDTH / 2 + 1.15


def _paths(parts: Diagram) -> int:
    """Return the number of boxes on the longest path to the addition."""
    return max(len(parts.branch), len(parts.gate) + len(parts.shortcut))


def _height(parts: Diagram) -> float:
    return -_addition(parts) + STEP * len(parts.after_addition) + 1.5


def _addition(parts: Diagram) -> float:
    """Return the vertical position of the addition, or of the end of the branch."""
    return -STEP * (_paths(parts) + (1 if _right(parts) else 0))


def _draw(axes, parts: Diagram) -> None:
    """Draw the parts from y = 0 downwards."""
    left, right = 0.0, _right(parts)
    end = -STEP * _paths(parts)
    addition, fork = _addition(parts), -0.35
    centred = {"ha": "center", "color": style.INK}

    def line(*points, width=1.4):
        x, y = zip(*points, strict=True)
        look = {"color": style.GREY, "zorder": 1, "solid_joinstyle": "round"}
        axes.plot(x, y, linewidth=width, **look)

    def arrow(start, end):
        look: dict[str, Any] = {"arrowstyle": "-|>", "color": style.GREY, "linewidth": 1.4}
        look |= {"shrinkA": 0, "shrinkB": 0}
        axes.annotate("", end, xytext=start, arrowprops=look, zorder=1)

    above, below = parts.ends
    axes.text(left, 0.0, above, va="bottom", fontsize=style.LABEL, **centred)
    if parts.connected:
        line((left, 0.0), (left, addition + 0.5), width=2.8)
        line((left, fork), (right, fork), (right, addition), (left + 0.5, addition))
        arrow((left, addition + 0.5), (left, addition + 0.25))
        arrow((left + 0.5, addition), (left + 0.25, addition))
        circle = {"boxstyle": "circle,pad=0.1", "facecolor": "none", "edgecolor": style.GREY}
        axes.text(left, addition, "+", va="center", fontsize=TEXT, bbox=circle, **centred)
    else:
        down = ((left, 0.0), (left, fork), (right, fork), (right, addition))
        line(*down, (left, addition), (left, addition - 0.25))
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
    axes.text(left, y - 0.85, below, va="top", fontsize=style.LABEL, **centred)


def _box(axes, box: Box, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2)
    look: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=0.12",
        "facecolor": box.colour,
        "edgecolor": style.EDGE,
        "linewidth": 0.8,
    }
    axes.add_patch(FancyBboxPatch(corner, BOX_WIDTH, BOX_HEIGHT, zorder=2, **look))
    text = box.text.replace("* ", "\N{MULTIPLICATION SIGN} ")
    size = TEXT * min(1, 8 / len(text))  # more than 8 characters do not fit
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=style.INK, zorder=3)
