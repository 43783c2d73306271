"""The pre-activation networks for CIFAR that were trained in Torch, as networks of
ours, and back: two ways of naming them.

`containers`: the released code (resnet-1k-layers) and fb.resnet.torch's preresnet. A
    network is a tree of containers and a
weight's name the way to it, as in the state dict that a .t7 file is converted to. From
0 on:

    network           0 conv, 1 to 3 stages, 4 BN, 5 ReLU, 6 pooling, 7 view, 8 linear (or 8.1, in a container)
    first of a stage  0 BN, 1 ReLU, 2 (0 branch, 1 shortcut), 3 addition: both paths see the BN and ReLU
    every other unit  0 (0 branch, 1 shortcut), 1 addition: BN and ReLU are the branch's first

`attributes`: the PyTorch ports of these with conv1, layer1.0.bn1, ..., bn, fc. Their
    networks are other functions: the
projection reads the raw x, also of the first unit, and the 3x3 convolution of a
bottleneck has the stride.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from keras_preact import arrangements
from keras_preact.models.network import ResidualNetwork
from keras_preact.weights import _torch_states, layout, structure, transfer

STRIDES = (1, 2, 2)

#: Our layers to the way to them below a unit: of a stage's first one, and of the others.
CONTAINERS_FIRST: Mapping[str, str] = MappingProxyType(
    {
        "branch/norm_0": "0",
        "branch/conv_1": "2.0.0",
        "branch/norm_1": "2.0.1",
        "branch/conv_2": "2.0.3",
        "branch/norm_2": "2.0.4",
        "branch/conv_3": "2.0.6",
        "projection/conv": "2.1.0",
    }
)
CONTAINERS_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "branch/norm_0": "0.0.0",
        "branch/conv_1": "0.0.2",
        "branch/norm_1": "0.0.3",
        "branch/conv_2": "0.0.5",
        "branch/norm_2": "0.0.6",
        "branch/conv_3": "0.0.8",
    }
)
ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "branch/norm_0": "bn1",
        "branch/conv_1": "conv1",
        "branch/norm_1": "bn2",
        "branch/conv_2": "conv2",
        "branch/norm_2": "bn3",
        "branch/conv_3": "conv3",
        "projection/conv": "downsample.0",
    }
)


@dataclasses.dataclass(frozen=True)
class Naming:
    """How a code names the weights of its networks, and what these compute.

    Args:
        network: Our layers outside the units to its own.
        classifiers: What the classifier may be called; the last one is written.
        first: Our layers below the first unit of a stage to its own.
        others: The same of the other units.
        unit_name: Its name of a unit, both counted from 1.
        unit: Matches names of a unit's weights; the groups are its stage and itself.
        options: Of `ResidualNetwork`.
    """

    network: Mapping[str, str]
    classifiers: Sequence[str]
    first: Mapping[str, str]
    others: Mapping[str, str]
    unit_name: Callable[[int, int], str]
    unit: re.Pattern
    options: Mapping[str, Any]

    def names(self, state: Mapping[str, Any]) -> bool:
        """Whether a state has names of this kind."""
        outside = (
            f"{layer}.weight" in state
            for layer in (self.network["stem_conv"], self.network["head_norm"])
        )
        return all(outside) and any(map(self.unit.match, state))

    def weight(self, stage: int, i: int) -> str:
        """Return the name of the i-th convolution of a stage's first unit."""
        return f"{self.unit_name(stage, 1)}.{self.first[f'branch/conv_{i}']}.weight"

    def entries(self, stages: Sequence[int]) -> list[layout.Entry]:
        """Return the table for a network with so many units in its stages."""
        layers = dict(self.network)
        for s, units in enumerate(stages, 1):
            for u in range(1, units + 1):
                below = self.first if u == 1 else self.others
                layers |= {
                    f"stage{s}_unit{u}/{ours}": f"{self.unit_name(s, u)}.{theirs}"
                    for ours, theirs in below.items()
                }
        tables = [layers, *({"head_classifier": name} for name in self.classifiers)]
        return [
            entry
            for table in tables
            for entry in layout.Layout(table, {}, self.unit_name, layout.TORCH_LEAVES, ".").entries(
                ()
            )
        ]


NAMINGS: Mapping[str, Naming] = MappingProxyType(
    {
        "containers": Naming(
            # ours has the first BN behind the stem, where both paths of the first unit see it too
            network={"stem_conv": "0", "stem_norm": "1.0.0", "head_norm": "4"},
            classifiers=("8.1", "8"),
            first=CONTAINERS_FIRST,
            others=CONTAINERS_OTHERS,
            unit_name=lambda stage, unit: f"{stage}.{unit - 1}",
            unit=re.compile(r"([123])\.(\d+)\.\d+\."),
            options={"arrangement": "full_preactivation", "stem": "3x3", "stride_on": "first"},
        ),
        "attributes": Naming(
            network={"stem_conv": "conv1", "head_norm": "bn"},
            classifiers=("fc",),
            first=ATTRIBUTES,
            others=ATTRIBUTES,
            unit_name=lambda stage, unit: f"layer{stage}.{unit - 1}",
            unit=re.compile(r"layer(\d+)\.(\d+)\."),
            options={
                "arrangement": arrangements.RAW_STEM,
                "stem": "3x3",
                "stride_on": "3x3",
                "shape_shortcut": "projection",
                "activate_shape_shortcut": False,
            },
        ),
    }
)


def is_torch_cifar(state: Mapping[str, Any]) -> bool:
    """Whether names are those of a pre-activation network for CIFAR of Torch."""
    return any(naming.names(state) for naming in NAMINGS.values())


def structure_of(state: Mapping[str, np.ndarray]) -> _torch_states.Structure:
    """Return what a state tells of its network: the code that it is from by its names,
    depth and widths by its shapes.

    Raises:
        ValueError: for a state that is none of these networks'.
    """
    naming = _naming_of(state)
    options = dict(naming.options)
    if "shape_shortcut" not in options:
        projection = f"{naming.unit_name(2, 1)}.{naming.first['projection/conv']}.weight"
        options["shape_shortcut"] = "projection" if projection in state else "zero_pad"
    return _torch_states.read_structure(
        state,
        what="A pre-activation network for CIFAR",
        stem=f"{naming.network['stem_conv']}.weight",
        classifier=[f"{name}.weight" for name in naming.classifiers],
        unit=naming.unit,
        weight=naming.weight,
        strides=STRIDES,
        options=options,
    )


def _naming_of(state: Mapping[str, Any]) -> Naming:
    naming = next((naming for naming in NAMINGS.values() if naming.names(state)), None)
    if naming is None:
        raise ValueError(
            "These are no weights of a pre-activation network for CIFAR: the released code's "
            "have names such as 0.weight and 1.0.2.0.0.weight, PyTorch ports' conv1.weight, "
            f"layer1.0.bn1.weight and bn.weight. They are: {', '.join([*state][: transfer.SHOWN])}"
        )
    return naming


def from_torch_cifar(
    source: str | os.PathLike | Mapping[str, Any],
    *,
    input_shape: Sequence[int | None] | None = None,
    classes: int | None = None,
    **options,
) -> ResidualNetwork:
    """Make a pre-activation network for CIFAR that was trained in Torch into one of
    ours that computes the same.

    Args:
        source: A file, see `read_state`, or a mapping of names to arrays or tensors.
            Its names may be those of the released code's tree of containers
            (`1.0.2.0.0.weight`) or of the PyTorch ports (`layer1.0.conv1.weight`).
            Depth, widths and block, and whether a change of the shape is a projection
            or zero padding, follow from it.
        input_shape: None: 32 x 32 and the channels of the weights. With other channels
            the stem's kernel is adapted, see `load`.
        classes: Of the classifier; where they are not the source's, it starts anew.
            None: the source's.
        **options: Of `ResidualNetwork`. Where the stride of a bottleneck stands does
            not show in weights: it is the first convolution's in the released code, the
            3x3 one's in the ports, and `stride_on=` says otherwise.

    Raises:
        ValueError: for weights of another network.
        WeightsMismatch: for weights that do not fit each other.
        ImportError: for a file whose format needs safetensors or torch where that is
            missing.

    Example:

    >>> import keras_preact as kp
    >>> state = kp.weights.to_torch_cifar(kp.create_model("cifar_resnet20_preact"))
    >>> state["1.0.2.0.0.weight"].shape, state["8.bias"].shape
    ((16, 16, 3, 3), (10,))
    >>> kp.weights.from_torch_cifar(state).name
    'cifar_resnet20'
    """
    state = _torch_states.state_of(source)
    found = structure_of(state)
    options.setdefault("name", f"cifar_resnet{_depth(found)}")
    model = found.build(size=32, input_shape=input_shape, classes=classes, **options)
    found.load(model, state, _naming_of(state).entries([stage.units for stage in found.stages]))
    return model


def to_torch_cifar(model: ResidualNetwork) -> dict[str, np.ndarray]:
    """Return a network's weights as the Torch code names them that has this network.

    Args:
        model: From `from_torch_cifar`, `resnet_cifar` with full pre-activation (the
            released code's names), or of a structure equal to one of these.

    Raises:
        ValueError: for a network that neither the released code nor the PyTorch ports
            have; the message holds the options that differ.
        WeightsMismatch: for weights that they have no name for.
    """
    config = model.get_config() if isinstance(model, ResidualNetwork) else {}
    is_raw = config.get("arrangement") == arrangements.serialize(arrangements.RAW_STEM)
    naming = NAMINGS["attributes" if is_raw else "containers"]
    either = {"shape_shortcut": config.get("shape_shortcut", "auto")}
    target = (
        "the PyTorch ports of the networks for CIFAR" if is_raw else "the released code for CIFAR"
    )
    _torch_states.check_computes_as(model, STRIDES, {**either, **naming.options}, target)
    return _torch_states.extract(
        model, naming.entries([stage.units for stage in structure.stages(model)])
    )


def _depth(found: _torch_states.Structure) -> int:
    """Return the number of weight layers: the convolutions of all units, the stem and
    the classifier.
    """
    return (
        sum(stage.units for stage in found.stages) * (3 if found.block == "bottleneck" else 2) + 2
    )
