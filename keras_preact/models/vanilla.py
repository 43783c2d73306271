"""A plain convolutional network that trains at any depth because of its initialisation."""

from collections.abc import Sequence
from typing import Unpack

import keras

from keras_preact import _checks, initializers
from keras_preact.arrangements import Arrangement
from keras_preact.models.network import ResidualNetwork, Stage, fixed, image_shape
from keras_preact.models.network_options import NetworkOptions

#: Variances of weights and biases at which a tanh network is critical (arXiv 1806.05393, Sec. 4):
#: on average, gradients keep their size from layer to layer.
WEIGHT_VARIANCE = 1.05
BIAS_VARIANCE = 2.01e-5


def vanilla_cnn(
    depth: int,
    *,
    filters: int = 64,
    strides: int = 1,
    classes: int = 10,
    input_shape: Sequence[int | None] | None = None,
    **options: Unpack[NetworkOptions],
) -> ResidualNetwork:
    """Build a plain CNN: 3x3 convolutions of one width with tanh, no shortcut, no
    normalisation, delta-orthogonal weights.

    It is a residual network with one weight and no shortcut in each unit. So it supports
    the same functions: stacks, unit outputs, export.

    Args:
        depth: Weight layers, `n+2`: one in the stem, one in each of n units, and the
            classifier.
        filters: Width of every convolution.
        strides: Strides of the first unit.
        classes: Outputs of the classifier.
        input_shape: 32 x 32 x 3 by default, in the order of `data_format`; a size may
            be None.
        **options: Options of `ResidualNetwork` and `ResidualUnit`.

    Raises:
        ValueError: for a depth below 3, and if `ResidualUnit` raises one.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.vanilla_cnn(100, filters=8, input_shape=(8, 8, 1))
    >>> [segment.name for segment in model.segments], model.segments[1].depth
    (['stage1_unit1', 'stage1_units'], 97)

    Source: Xiao et al., arXiv 1806.05393.
    """
    _checks.positive_int(depth, "depth")
    if depth < 3:
        raise ValueError(
            "`depth` must be n+2 (a stem, n units, a classifier), at least 3. Received: "
            f"depth={depth}"
        )
    defaults: NetworkOptions = {
        "arrangement": Arrangement(after_addition=("activation",), stem=("activation",)),
        "shortcut": "none",
        "normalization": "none",
        "activation": "tanh",
        "use_bias": True,
        "kernel_initializer": initializers.DeltaOrthogonal(WEIGHT_VARIANCE**0.5),
        "bias_initializer": keras.initializers.RandomNormal(stddev=BIAS_VARIANCE**0.5),
        "name": f"vanilla_cnn{depth}",
    }
    return ResidualNetwork(
        [Stage(filters, depth - 2, strides)],
        classes=classes,
        input_shape=image_shape(input_shape, 32, options.get("data_format")),
        **fixed(
            "vanilla_cnn", defaults | options, stem="3x3", stem_filters=filters, block="single"
        ),
    )
