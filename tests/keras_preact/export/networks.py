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
