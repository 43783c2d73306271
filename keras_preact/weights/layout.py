"""Tables of names: what another library calls the weights of a network of residual
units, and the order of their axes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np


@dataclasses.dataclass(frozen=True)
class Transform:
    """How the axes of an array change between a source and this package.

    Args:
        to_ours: Function from the source's array to ours.
        to_theirs: Its inverse.
    """

    to_ours: Callable[[np.ndarray], np.ndarray]
    to_theirs: Callable[[np.ndarray], np.ndarray]


SAME = Transform(lambda array: array, lambda array: array)
#: Torch's (out, in, height, width) of a convolution, and ours, (height, width, in, out).
CONV_OIHW = Transform(
    lambda array: array.transpose(2, 3, 1, 0), lambda array: array.transpose(3, 2, 0, 1)
)
#: Torch's (out, in) of a dense layer.
DENSE_OI = Transform(lambda array: array.transpose(1, 0), lambda array: array.transpose(1, 0))
#: A dense layer stored as a 1x1 convolution, (out, in, 1, 1).
DENSE_OI11 = Transform(
    lambda array: array.reshape(array.shape[:2]).transpose(1, 0),
    lambda array: array.T[:, :, None, None],
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the table from our names to a source's.

    Args:
        ours: A path of `named`.
        theirs: The name in the source.
        transform: How the axes change.
    """

    ours: str
    theirs: str
    transform: Transform = SAME


#: The weights of a layer: our name, theirs, the transform.
Leaves = Sequence[tuple[str, str, Transform]]

KERAS_LEAVES: Mapping[str, Leaves] = MappingProxyType(
    {
        "conv": [("kernel", "kernel", SAME), ("bias", "bias", SAME)],
        "norm": [
            (name, name, SAME) for name in ("gamma", "beta", "moving_mean", "moving_variance")
        ],
        "dense": [("kernel", "kernel", SAME), ("bias", "bias", SAME)],
    }
)
TORCH_LEAVES: Mapping[str, Leaves] = MappingProxyType(
    {
        "conv": [("kernel", "weight", CONV_OIHW), ("bias", "bias", SAME)],
        "norm": [
            ("gamma", "weight", SAME),
            ("beta", "bias", SAME),
            ("moving_mean", "running_mean", SAME),
            ("moving_variance", "running_var", SAME),
        ],
        "dense": [("kernel", "weight", DENSE_OI), ("bias", "bias", SAME)],
    }
)

#: Our layers in the order of the columns of `unit_names`.
UNIT_LAYERS = (
    "branch/norm_0",
    "branch/conv_1",
    "branch/norm_1",
    "branch/conv_2",
    "branch/norm_2",
    "branch/conv_3",
    "projection/conv",
)


def unit_names(names: str) -> Mapping[str, str]:
    """Return `UNIT_LAYERS` with a source's names for them, separated by spaces."""
    return MappingProxyType(dict(zip(UNIT_LAYERS, names.split(), strict=False)))


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a source calls the layers of a network of residual units.

    Args:
        network: Our layers outside the units (`stem_conv`, `stem_norm`, `head_norm`,
            `head_classifier`) to the source's. Several names: all are read, and the
            last is written.
        unit: Our layers below a unit (`branch/conv_1`, `projection/conv`) to the
            source's, without the unit's name.
        unit_name: Function from the numbers of stage and unit, from 1, to the start of
            the names of its layers.
        leaves: For `"conv"`, `"norm"` and `"dense"` the names of their weights.
        separator: Between a layer and its weight.
        first_unit: As `unit`, for the first unit of each stage. None: `unit`.

    Rows for weights that a network lacks do no harm: one layout serves both kinds of
    block, with and without biases.
    """

    network: Mapping[str, str | Sequence[str]]
    unit: Mapping[str, str]
    unit_name: Callable[[int, int], str]
    leaves: Mapping[str, Leaves]
    separator: str = "/"
    first_unit: Mapping[str, str] | None = None

    def entries(self, stages: Sequence[int]) -> list[Entry]:
        """Return the table for a network with these numbers of units in its stages."""
        layers = [
            (ours, name)
            for ours, names in self.network.items()
            for name in ([names] if isinstance(names, str) else names)
        ]
        for s, units in enumerate(stages, 1):
            for u in range(1, units + 1):
                below = self.first_unit if u == 1 and self.first_unit else self.unit
                layers += [
                    (f"stage{s}_unit{u}/{ours}", self.unit_name(s, u) + theirs)
                    for ours, theirs in below.items()
                ]
        return [
            Entry(f"{ours}/{leaf}", f"{theirs}{self.separator}{their_leaf}", transform)
            for ours, theirs in layers
            for leaf, their_leaf, transform in self.leaves[_kind(ours)]
        ]


def _kind(layer: str) -> str:
    last = layer.rsplit("/", 1)[-1]
    return "norm" if "norm" in last else "dense" if last == "head_classifier" else "conv"
