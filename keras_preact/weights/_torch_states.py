"""What the converters from Torch share: a state tells of its network by names and
shapes; that is built, and compared.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_preact.models.network import ResidualNetwork, Stage, image_shape
from keras_preact.weights import files, layout, structure, transfer

#: How often a normalisation was trained; no network computes with it.
COUNTER = "num_batches_tracked"


def state_of(source: str | os.PathLike | Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the weights in a file, or those of a mapping of names to arrays or Torch's
    tensors, without counters.
    """
    if isinstance(source, str | os.PathLike):
        state = files.read_state(source)
    elif isinstance(source, Mapping):
        state = {name: files.as_array(value) for name, value in source.items()}
    else:
        raise ValueError(
            f"`source` must be a file or a mapping of names to arrays. Received: source={source!r}"
        )
    return {name: array for name, array in state.items() if name.rsplit(".", 1)[-1] != COUNTER}


@dataclasses.dataclass(frozen=True)
class Structure:
    """A network as the names and shapes of a state tell of it.

    Args:
        stages: Its stages.
        block: `"basic"` or `"bottleneck"`.
        stem_filters: Width of the stem.
        channels: Of the images.
        classes: Of the classifier; None where there is none.
        options: Of `ResidualNetwork`: how it computes.
    """

    stages: tuple[Stage, ...]
    block: str
    stem_filters: int
    channels: int
    classes: int | None
    options: Mapping[str, Any]

    def build(
        self,
        *,
        size: int,
        input_shape: Sequence[int | None] | None,
        classes: int | None,
        **options: Any,
    ) -> ResidualNetwork:
        """Build the network, for images of `size` pixels where there is no
        `input_shape`.
        """
        if input_shape is None:
            colours = image_shape(None, size, options.get("data_format"))
            input_shape = [size if side == size else self.channels for side in colours]
        without_top = (
            {"include_top": False, "pooling": "avg"}
            if classes is None and self.classes is None
            else {}
        )
        if classes is None:
            classes = self.classes or 1
        arguments = {
            **self.options,
            "stem_filters": self.stem_filters,
            "block": self.block,
            **without_top,
            **options,
        }
        return ResidualNetwork(self.stages, input_shape=input_shape, classes=classes, **arguments)

    def load(
        self,
        model: ResidualNetwork,
        state: Mapping[str, np.ndarray],
        entries: Sequence[layout.Entry],
    ) -> None:
        """Load the state; the classifier stays out where one of both has none."""
        if model.logits is None:
            top = {entry.theirs for entry in entries if entry.ours.startswith(transfer.CLASSIFIER)}
            state = {name: array for name, array in state.items() if name not in top}
        transfer.load(model, state, entries, new_classifier=self.classes is None)


def read_structure(
    state: Mapping[str, np.ndarray],
    *,
    what: str,
    stem: str,
    classifier: Sequence[str],
    unit: re.Pattern,
    weight: Callable[[int, int], str],
    strides: Sequence[int],
    options: Mapping[str, Any],
) -> Structure:
    """Read a network's structure from a state.

    Args:
        state: Name to array.
        what: The kind of network, for messages.
        stem: Name of the stem's kernel.
        classifier: Names that the classifier's kernel may have.
        unit: Matches a unit's names; its groups are the numbers of stage and unit.
        weight: The name of a kernel of the first unit of a stage, both counted from 1,
            as in `conv_1`.
        strides: Of the stages; there are as many.
        options: Of the result.

    Raises:
        ValueError: where names are missing that every such network has, or a width is
            none of its blocks'.
    """
    units: dict[int, set[int]] = {}
    for match in filter(None, map(unit.match, state)):
        units.setdefault(int(match[1]), set()).add(int(match[2]))
    if len(units) != len(strides):
        raise ValueError(f"{what} has {len(strides)} stages. Received: weights of {len(units)}")

    def kernel(name: str) -> tuple[int, ...]:
        if name not in state or state[name].ndim != 4:
            raise ValueError(
                f"{what} has a convolution {name!r}, which these weights lack. They are: "
                f"{_some(state)}"
            )
        return state[name].shape

    block = "bottleneck" if weight(1, 3) in state else "basic"
    stages = []
    for s, (stride, number) in enumerate(zip(strides, sorted(units), strict=True), 1):
        filters, last = (
            kernel(weight(s, 1))[0],
            kernel(weight(s, 3 if block == "bottleneck" else 2))[0],
        )
        expansion = 4 if block == "bottleneck" else 1
        if last != filters * expansion:
            raise ValueError(
                f"A {block} block returns {expansion} times the {filters} channels inside it. "
                f"Received: {weight(s, 1)!r} and behind it a weight with {last} channels"
            )
        stages.append(Stage(filters, len(units[number]), stride))
    stem_filters, channels = kernel(stem)[:2]
    classes = next((len(state[name]) for name in classifier if name in state), None)
    return Structure(tuple(stages), block, stem_filters, channels, classes, options)


def _some(state: Mapping[str, np.ndarray]) -> str:
    return ", ".join([*state][:5]) + (", ..." if len(state) > 5 else "")


def extract(model: ResidualNetwork, entries: Sequence[layout.Entry]) -> dict[str, np.ndarray]:
    """Return a network's weights under a source's names, with the counters of Torch's
    batch normalisations at 0.
    """
    state = {}
    for name, array in transfer.extract(model, entries).items():
        state[name] = array
        if name.endswith(".running_var"):
            state[name.removesuffix("running_var") + COUNTER] = np.zeros((), "int64")
    return state


def check_computes_as(
    model: ResidualNetwork, strides: Sequence[int], options: Mapping[str, Any], target: str
) -> None:
    """Check that a network has the structure of `target`: these strides and options,
    see `structure.check_computes_as`.
    """
    structure.check_computes_as(model, options, target)
    own = [stage.strides for stage in structure.stages(model)]
    if own != list(strides):
        raise ValueError(
            f"{target} has stages with the strides {list(strides)}. Received: {model.name!r} with "
            f"{own}"
        )
