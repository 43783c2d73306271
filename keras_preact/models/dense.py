"""An MLP of dense residual units."""

from collections.abc import Sequence
from typing import Unpack

from keras_preact import _checks
from keras_preact.models.network import ResidualNetwork, Stage, fixed
from keras_preact.models.network_options import NetworkOptions


def dense_resnet(
    depth: int,
    *,
    width: int = 64,
    classes: int = 10,
    input_shape: Sequence[int] = (64,),
    **options: Unpack[NetworkOptions],
) -> ResidualNetwork:
    """Build an MLP of dense residual units, for vectors: the paper's unit with dense
    layers for its weights.

    Args:
        depth: Weight layers, `2n+2`: one in the stem, two in each of n units, and the
            classifier.
        width: Width of every unit.
        classes: Outputs of the classifier.
        input_shape: `(features,)`.
        **options: Options of `ResidualNetwork` and `ResidualUnit`.

    Raises:
        ValueError: for a depth that fits no n, and if `ResidualUnit` raises one.

    Example:

    >>> import keras_preact as kp
    >>> kp.models.dense_resnet(12, width=32, input_shape=(20,), classes=3).output_shape
    (None, 3)
    """
    _checks.positive_int(depth, "depth")
    if depth < 4 or depth % 2:
        below = max(4, depth - 1)
        raise ValueError(
            f"`depth` must be 2n+2; the nearest are {below} and {below + 2}. Received: "
            f"depth={depth}"
        )
    _checks.positive_int(width, "width")
    options.setdefault("name", f"dense_resnet{depth}")
    return ResidualNetwork(
        [Stage(width, (depth - 2) // 2)],
        classes=classes,
        input_shape=input_shape,
        **fixed("dense_resnet", options, stem="dense", stem_filters=width, block="dense"),
    )
