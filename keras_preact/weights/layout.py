"""What another library calls the weights of a network of residual units: tables of
names, with the order of axes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np


@dataclasses.dataclass(frozen=True)
class Transform:
    """How an array changes its axes on the way from a source to us and back.

    Args:
        to_ours: From the source's array to ours.
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
#: A dense layer that stands there as a 1x1 convolution, (out, in, 1, 1).
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
        transform: Of the array.
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


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a source calls the layers of a network of residual units.

    Args:
        network: Our layers outside the units (`stem_conv`, `stem_norm`, `head_norm`,
            `head_classifier`) to the source's.
        unit: Our layers below a unit (`branch/conv_1`, `projection/conv`) to what the
            source puts behind the unit's name.
        unit_name: The source's name of the unit of a stage, both counted from 1, with
            all that stands in front of a layer's.
        leaves: For `"conv"`, `"norm"` and `"dense"` the names of their weights.
        separator: Between a layer and its weight.

    Rows for weights that a network lacks do no harm: one layout serves both kinds of
    block, with and without biases.
    """

    network: Mapping[str, str]
    unit: Mapping[str, str]
    unit_name: Callable[[int, int], str]
    leaves: Mapping[str, Leaves]
    separator: str = "/"

    def entries(self, stages: Sequence[int]) -> list[Entry]:
        """Return the table for a network with so many units in its stages."""
        layers = dict(self.network)
        for s, units in enumerate(stages, 1):
            for u in range(1, units + 1):
                name = self.unit_name(s, u)
                layers |= {
                    f"stage{s}_unit{u}/{ours}": name + theirs for ours, theirs in self.unit.items()
                }
        return [
            Entry(f"{ours}/{leaf}", f"{theirs}{self.separator}{their_leaf}", transform)
            for ours, theirs in layers.items()
            for leaf, their_leaf, transform in self.leaves[_kind(ours)]
        ]


def _kind(layer: str) -> str:
    last = layer.rsplit("/", 1)[-1]
    return "norm" if "norm" in last else "dense" if last == "head_classifier" else "conv"
