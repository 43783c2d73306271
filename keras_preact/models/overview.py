"""A network in a few lines: its parts with their sizes, and each kind of unit in it."""

from collections.abc import Iterator
from html import escape
from typing import Any

from keras_preact import descriptions
from keras_preact.descriptions import Paths
from keras_preact.models.segments import unit_names

HEADER = ("part", "units", "output", "parameters")


def text(network: Any) -> str:
    """Return the overview as text."""
    rows = [HEADER, *_rows(network)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    a, b, c, d = widths
    lines = [
        f"{part:<{a}}  {units:>{b}}  {output:<{c}}  {parameters:>{d}}"
        for part, units, output, parameters in rows
    ]
    kinds = [f"{title}\n{descriptions.text(paths)}" for title, paths in _kinds(network)]
    return "\n\n".join([f"{_title(network)}\n" + "\n".join(lines), *kinds])


def page(network: Any) -> str:
    """Return the overview as HTML."""
    kinds = "".join(descriptions.diagram(title, paths) for title, paths in _kinds(network))
    title = escape(_title(network))
    return f"<p><b>{title}</b></p>{descriptions.table(HEADER, _rows(network))}{kinds}"


def _title(network: Any) -> str:
    shape = _size(network.inputs[0].shape)
    return f"{type(network).__name__} {network.name!r}: input {shape}"


def _size(shape: tuple) -> str:
    return " x ".join("any" if size is None else str(size) for size in shape[1:])


def _rows(network: Any) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table: stem, stages, head, and the whole network."""
    stages: dict[str, list] = {}
    for segment, output in zip(network.segments, network.segment_outputs, strict=True):
        stage = segment.name.partition("_")[0]
        units, _, parameters = stages.get(stage, (0, "", 0))
        stages[stage] = [
            units + len(unit_names(segment)),
            _size(output.shape),
            parameters + segment.count_params(),
        ]
    head = sum(layer.count_params() for layer in network.head)
    stem = network.count_params() - head - sum(row[2] for row in stages.values())
    rows = [
        ("stem", "", _size(network.first_input.shape), stem),
        *((stage, *row) for stage, row in stages.items()),
        ("head", "", _size(network.outputs[0].shape), head),
        ("total", len(network.unit_names), "", network.count_params()),
    ]
    return [(part, str(units), size, f"{count:,}") for part, units, size, count in rows]


def _kinds(network: Any) -> Iterator[tuple[str, Paths]]:
    """Yield each kind of unit in the network: the names of its units, and its layers."""
    kinds: dict[str, tuple[list[str], Paths]] = {}
    for segment in network.segments:
        paths = segment.paths()
        names, _ = kinds.setdefault(descriptions.text(paths), ([], paths))
        names += unit_names(segment)
    for names, paths in kinds.values():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}", paths
