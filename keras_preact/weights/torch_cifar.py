"""Convert weights from and to pre-activation networks for CIFAR that were trained in
Torch, under three sets of names.

`CONTAINERS`: the authors' released code (resnet-1k-layers) and fb.resnet.torch's
preresnet. A network is a tree of containers, and a weight's name is the path to it, as
in the state dict of a converted .t7 file. Counted from 0:

    network           0 conv, 1 to 3 stages, 4 BN, 5 ReLU, 6 pooling, 7 view, 8 linear (or 8.1)
    first of a stage  0 BN, 1 ReLU, 2 (0 branch, 1 shortcut), 3 addition
    every other unit  0 (0 branch, 1 shortcut), 1 addition: BN and ReLU belong to the branch

In a stage's first unit both paths read the BN and ReLU.

`ATTRIBUTES`: the PyTorch ports of these, with the names conv1, layer1.0.bn1, ..., bn,
fc. They compute something else: the projection reads the raw x, also in the first unit,
and the 3x3 convolution of a bottleneck has the stride.

`PYTORCH_CIFAR`: the PreActResNet18, 34, 50, 101 and 152 of kuangliu/pytorch-cifar, with
the names conv1, layer1.0.bn1, ..., linear. They have ImageNet's widths and four stages,
and no BN and ReLU before the pooling. `WITH_LAST_NORM`: the same with a BN and ReLU
there, named bn, as in later forks such as RobustBench's.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_preact import arrangements
from keras_preact.models.network import ResidualNetwork
from keras_preact.weights import files, layout
from keras_preact.weights.family import Family, Sample, some

#: What the names and shapes of the weights do not show.
ASSUMES = (
    "The conversion assumes ReLU and an epsilon of 1e-5. In the released code, the first "
    "convolution of a bottleneck has the stride, and both paths of a stage's first unit read its "
    "BN and ReLU. In the PyTorch ports, the 3x3 convolution has the stride, and projections read "
    "the raw x. In pytorch-cifar's PreActResNets, it has the stride too, projections read the "
    "activated x, and no BN and ReLU come before the pooling unless the weights have them."
)

CONTAINERS = Family(
    title="the released code for CIFAR",
    assumes=ASSUMES,
    # Our first BN belongs to the stem, so that both paths of the first unit read it too.
    network={
        "stem_conv": "0",
        "stem_norm": "1.0.0",
        "head_norm": "4",
        "head_classifier": "8.1 8",
    },
    unit_name=lambda stage, unit: f"{stage}.{unit - 1}",
    first_unit=layout.unit_names(".0 .2.0.0 .2.0.1 .2.0.3 .2.0.4 .2.0.6 .2.1.0"),
    unit=layout.unit_names(".0.0.0 .0.0.2 .0.0.3 .0.0.5 .0.0.6 .0.0.8"),
    leaves=layout.TORCH_LEAVES,
    numbers=re.compile(r"([123])\.(\d+)\.\d+\."),
    options={"arrangement": "full_preactivation", "stem": "3x3"},
    strides=(1, 2, 2),
    block_options={"stride_on": "first"},
    image_size=32,
    model_name=lambda structure: f"cifar_resnet{structure.depth}",
)
ATTRIBUTES = Family(
    title="the PyTorch ports of the networks for CIFAR",
    assumes=ASSUMES,
    network={"stem_conv": "conv1", "head_norm": "bn", "head_classifier": "fc"},
    unit_name=lambda stage, unit: f"layer{stage}.{unit - 1}",
    unit=layout.unit_names(".bn1 .conv1 .bn2 .conv2 .bn3 .conv3 .downsample.0"),
    leaves=layout.TORCH_LEAVES,
    numbers=re.compile(r"layer(\d+)\.(\d+)\."),
    options={
        "arrangement": arrangements.RAW_STEM,
        "stem": "3x3",
        "shape_shortcut": "projection",
        "activate_shape_shortcut": False,
    },
    strides=(1, 2, 2),
    block_options={"stride_on": "3x3"},
    image_size=32,
    model_name=lambda structure: f"cifar_resnet{structure.depth}",
)
PYTORCH_CIFAR = Family(
    title="pytorch-cifar's PreActResNet",
    assumes=ASSUMES,
    network={"stem_conv": "conv1", "head_classifier": "linear"},
    unit_name=ATTRIBUTES.unit_name,
    unit=layout.unit_names(".bn1 .conv1 .bn2 .conv2 .bn3 .conv3 .shortcut.0"),
    leaves=layout.TORCH_LEAVES,
    numbers=ATTRIBUTES.numbers,
    options={"arrangement": arrangements.RAW_ENDS, "stem": "3x3", "shape_shortcut": "projection"},
    strides=(1, 2, 2, 2),
    block_options={"stride_on": "3x3"},
    image_size=32,
    model_name=lambda structure: f"preactresnet{structure.depth}",
)
WITH_LAST_NORM = dataclasses.replace(
    PYTORCH_CIFAR,
    title="pytorch-cifar's PreActResNet with a last normalisation",
    network={"stem_conv": "conv1", "head_norm": "bn", "head_classifier": "linear"},
    options={**PYTORCH_CIFAR.options, "arrangement": arrangements.RAW_STEM},
)


def is_torch_cifar(state: Mapping[str, Any]) -> bool:
    """Whether the weights have the names of a pre-activation network for CIFAR in
    Torch.
    """
    return _family_of(state) is not None


def _family_of(state: Mapping[str, Any]) -> Family | None:
    if any(name.startswith("bn1.") for name in state):  # a network in the original order
        return None
    families = [CONTAINERS, ATTRIBUTES]
    if "linear.weight" in state:
        families = [WITH_LAST_NORM, PYTORCH_CIFAR]
    return next((family for family in families if family.matches(state)), None)


def from_torch_cifar(
    source: str | os.PathLike | Mapping[str, Any],
    *,
    input_shape: Sequence[int | None] | None = None,
    classes: int | None = None,
    check: Sample | None = None,
    **options,
) -> ResidualNetwork:
    """Convert a pre-activation network for CIFAR, trained in Torch, to one that
    computes the same.

    The conversion assumes ReLU and an epsilon of 1e-5. In the released code, the first
    convolution of a bottleneck has the stride, and both paths of a stage's first unit
    read its BN and ReLU. In the PyTorch ports, the 3x3 convolution has the stride, and
    projections read the raw x.

    The networks that most people have trained, PreActResNet18 to 152 of
    kuangliu/pytorch-cifar, differ from the paper's: they have four stages of ImageNet's
    widths, and their classifier reads the raw sum. The paper's appendix has a BN and
    ReLU before the pooling, and so does every network here unless its arrangement is
    `"full_preactivation_raw_ends"`. Their repository trains on images with
    `mean=(125.3, 123.0, 113.9), std=(51.6, 50.8, 51.3)`.

    Args:
        source: A file, see `read_state`, or a mapping of names to arrays or tensors.
            The names may come from the released code's tree of containers
            (`1.0.2.0.0.weight`), from the PyTorch ports (`layer1.0.conv1.weight` and
            `fc.weight`) or from pytorch-cifar (`linear.weight` in place of the latter).
            The weights show depth, widths, block, and whether shape-changing units have
            a projection or zero padding.
        input_shape: Shape of the images. None: 32 x 32 and the channels of the weights.
            For other channels the stem's kernel is adapted, see `load`.
        classes: Number of classes. If it differs from the source's, the network gets a
            new classifier. None: the source's.
        check: Images, in the data format of the result, and the source's outputs for
            them. The result must return the same, which reveals wrong assumptions.
        **options: Options of `ResidualNetwork`. They also replace what is assumed, such
            as `stride_on="first"` for a source that differs.

    Raises:
        ValueError: for weights of another network, and if the outputs differ from those
            in `check`.
        WeightsMismatch: if the source's weights do not fit the network.
        ImportError: if the file needs safetensors or torch, and that is missing.

    Example:

    >>> import keras_preact as kp
    >>> state = kp.weights.to_torch_cifar(kp.create_model("cifar_resnet20_preact"))
    >>> state["1.0.2.0.0.weight"].shape, state["8.bias"].shape
    ((16, 16, 3, 3), (10,))
    >>> kp.weights.from_torch_cifar(state).name
    'cifar_resnet20'
    """
    state = files.torch_state(source)
    family = _family_of(state)
    if family is None:
        raise ValueError(
            "These are no weights of a pre-activation network for CIFAR: the released code's "
            "have names such as 0.weight and 1.0.2.0.0.weight, PyTorch ports' conv1.weight, "
            "layer1.0.bn1.weight and bn.weight, pytorch-cifar's PreActResNets conv1.weight and "
            "linear.weight. Weights with bn1.weight are those of a ResNet in the original order. "
            f"They are: {some(state)}"
        )
    if family is CONTAINERS:
        projects = "2.0.2.1.0.weight" in state
        family = _with_shortcut(family, "projection" if projects else "zero_pad")
    return family.convert(
        state, input_shape=input_shape, classes=classes, check=check, options=options
    )


def to_torch_cifar(model: ResidualNetwork) -> dict[str, np.ndarray]:
    """Return a network's weights under the names of the Torch code with this network.

    Args:
        model: A network from `from_torch_cifar`, from `resnet_cifar` with full
            pre-activation (which gets the released code's names), or one of the same
            structure, such as pytorch-cifar's PreActResNet18: `kp.models.resnet_imagenet(
            18, stem="3x3", arrangement="full_preactivation_raw_ends", classes=10,
            input_shape=(32, 32, 3))`.

    Raises:
        ValueError: for a network that neither the released code nor the PyTorch ports
            have. The message holds the options that differ.
        WeightsMismatch: for weights that the Torch code has no name for.
    """
    config = model.get_config() if isinstance(model, ResidualNetwork) else {}
    arrangement = arrangements.get(config.get("arrangement", "full_preactivation"))
    if arrangement == arrangements.RAW_ENDS:
        family = PYTORCH_CIFAR
    elif arrangement == arrangements.RAW_STEM:
        family = WITH_LAST_NORM if len(config["stages"]) == 4 else ATTRIBUTES
    else:
        family = _with_shortcut(CONTAINERS, config.get("shape_shortcut", "auto"))
    return files.with_counters(family.extract(model))


def _with_shortcut(family: Family, shape_shortcut: str) -> Family:
    """Return the family with this shape shortcut, which is an option of the released
    code.
    """
    options = {**family.options, "shape_shortcut": shape_shortcut}
    return dataclasses.replace(family, options=options)
