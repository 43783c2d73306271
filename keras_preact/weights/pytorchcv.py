"""Convert weights from and to the pre-activation networks of pytorchcv (imgclsmob).

There are trained networks for CIFAR-10, CIFAR-100 and SVHN (`preresnet20_cifar10` to
`preresnet1202_svhn`) and for ImageNet (`preresnet10` to `preresnet269b`).
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_preact import arrangements, blocks
from keras_preact.models.network import ResidualNetwork
from keras_preact.weights import files, layout
from keras_preact.weights.family import Family, Sample, some


def _family(stem: str, conv: str, strides: tuple[int, ...], stride_on: str) -> Family:
    return Family(
        title="pytorchcv's PreResNet",
        assumes="The conversion assumes ReLU and an epsilon of 1e-5. In bottlenecks it assumes the "
        "stride on the 3x3 convolution for CIFAR, and on the first one for ImageNet. Networks with "
        "names that end in b, such as preresnet50b, need stride_on='3x3'.",
        network={
            "stem_conv": f"features.init_block{conv}",
            "stem_norm": "features.init_block.bn",
            "head_norm": "features.post_activ.bn",
            "head_classifier": "output",
        },
        unit_name=lambda stage, unit: f"features.stage{stage}.unit{unit}.",
        unit=layout.unit_names(
            "body.conv1.bn body.conv1.conv body.conv2.bn body.conv2.conv body.conv3.bn "
            "body.conv3.conv identity_conv"
        ),
        numbers=re.compile(r"features\.stage(\d+)\.unit(\d+)\.body\."),
        leaves=layout.TORCH_LEAVES,
        options={
            "arrangement": arrangements.RAW_STEM,
            "stem": stem,
            "shape_shortcut": "projection",
        },
        strides=strides,
        block_options={"stride_on": stride_on},
        image_size=32 if stem == "3x3" else 224,
        model_name=lambda structure: f"preresnet{structure.depth}",
    )


CIFAR = _family("3x3", "", (1, 2, 2), "3x3")
IMAGENET = _family("7x7_normalized", ".conv", (1, 2, 2, 2), "first")
#: Networks with names that end in b.
IMAGENET_B = _family("7x7_normalized", ".conv", (1, 2, 2, 2), "3x3")


def is_pytorchcv(state: Mapping[str, Any]) -> bool:
    """Whether the weights have the names of a PreResNet of pytorchcv."""
    return _family_of(state) is not None


def _family_of(state: Mapping[str, Any]) -> Family | None:
    return next((family for family in (CIFAR, IMAGENET) if family.matches(state)), None)


def from_pytorchcv(
    source: str | os.PathLike | Mapping[str, Any],
    *,
    input_shape: Sequence[int | None] | None = None,
    classes: int | None = None,
    check: Sample | None = None,
    **options,
) -> ResidualNetwork:
    """Convert a PreResNet of pytorchcv to a network that computes the same.

    The weights show depth, widths and block, and whether the network is for small
    images or for ImageNet. They do not show which convolution of a bottleneck has the
    stride. The conversion assumes the 3x3 one for CIFAR and the first one for ImageNet.
    Networks for ImageNet with names that end in b have it on the 3x3 one too: for them,
    give `stride_on="3x3"`. The conversion also assumes ReLU and an epsilon of 1e-5.

    These networks differ from the paper's: their first unit has its own first
    normalisation and activation, and units that change the shape project the activated
    input.

    Args:
        source: A file, see `read_state`, or the `state_dict()`: names to arrays or
            tensors. The mean and std of the images are not in the weights: `mean=` and
            `std=` add them to the network.
        input_shape: Shape of the images. None: 32 x 32 or 224 x 224 and the channels of
            the weights. For other channels the stem's kernel is adapted, see `load`.
        classes: Number of classes. If it differs from the source's, the network gets a
            new classifier. None: the source's.
        check: Images, in the data format of the result, and the source's outputs for
            them. The result must return the same, which reveals wrong assumptions.
        **options: Options of `ResidualNetwork`, such as `stacked=True`.

    Raises:
        ValueError: for weights of another network, and if the outputs differ from those
            in `check`.
        WeightsMismatch: if the source's weights do not fit the network, such as weights
            of pytorchcv's networks with squeeze-and-excitation.
        ImportError: if the file needs safetensors or torch, and that is missing.

    Example:

    >>> import keras_preact as kp
    >>> ours = kp.models.resnet_cifar(
    ...     20, arrangement="full_preactivation_raw_stem", shape_shortcut="projection"
    ... )
    >>> state = kp.weights.to_pytorchcv(ours)
    >>> state["features.stage2.unit1.identity_conv.weight"].shape
    (32, 16, 1, 1)
    >>> kp.weights.from_pytorchcv(state).name
    'preresnet20'

    Source: github.com/osmr/pytorchcv
    """
    state = files.torch_state(source)
    family = _family_of(state)
    if family is None:
        raise ValueError(
            "These are no weights of a PreResNet of pytorchcv, with names such as "
            "features.stage1.unit1.body.conv1.conv.weight and features.post_activ.bn.weight. They "
            f"are: {some(state)}"
        )
    return family.convert(
        state, input_shape=input_shape, classes=classes, check=check, options=options
    )


def to_pytorchcv(model: ResidualNetwork) -> dict[str, np.ndarray]:
    """Return a network's weights under pytorchcv's names, for
    `pytorchcv_model.load_state_dict` or `write_state`.

    Args:
        model: A network from `from_pytorchcv`, or one of the same structure, such as
            `kp.models.resnet_cifar(20, arrangement="full_preactivation_raw_stem",
            shape_shortcut="projection")`.

    Raises:
        ValueError: for a network that does not compute what pytorchcv's does. The
            message holds the options that differ.
        WeightsMismatch: for weights that pytorchcv has no name for.
    """
    config = model.get_config() if isinstance(model, ResidualNetwork) else {}
    if config.get("stem") == "3x3":
        family = CIFAR
    else:
        on_3x3 = config and getattr(blocks.get(config["block"]), "stride_on", None) == "3x3"
        family = IMAGENET_B if on_3x3 else IMAGENET
    return files.with_counters(family.extract(model))
