"""Convert weights from and to timm's pre-activation networks: `resnetv2_50`, ResNet-D
such as `resnetv2_18d`, Big Transfer's, and others.
"""

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from keras_preact import arrangements, blocks
from keras_preact.models.network import ResidualNetwork
from keras_preact.weights import files, layout
from keras_preact.weights.family import Family, Sample, some

#: Our layers of a stem of three convolutions to timm's.
THREE = {
    "stem_conv": "stem.conv1",
    "stem_norm_1": "stem.norm1",
    "stem_conv_2": "stem.conv2",
    "stem_norm_2": "stem.norm2",
    "stem_conv_3": "stem.conv3",
}
#: What timm adds to the name of a network with a stem of ours.
SUFFIXES = {"deep": "d", "tiered": "t"}


def _family(stem: str, normalization: str = "batch", *, standardize: bool = False) -> Family:
    suffix = SUFFIXES.get(stem, "")
    group = "_gn" if normalization == "group" and not standardize else ""
    return Family(
        title="timm's ResNetV2",
        assumes="The conversion assumes ReLU, strides on the 3x3 convolutions, and an epsilon of "
        "1e-5. With a stem of three convolutions it assumes average pooling before projections, "
        "with another stem none. With a stem of one convolution it assumes timm's default stem "
        "for batch normalisation, and Big Transfer's fixed stem and standardised weights for group "
        "normalisation.",
        network={
            **(THREE if suffix else {"stem_conv": "stem.conv"}),
            "head_norm": "norm",
            "head_classifier": "head.fc",
        },
        unit_name=lambda stage, unit: f"stages.{stage - 1}.blocks.{unit - 1}.",
        unit=layout.unit_names("norm1 conv1 norm2 conv2 norm3 conv3 downsample.conv"),
        numbers=re.compile(r"stages\.(\d+)\.blocks\.(\d+)\."),
        # the classifier is a 1x1 convolution
        leaves={
            **layout.TORCH_LEAVES,
            "dense": [("kernel", ".weight", layout.DENSE_OI11), ("bias", ".bias", layout.SAME)],
        },
        options={
            "arrangement": arrangements.RAW_STEM,
            "stem": stem,
            "normalization": normalization,
            "downsampling": "average" if suffix else "strided",
        },
        strides=(1, 2, 2, 2),
        block_options={"stride_on": "3x3", "standardize_weights": standardize},
        model_name=lambda structure: (
            f"resnetv2_{structure.depth}{suffix}{group}"
            + (f"x{structure.stem_filters // 64}_bit" if standardize else "")
        ),
    )


BATCH = _family("7x7")
#: Big Transfer's, with group normalisation and standardised weights: `resnetv2_50x1_bit`.
BIT = _family("7x7_zero_padded", "group", standardize=True)
#: Networks with a stem of three convolutions, by stem and normalisation: `resnetv2_50d`, `50d_gn`,
#: `50t`.
DEEP: Mapping[tuple[str, str], Family] = MappingProxyType(
    {(stem, norm): _family(stem, norm) for stem in SUFFIXES for norm in ("batch", "group")}
)

#: Pattern of the weights' names in networks without a counterpart here, to what these have.
OTHERS: Mapping[str, str] = MappingProxyType(
    {
        r"stem\.norm3?\.": "the original order of its units (the ResNet before a transformer)",
        r".*norm\d?\.v$": "EvoNorm (resnetv2_50d_evos)",
        r".*norm\d?\.tau$": "filter response normalisation (resnetv2_50d_frn)",
    }
)


def is_timm(state: Mapping[str, Any]) -> bool:
    """Whether the weights have the names of a timm ResNetV2, supported or not."""
    return any(map(BATCH.numbers.match, state)) and any(name.startswith("stem.") for name in state)


def _family_of(state: Mapping[str, np.ndarray]) -> Family:
    """Return the family whose networks have these weights."""
    normalization = "batch" if "norm.running_mean" in state else "group"
    widths = [state[name].shape[0] for name in state if re.match(r"stem\.conv[12]\.weight", name)]
    if widths:
        return DEEP["deep" if widths[0] == widths[-1] else "tiered", normalization]
    return BATCH if normalization == "batch" else BIT


def from_timm(
    source: str | os.PathLike | Mapping[str, Any],
    *,
    input_shape: Sequence[int | None] | None = None,
    classes: int | None = None,
    check: Sample | None = None,
    **options,
) -> ResidualNetwork:
    """Convert a ResNetV2 of timm to a network that computes the same.

    The weights show which network it is: resnetv2_18, 34, 50, 101 and 152, those with
    ResNet-D's stem and shortcuts (resnetv2_18d, 50d_gn, 50t, ...), and Big Transfer's
    resnetv2_50x1_bit to 152x4_bit, of any depth and width. They do not show everything.
    The conversion assumes ReLU, strides on the 3x3 convolutions, and an epsilon of
    1e-5. With a stem of three convolutions it assumes average pooling before
    projections, with another stem none. With a stem of one convolution it assumes
    timm's default stem for batch normalisation, and Big Transfer's fixed stem and
    standardised weights for group normalisation.

    Args:
        source: A file, see `read_state`, or the `state_dict()`: names to arrays or
            tensors. The mean and std of timm's images are in its configuration, not in
            the weights: `mean=127.5, std=127.5` add those of all pretrained ResNetV2.
        input_shape: Shape of the images. None: 224 x 224 and the channels of the
            weights. For other channels the stem's kernel is adapted as by
            `timm.create_model(..., in_chans=...)`, see `load`.
        classes: Number of classes. If it differs from the source's, the network gets a
            new classifier. None: the source's.
        check: Images, in the data format of the result, and the source's outputs for
            them. The result must return the same, which reveals wrong assumptions.
        **options: Options of `ResidualNetwork`, such as `stacked=True`,
            `output_stride=8` or `include_top=False`.

    Raises:
        ValueError: for weights of another network, also of timm's `evos` and `frn`
            variants, and if the outputs differ from those in `check`.
        WeightsMismatch: if the source's weights do not fit the network.
        ImportError: if the file needs safetensors or torch, and that is missing.

    Example:

    >>> import keras_preact as kp
    >>> ours = kp.models.resnet_imagenet(
    ...     18, arrangement="full_preactivation_raw_stem", input_shape=(32, 32, 3), classes=5
    ... )
    >>> state = kp.weights.to_timm(ours)
    >>> state["stages.1.blocks.0.downsample.conv.weight"].shape
    (128, 64, 1, 1)
    >>> kp.weights.from_timm(state, input_shape=(64, 64, 1), classes=2).output_shape
    (None, 2)
    """
    state = files.torch_state(source)
    if not is_timm(state):
        raise ValueError(
            "These are no weights of a timm ResNetV2, with names such as stem.conv.weight and "
            f"stages.0.blocks.0.conv1.weight. They are: {some(state)}"
        )
    if others := [
        variant
        for pattern, variant in OTHERS.items()
        if any(re.match(pattern, name) for name in state)
    ]:
        raise ValueError(
            "Only timm's resnetv2_18 to 152 and its *d, *t, *_gn and *_bit networks can be "
            "converted. "
            f"Received: a ResNetV2 with {' and '.join(others)}"
        )
    return _family_of(state).convert(
        state, input_shape=input_shape, classes=classes, check=check, options=options
    )


def to_timm(model: ResidualNetwork) -> dict[str, np.ndarray]:
    """Return a network's weights under timm's names, for `timm_model.load_state_dict`
    or `write_state`.

    Args:
        model: A network from `from_timm`, or one of the same structure, such as
            `kp.models.resnet_imagenet(50, arrangement="full_preactivation_raw_stem")`;
            with `stem="deep", downsampling="average"` it is timm's resnetv2_50d.

    Raises:
        ValueError: for a network that does not compute what timm's does. The message
            holds the options that differ.
        WeightsMismatch: for weights that timm has no name for.
    """
    config = model.get_config() if isinstance(model, ResidualNetwork) else {}
    standardized = getattr(blocks.get(config.get("block", "basic")), "standardize_weights", False)
    family = BIT if standardized else BATCH
    if config.get("stem") in SUFFIXES:
        group = config["normalization"] == "group"
        family = DEEP[config["stem"], "group" if group else "batch"]
    return files.with_counters(family.extract(model))
