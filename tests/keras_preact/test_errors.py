"""Wrong arguments raise a ValueError that says what was received and what would work."""

import functools
import math

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.dropout import VariableDropout
from keras_preact.layers import chains
from keras_preact.layers.spatial import BinomialPooling2D, PaddedConv2D, PaddedMaxPooling2D
from keras_preact.layers.whitening import Whitening2D
from keras_preact.models import dense_resnet, resnet_cifar, resnet_imagenet, wide_resnet
from keras_preact.models.tokens import Patches
from keras_preact.squeeze_excitation import SqueezeExcitation
from tests.keras_preact import harness

Unit = kp.ResidualUnit


def named(**options):
    return kp.create_model("cifar_resnet20_preact", **options)


def conv(**options):
    return PaddedConv2D(4, **{"kernel_size": 3, **options})


def maxima(pool_size, strides, **options):
    return PaddedMaxPooling2D(pool_size, strides, **options)


def whitening(**options):
    return Whitening2D(**options)


#: Layers with a data format.
WITH_FORMAT = {
    "PaddedConv2D": conv,
    "PaddedMaxPooling2D": lambda **o: PaddedMaxPooling2D(3, 2, **o),
    "BinomialPooling2D": lambda **o: BinomialPooling2D(3, 2, **o),
    "Whitening2D": whitening,
    "SqueezeExcitation": SqueezeExcitation,
    "Patches": lambda **o: Patches(2, **o),
    "ZeroPad": lambda **o: kp.shortcuts.ZeroPad(4, **o),
    "ResidualUnit": lambda **o: Unit(4, **o),
    "ResidualNetwork": lambda **o: resnet_cifar(8, **o),
    "TransformerNetwork": lambda **o: kp.models.transformer(1, **o),
}


@pytest.mark.parametrize("make", WITH_FORMAT.values(), ids=WITH_FORMAT)
def test_wrong_data_formats(make):
    message = harness.error_of(lambda: make(data_format="channel_first"))
    assert "data_format" in message
    assert "channel_first" in message


#: The call, and words that its message must contain.
WRONG = [
    # layers
    (lambda: conv(kernel_size=2), "`kernel_size` must be odd", "kernel_size=2", "Conv2D"),
    (lambda: conv(kernel_size=(3, 4)), "`kernel_size` must be odd", "kernel_size=(3, 4)"),
    (lambda: conv(strides=(1, 2)), "`strides` must be one number", "strides=(1, 2)"),
    (lambda: conv(dilation_rate=(2, 1)), "`dilation_rate` must be one number"),
    (lambda: maxima(4, 2), "`pool_size` must be 2 or odd", "pool_size=4"),
    (lambda: maxima((3, 2), 2), "`pool_size` must be one number"),
    (lambda: maxima(3, (1, 2)), "`strides` must be one number"),
    (lambda: maxima(2, 2, zeros=True), "`pool_size` must be odd with zeros=True"),
    (lambda: BinomialPooling2D(5, 2), "`size` must be one of 2, 3", "size=5"),
    (lambda: BinomialPooling2D(3, (2, 2)), "`strides` must be a positive integer"),
    (lambda: BinomialPooling2D(2, 2, dilation=2), "`dilation` needs size=2 and strides=1"),
    (lambda: whitening(kernel_size=(2, 3)), "`kernel_size` must be one number"),
    (lambda: whitening(strides=2), "always 1: leave it out", "strides=2"),
    (lambda: whitening(use_bias=True), "always False", "use_bias=True"),
    (lambda: SqueezeExcitation(0), "`reduction` must be a positive integer"),
    (lambda: Patches(0), "`size` must be a positive integer"),
    (lambda: Patches(4).build((None, 6, 8, 3)), "multiples of 4", "(None, 6, 8, 3)"),
    (lambda: kp.shortcuts.ZeroPad(0), "`filters` must be a positive integer"),
    (lambda: kp.shortcuts.ZeroPad(4, 0.5), "`strides` must be a positive integer"),
    (lambda: chains.StochasticDepth(1.0), "`rate`", "[0, 1)"),
    # depths: the rule and the two nearest
    (lambda: resnet_cifar(21), "6n+2", "9n+2", "20 and 26", "depth=21"),
    (lambda: resnet_cifar(100, block="bottleneck"), "9n+2", "92 and 101"),
    (lambda: resnet_cifar(6, block="single"), "3n+2", "5 and 8"),
    (lambda: wide_resnet(27, 2), "6n+4", "22 and 28"),
    (lambda: resnet_imagenet(60), "18, 34, 50, 101, 152, 200", "34 and 50"),
    (lambda: dense_resnet(5), "2n+2", "4 and 6"),
    # numbers that are not integers, or not positive
    (lambda: resnet_imagenet((3, 0)), "`units of a stage` must be a positive integer"),
    (lambda: resnet_imagenet(()), "at least one stage"),
    (lambda: kp.models.fast_resnet(0), "units of a stage=0"),
    (lambda: kp.models.fast_resnet(1.5), "units of a stage=1.5"),
    (lambda: kp.models.Stage(4, -1), "units of a stage=-1"),
    (lambda: kp.models.Stage(4, 1, 0.5), "strides of a stage=0.5"),
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
    # words for options that are on or off: each would count as on
    (lambda: Unit(4, dropout_varies="no"), "`dropout_varies`", "True, False", "'no'"),
    (lambda: Unit(4, zero_init_last="no"), "`zero_init_last`", "'no'"),
    (lambda: Unit(4, activate_shape_shortcut="no"), "`activate_shape_shortcut`", "'no'"),
    (lambda: resnet_cifar(8, include_top="no"), "`include_top`", "'no'"),
    (lambda: kp.blocks.Basic(standardize_weights="no"), "`standardize_weights`", "'no'"),
    (lambda: kp.TransformerUnit(4, num_heads=2, causal="no"), "`causal`", "'no'"),
    (lambda: kp.shortcuts.ScaledResidual(per_channel="no"), "`per_channel`", "'no'"),
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
    (lambda: Unit(4, block="single", dropout_varies=True), "'single'", "dropout_varies=True"),
    # option names of other libraries, and unknown options
    (lambda: resnet_cifar(8, drop_out=0.1), "'drop_out'", "Did you mean 'dropout'"),
    (lambda: resnet_cifar(8, num_classes=5), "Did you mean classes=...?"),
    (lambda: named(pretrained=True), "Did you mean weights=...?"),
    (lambda: named(width=2), "Did you mean width_factor=...?"),
    (lambda: named(arangement="original"), "arangement"),
    # models that are no networks
    (lambda: kp.transfer.freeze(keras.models.clone_model(dense_resnet(4))), "changed_copy(model)"),
    (lambda: kp.transfer.unfreeze(keras.Sequential()), "a model of `kp.models`. Received"),
    # rates, means, deviations
    (lambda: Unit(4, dropout=1.0), "`dropout`", "[0, 1)"),
    (lambda: kp.shortcuts.Dropout(1.5), "`rate`", "1.5"),
    (lambda: VariableDropout(-0.1), "`initial`", "[0, 1)", "-0.1"),
    (lambda: kp.set_dropout(dense_resnet(4, dropout_varies=True), 1.0), "`rate`", "[0, 1)"),
    (lambda: kp.set_dropout(dense_resnet(4, dropout=0.1), 0.0), "`dropout_varies=True`", "dense"),
    (lambda: kp.DropoutSchedule(0.1), "linear_schedule(0.1, steps=1000)", "schedule=0.1"),
    (lambda: resnet_cifar(8, mean=[1, 2]), "`mean`", "3"),
    # numbers that are none, in all that keep them for later
    *(
        (functools.partial(call, **{name: value}), f"`{name}`", "must be", repr(value))
        for call, name in (
            (functools.partial(resnet_cifar, 8), "width_factor"),
            (functools.partial(wide_resnet, 10), "width_factor"),
            (kp.shortcuts.ConstantScaling, "shortcut"),
            (kp.shortcuts.ConstantScaling, "residual"),
            (kp.shortcuts.ExclusiveGating, "bias"),
            (kp.shortcuts.ShortcutOnlyGating, "bias"),
            (kp.shortcuts.ScaledResidual, "initial"),
            (kp.shortcuts.Orthogonal, "epsilon"),
            (kp.optimizers.CoupledSGD, "coupled_weight_decay"),
            (kp.schedules.step_schedule, "learning_rate"),
            (kp.schedules.step_schedule, "factor"),
            (kp.schedules.step_schedule, "warmup_learning_rate"),
            (kp.schedules.step_schedule, "warmup_steps"),
            (functools.partial(kp.schedules.linear_schedule, steps=9), "learning_rate"),
            (functools.partial(kp.schedules.linear_schedule, 0.1), "steps"),
            (functools.partial(kp.schedules.linear_schedule, 0.1, 9), "stable_steps"),
            (functools.partial(kp.schedules.cosine_schedule, 0.1, 9), "warmup_steps"),
            (functools.partial(kp.schedules.cosine_schedule, 0.1, 9), "final_learning_rate"),
            (functools.partial(kp.analysis.expected_gain, "identity"), "units"),
        )
        for value in (math.nan, math.inf, "x", [])
    ),
    (lambda: resnet_cifar(8, mean=math.nan), "`mean` must be finite", "nan"),
    (lambda: resnet_cifar(8, std=math.inf), "`std` must be positive and finite", "inf"),
    (lambda: kp.preprocessing.Preprocessing(math.nan, 1, 8), "`mean`", "nan"),
    (lambda: kp.preprocessing.Preprocessing(0, math.nan, 8), "`std`", "nan"),
    (lambda: kp.preprocessing.Preprocessing(0, 1, 8, interpolation="cubic"), "'bicubic'"),
    (lambda: kp.schedules.cosine_schedule(0, 9), "`learning_rate`", "above 0", "0"),
    (lambda: kp.optimizers.CoupledSGD(rate_factors={"a": math.nan}), "`rate_factors['a']`", "nan"),
    (lambda: [*kp.analysis.random_lesions(4, [1], repeats=-1)], "`repeats`", "-1"),
    (lambda: kp.analysis.expected_gain("identity", -1), "`units`", "-1"),
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
