"""What the questions of the benchmark share: candidates that take turns.

A round is a dictionary of label to figures; a label is PART/MODEL/WHAT:option=value,...
Besides its numbers every candidate has `over`: the label that its ratios refer to.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

PRECISIONS = ("float32", "bfloat16")
#: Engine to the precisions that it is measured in, if they are others.
OF_ENGINE: Mapping[str, Sequence[str]] = {"openvino": (*PRECISIONS, "int8")}
#: How a user without this package's server runs a SavedModel; the other names are the server's
#: engines.
PLAIN = "loop"

Round = dict[str, dict]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A candidate, measured once per round."""

    label: str
    over: str
    measure: Callable[[], dict]


def label(part: str, model: str, what: str, **options: object) -> str:
    """Return the name of a candidate."""
    text = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{part}/{model}/{what}" + (f":{text}" if text else "")


def in_turn(cells: Sequence[Cell], rounds: int) -> Iterator[Round]:
    """Measure every candidate once, `rounds` times."""
    for _ in range(rounds):
        yield {cell.label: {"over": cell.over} | cell.measure() for cell in cells}
