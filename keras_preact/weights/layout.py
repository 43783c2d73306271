"""The names that other libraries give to the weights of a residual network, and the
order of their axes.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from keras_preact.models.named_weights import SAME, Transform

#: A convolution's kernel: (out, in, height, width) in Torch, (height, width, in, out) here.
CONV_OIHW = Transform(
    lambda array: array.transpose(2, 3, 1, 0), lambda array: array.transpose(3, 2, 0, 1)
)
#: A dense layer's kernel: (out, in) in Torch, (in, out) here.
DENSE_OI = Transform(lambda array: array.transpose(1, 0), lambda array: array.transpose(1, 0))
#: A dense layer stored as a 1x1 convolution, (out, in, 1, 1).
DENSE_OI11 = Transform(
    lambda array: array.reshape(array.shape[:2]).transpose(1, 0),
    lambda array: array.T[:, :, None, None],
)


#: The weights of a layer: for each our name, the end of the source's name, and the transform.
Leaves = Sequence[tuple[str, str, Transform]]

_KERAS_KERNEL: Leaves = [("kernel", "/kernel", SAME), ("bias", "/bias", SAME)]
#: Kind of layer to its weights.
KERAS_LEAVES: Mapping[str, Leaves] = MappingProxyType(
    {
        "conv": _KERAS_KERNEL,
        "norm": [
            (name, f"/{name}", SAME) for name in ("gamma", "beta", "moving_mean", "moving_variance")
        ],
        "dense": _KERAS_KERNEL,
    }
)
#: Our layers outside the units to their names in keras.applications and keras-hub.
KERAS_NETWORK: Mapping[str, str] = MappingProxyType(
    {"stem_conv": "conv1_conv", "head_norm": "post_bn", "head_classifier": "predictions"}
)
TORCH_LEAVES: Mapping[str, Leaves] = MappingProxyType(
    {
        "conv": [("kernel", ".weight", CONV_OIHW), ("bias", ".bias", SAME)],
        "norm": [
            ("gamma", ".weight", SAME),
            ("beta", ".bias", SAME),
            ("moving_mean", ".running_mean", SAME),
            ("moving_variance", ".running_var", SAME),
        ],
        "dense": [("kernel", ".weight", DENSE_OI), ("bias", ".bias", SAME)],
    }
)

#: Our layers of a unit, in the order in which `unit_names` takes a source's names.
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
    """Return `UNIT_LAYERS` to a source's `names`, which are separated by spaces."""
    return MappingProxyType(dict(zip(UNIT_LAYERS, names.split(), strict=False)))


def kind_of(layer: str) -> str:
    """Return the kind of one of our layers, a key of `KERAS_LEAVES`."""
    last = layer.rsplit("/", 1)[-1]
    return "norm" if "norm" in last else "dense" if last == "head_classifier" else "conv"
