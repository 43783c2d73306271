"""Networks that tests of exports share."""

import keras_preact as kp


def two_stages(
    width=16, shape_shortcut="zero_pad", block="basic", **options
) -> kp.models.ResidualNetwork:
    """A network of two stages of three units. If it is stacked, each is a unit and a
    stack of two.
    """
    options |= {
        "stem": "3x3",
        "stem_filters": width,
        "block": block,
        "classes": 10,
        "shape_shortcut": shape_shortcut,
    }
    return kp.models.ResidualNetwork([(width, 3), (2 * width, 3, 2)], **options)


def stacked_with_dropout(width) -> kp.models.ResidualNetwork:
    return two_stages(
        stacked=True,
        remat=True,
        stochastic_depth=0.5,
        shortcut="dropout",
        width=width,
        input_shape=(8, 8, 1),
        mean=[77.0],
        std=[95.0],
    )


def grouped(**options) -> kp.models.ResidualNetwork:
    """A network with grouped convolutions, for colour images of any size."""
    return kp.models.resnet_cifar(
        11,
        width_factor=0.25,
        block=kp.blocks.Bottleneck(groups=2),
        input_shape=(None, None, 3),
        **options,
    )
