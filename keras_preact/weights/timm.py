"""timm's pre-activation networks, `resnetv2_50` and the like, and Big Transfer's among
them, as networks of ours, and back.
"""

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from keras_preact import arrangements
from keras_preact.models.imagenet import DEPTHS
from keras_preact.models.network import ResidualNetwork
from keras_preact.weights import _torch_states, layout, structure, transfer

LAYOUT = layout.Layout(
    network=MappingProxyType(
        {"stem_conv": "stem.conv", "head_norm": "norm", "head_classifier": "head.fc"}
    ),
    unit=MappingProxyType(
        {
            "branch/norm_0": "norm1",
            "branch/conv_1": "conv1",
            "branch/norm_1": "norm2",
            "branch/conv_2": "conv2",
            "branch/norm_2": "norm3",
            "branch/conv_3": "conv3",
            "projection/conv": "downsample.conv",
        }
    ),
    unit_name=lambda stage, unit: f"stages.{stage - 1}.blocks.{unit - 1}.",
    # the classifier is a 1x1 convolution
    leaves={
        **layout.TORCH_LEAVES,
        "dense": [("kernel", "weight", layout.DENSE_OI11), ("bias", "bias", layout.SAME)],
    },
    separator=".",
)

STRIDES = (1, 2, 2, 2)

#: Kind to the options of `ResidualNetwork` that compute what it does. `bit`: group normalisation
#: and standardised weights, `resnetv2_50x1_bit` and its like.
KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "batch": {"arrangement": arrangements.RAW_STEM, "stem": "7x7", "stride_on": "3x3"},
        "bit": {
            "arrangement": arrangements.RAW_STEM,
            "stem": "7x7_zero_padded",
            "stride_on": "3x3",
            "normalization": "group",
            "standardize_weights": True,
        },
    }
)

#: What matches a name of a network that has no counterpart here, and what that network has.
OTHERS: Mapping[str, str] = MappingProxyType(
    {
        r"stem\.conv[123]\.": "a stem of three 3x3 convolutions (resnetv2_50d, 50t and their like)",
        r"stem\.norm": "the original order of its units (the ResNet in front of a vision transformer)",
        r".*norm\d?\.v$": "EvoNorm (resnetv2_50d_evos)",
        r".*norm\d?\.tau$": "filter response normalisation (resnetv2_50d_frn)",
    }
)

_UNIT = re.compile(r"stages\.(\d+)\.blocks\.(\d+)\.")


def is_timm(state: Mapping[str, Any]) -> bool:
    """Whether names are those of a timm ResNetV2, of a kind that is supported or not."""
    return any(map(_UNIT.match, state)) and any(name.startswith("stem.") for name in state)


def structure_of(state: Mapping[str, np.ndarray]) -> _torch_states.Structure:
    """Return what a state tells of its network: the kind by its names, depth and widths
    by its shapes.

    Raises:
        ValueError: for a state that is none of timm's ResNetV2, and for those that have
            no counterpart; the message says what they have.
    """
    if not is_timm(state):
        raise ValueError(
            "These are no weights of a timm ResNetV2, with names such as stem.conv.weight and "
            f"stages.0.blocks.0.conv1.weight. They are: {', '.join([*state][: transfer.SHOWN])}"
        )
    if found := [
        what for pattern, what in OTHERS.items() if any(re.match(pattern, name) for name in state)
    ]:
        raise ValueError(
            "Of timm's ResNetV2, resnetv2_18 to 152 and the *_bit networks have a counterpart "
            f"here. Received: one with {' and '.join(found)}"
        )
    return _torch_states.read_structure(
        state,
        what="A timm ResNetV2",
        stem="stem.conv.weight",
        classifier=("head.fc.weight",),
        unit=_UNIT,
        weight=lambda stage, i: f"{LAYOUT.unit_name(stage, 1)}conv{i}.weight",
        strides=STRIDES,
        options=KINDS["batch" if "norm.running_mean" in state else "bit"],
    )


def from_timm(
    source: str | os.PathLike | Mapping[str, Any],
    *,
    input_shape: Sequence[int | None] | None = None,
    classes: int | None = None,
    **options,
) -> ResidualNetwork:
    """Make a ResNetV2 of timm into a network of ours that computes the same.

    Which one it is follows from the weights: resnetv2_18, 34, 50, 101 and 152, and Big
    Transfer's resnetv2_50x1_bit to 152x4_bit, at any depth and width.

    Args:
        source: A file, see `read_state`, or the `state_dict()`: names to arrays or
            tensors. timm's pictures are prepared with a mean and std that stand in its
            configuration, not in the weights: `mean=` and `std=` build them in.
        input_shape: None: 224 x 224 and the channels of the weights. With other
            channels the stem's kernel is adapted as by `timm.create_model(...,
            in_chans=...)`, see `load`.
        classes: Of the classifier; where they are not the source's, it starts anew.
            None: the source's.
        **options: Of `ResidualNetwork`, such as `stacked=True`, `output_stride=8` or
            `include_top=False`.

    Raises:
        ValueError: for weights of another network; of timm's `d`, `t`, `evos`, `frn`
            and `gn` variants too.
        WeightsMismatch: for weights that do not fit each other.
        ImportError: for a file whose format needs safetensors or torch where that is
            missing.

    Example:

    >>> import keras_preact as kp
    >>> ours = kp.models.resnet_imagenet(18, arrangement="full_preactivation_raw_stem", input_shape=(32, 32, 3), classes=5)
    >>> state = kp.weights.to_timm(ours)
    >>> state["stages.1.blocks.0.downsample.conv.weight"].shape
    (128, 64, 1, 1)
    >>> kp.weights.from_timm(state, input_shape=(64, 64, 1), classes=2).output_shape
    (None, 2)
    """
    state = _torch_states.state_of(source)
    found = structure_of(state)
    options.setdefault("name", _name(found))
    model = found.build(size=224, input_shape=input_shape, classes=classes, **options)
    found.load(model, state, LAYOUT.entries([stage.units for stage in found.stages]))
    return model


def to_timm(model: ResidualNetwork) -> dict[str, np.ndarray]:
    """Return a network's weights as timm names them, for `timm_model.load_state_dict`
    or `write_state`.

    Args:
        model: From `from_timm`, or of equal structure, such as
            `kp.models.resnet_imagenet(50, arrangement="full_preactivation_raw_stem")`.

    Raises:
        ValueError: for a network that does not compute what one of timm's does; the
            message holds the options that differ.
        WeightsMismatch: for weights that timm has no name for.
    """
    target = "timm's ResNetV2"
    kind = "bit" if _is_standardized(model) else "batch"
    _torch_states.check_computes_as(model, STRIDES, KINDS[kind], target)
    return _torch_states.extract(
        model, LAYOUT.entries([stage.units for stage in structure.stages(model)])
    )


def _is_standardized(model: Any) -> bool:
    return isinstance(model, ResidualNetwork) and bool(model.get_config()["standardize_weights"])


def _name(found: _torch_states.Structure) -> str:
    """Return timm's name of the network."""
    row = (found.block, tuple(stage.units for stage in found.stages))
    depth = next(
        (str(depth) for depth, known in DEPTHS.items() if known == row), "_".join(map(str, row[1]))
    )
    return f"resnetv2_{depth}" + (
        f"x{found.stem_filters // 64}_bit" if "standardize_weights" in found.options else ""
    )
