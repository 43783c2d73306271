"""Wrong arguments raise a ValueError that says what was received and what would work."""

import numpy as np
import pytest

import keras_preact as kp
from keras_preact.models import dense_resnet, resnet_cifar, resnet_imagenet, wide_resnet
from tests.keras_preact import harness

Unit = kp.ResidualUnit


def named(**options):
    return kp.create_model("cifar_resnet20_preact", **options)


#: The call, and words that its message must contain.
WRONG = [
    # depths: the rule and the two nearest
    (lambda: resnet_cifar(21), "6n+2", "9n+2", "20 and 26", "depth=21"),
    (lambda: resnet_cifar(100, block="bottleneck"), "9n+2", "92 and 101"),
    (lambda: resnet_cifar(6, block="single"), "3n+2", "5 and 8"),
    (lambda: wide_resnet(27, 2), "6n+4", "22 and 28"),
    (lambda: resnet_imagenet(60), "18, 34, 50, 101, 152, 200", "34 and 50"),
    (lambda: dense_resnet(5), "2n+2", "4 and 6"),
    # numbers that are not integers, or not positive
    (lambda: resnet_imagenet((3, 0)), "positive integer"),
    (lambda: Unit(True), "`filters`", "True"),
    (lambda: Unit(4, strides=0), "strides=0"),
    (lambda: kp.blocks.Bottleneck(groups=1.5), "`groups`"),
    # names: the message has the nearest name, and all names
    (lambda: Unit(4, arrangement="preactivation"), "Did you mean", "full_preactivation"),
    (lambda: Unit(4, shortcut="gating"), "exclusive_gating", "shortcut_only_gating"),
    (lambda: Unit(4, normalization="batchnorm"), "Unknown normalization", "'batch'"),
    (lambda: Unit(4, block="bottelneck"), "Unknown block", "'bottleneck'"),
    (lambda: Unit(4, activation="rellu"), "rellu"),
    (lambda: resnet_cifar(20, block="dense"), "dense"),
    (lambda: Unit(4, shape_shortcut="pad"), "`shape_shortcut`", "'zero_pad'"),
    (lambda: kp.blocks.Bottleneck(stride_on="last"), "`stride_on`", "'3x3'"),
    (lambda: Unit(4, dropout_at="end"), "`dropout_at`", "'before_addition'"),
    (lambda: Unit(4, data_format="NCHW"), "`data_format`", "'channels_first'"),
    (lambda: resnet_cifar(8, pooling="mean"), "`pooling`", "'avg'"),
    (lambda: kp.Arrangement(first=("relu",)), "`first`", "'activation'"),
    # options that contradict each other
    (lambda: resnet_cifar(8, gate_bias=-6), "`gate_bias`", "'identity'"),
    (lambda: resnet_cifar(8, groups=2), "kp.blocks.Bottleneck(groups=...)"),
    (lambda: resnet_imagenet(18, groups=32, base_width=4), "kp.blocks.Bottleneck("),
    (lambda: Unit(2, block=kp.blocks.Bottleneck(base_width=16)), "`base_width`", "filters=2"),
    (lambda: Unit(4, block="dense", strides=2), "dense", "strides=2"),
    (lambda: Unit(4, block="single", dropout=0.1), "'single'", "before_addition"),
    # option names of other libraries, and unknown options
    (lambda: resnet_cifar(8, drop_out=0.1), "'drop_out'", "Did you mean 'dropout'"),
    (lambda: resnet_cifar(8, num_classes=5), "Did you mean classes=...?"),
    (lambda: named(pretrained=True), "Did you mean weights=...?"),
    (lambda: named(width=2), "Did you mean width_factor=...?"),
    (lambda: named(arangement="original"), "arangement"),
    # rates, means, deviations
    (lambda: Unit(4, dropout=1.0), "`dropout`", "[0, 1)"),
    (lambda: kp.shortcuts.Dropout(1.5), "`rate`", "1.5"),
    (lambda: resnet_cifar(8, mean=[1, 2]), "`mean`", "3"),
    # inputs
    (lambda: resnet_cifar(8, input_shape=(3, 32, 3)), "at least 4"),
    (lambda: resnet_imagenet(18, input_shape=(31, 64, 3)), "at least 32"),
    (lambda: resnet_cifar(8, input_shape=(32, 32)), "(height, width, channels)"),
    (lambda: resnet_cifar(8, input_shape=(32, 32.5, 3)), "32.5"),
    (lambda: Unit(4)(np.zeros((2, 3, 4))), "(batch, height, width, channels)"),
    (lambda: Unit(4, block="dense")(np.zeros(2)), "(batch, ..., features)"),
    (lambda: Unit(4).build((2, 8, 8, None)), "known number", "(2, 8, 8, None)"),
    (
        lambda: Unit(4, shape_shortcut="zero_pad")(np.zeros((2, 8, 8, 6))),
        *("projection", "6 channels in, 4 out"),
    ),
    # images in the other data format
    (
        lambda: resnet_cifar(8, input_shape=(32, 32, 3), data_format="channels_first"),
        "channels last?",
    ),
    (lambda: resnet_cifar(8, input_shape=(3, 32, 24)), "input_shape=(32, 24, 3)"),
    (lambda: named(input_shape=(3, 32, 32)), "channels first?"),
]


@pytest.mark.parametrize(("call", "words"), [(call, words) for call, *words in WRONG])
def test_wrong_arguments(call, words):
    message = harness.error_of(call)
    assert all(word in message for word in words), message


def test_arrangements_and_tables():
    assert kp.Arrangement(first="norm").first == ("norm",)
    for table in (kp.ARRANGEMENTS, kp.SHORTCUTS, kp.BLOCKS, kp.models.MODELS):
        with pytest.raises(TypeError):
            table["new"] = None
