"""Wrong arguments end in a ValueError that says what was received and what would work."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.models import dense_resnet, resnet_cifar, resnet_imagenet, wide_resnet
from tests.keras_preact import harness

Unit = kp.ResidualUnit


def on(unit, *shape):
    return unit(np.zeros(shape, "float32"))


#: What is called, the parts that its message must hold.
WRONG = [
    # depths: the rule and the two nearest
    (lambda: resnet_cifar(21), ["6n+2", "9n+2", "20 and 26", "depth=21"]),
    (lambda: resnet_cifar(3), ["6n+2", "8 and 11", "depth=3"]),
    (lambda: resnet_cifar(100, block="bottleneck"), ["9n+2", "92 and 101"]),
    (lambda: resnet_cifar(21, block="basic"), ["6n+2", "20 and 26"]),
    (lambda: resnet_cifar(6, block="single"), ["3n+2", "5 and 8"]),
    (lambda: wide_resnet(27, 2), ["6n+4", "22 and 28", "depth=27"]),
    (lambda: resnet_imagenet(60), ["18, 34, 50, 101, 152, 200", "34 and 50"]),
    (lambda: resnet_imagenet(()), ["at least one stage"]),
    (lambda: dense_resnet(5), ["2n+2", "4 and 6", "depth=5"]),
    # no integers, no positive ones
    (lambda: resnet_cifar(20.0), ["`depth`", "positive integer", "20.0"]),
    (lambda: resnet_imagenet(50.0), ["`depth`", "50.0"]),
    (lambda: resnet_imagenet(None), ["`depth`", "depth=None"]),
    (lambda: resnet_imagenet((3, 0)), ["positive integer", "0"]),
    (lambda: dense_resnet(4, width=0), ["`width`", "width=0"]),
    (lambda: dense_resnet("4"), ["`depth`", "'4'"]),
    (lambda: resnet_cifar(8, classes=0), ["`classes`", "classes=0"]),
    (lambda: resnet_cifar(8, width_factor=0.01), ["`width_factor`", "0.01"]),
    (lambda: Unit(0), ["`filters`", "filters=0"]),
    (lambda: Unit(4.0), ["`filters`", "4.0"]),
    (lambda: Unit(True), ["`filters`", "True"]),
    (lambda: Unit(4, strides=0), ["`strides`", "strides=0"]),
    (lambda: kp.blocks.Bottleneck(groups=1.5), ["`groups`", "1.5"]),
    (lambda: kp.blocks.Bottleneck(base_width=0), ["`base_width`", "0"]),
    # names: the nearest, and all
    (
        lambda: Unit(4, arrangement="preactivation"),
        ["Unknown arrangement", "Did you mean", "full_preactivation", "Received"],
    ),
    (lambda: Unit(4, arrangement=3), ["Unknown arrangement", "arrangement=3"]),
    (
        lambda: Unit(4, shortcut="gating"),
        ["Unknown shortcut", "exclusive_gating", "shortcut_only_gating"],
    ),
    (lambda: Unit(4, shortcut="Identity"), ["Did you mean 'identity'"]),
    (lambda: Unit(4, normalization="batchnorm"), ["Unknown normalization", "'batch'", "rms"]),
    (lambda: Unit(4, block="bottelneck"), ["Unknown block", "'bottleneck'", "dense"]),
    (lambda: resnet_cifar(20, block="dense"), ["dense"]),
    (lambda: resnet_cifar(20, arrangement="orginal"), ["Did you mean 'original'"]),
    (lambda: Unit(4, shape_shortcut="pad"), ["`shape_shortcut`", "'zero_pad'", "'pad'"]),
    (lambda: kp.blocks.Bottleneck(stride_on="last"), ["`stride_on`", "'3x3'", "'last'"]),
    (lambda: Unit(4, dropout_at="end"), ["`dropout_at`", "'before_addition'", "'end'"]),
    (lambda: Unit(4, data_format="NCHW"), ["`data_format`", "'channels_first'", "'NCHW'"]),
    (lambda: resnet_cifar(8, pooling="mean"), ["`pooling`", "'avg'", "'mean'"]),
    (lambda: kp.Arrangement(first=("relu",)), ["`first`", "'norm'", "'activation'", "'relu'"]),
    # options that contradict each other
    (lambda: resnet_cifar(8, gate_bias=-6), ["`gate_bias`", "exclusive_gating", "'identity'"]),
    (lambda: Unit(4, groups=2), ["'groups'", "kp.blocks.Bottleneck(groups=...)"]),
    (lambda: Unit(4, drop_out=0.1), ["'drop_out'", "Did you mean 'dropout'"]),
    (lambda: resnet_imagenet(18, groups=32, base_width=4), ["kp.blocks.Bottleneck("]),
    (lambda: Unit(2, block=kp.blocks.Bottleneck(base_width=16)), ["`base_width`", "filters=2"]),
    (lambda: Unit(4, block="dense", strides=2), ["dense", "strides=2"]),
    (lambda: Unit(4, block="single", dropout=0.1), ["'single'", "before_addition"]),
    # options by the names of other libraries
    (lambda: resnet_cifar(8, num_classes=5), ["'num_classes'", "Did you mean classes=...?"]),
    (
        lambda: kp.create_model("cifar_resnet20_preact", pretrained=True),
        ["'pretrained'", "Did you mean weights=...?"],
    ),
    (
        lambda: kp.create_model("cifar_resnet20_preact", width=2),
        ["'width'", "Did you mean width_factor=...?"],
    ),
    (
        lambda: kp.models.pre_ln_transformer(1, num_classes=5),
        ["'num_classes'", "Did you mean classes=...?"],
    ),
    (lambda: kp.models.pre_ln_transformer(1, norm="rms"), ["'norm'", "'normalization'"]),
    # rates, means, deviations
    (lambda: Unit(4, dropout=1.0), ["`dropout`", "[0, 1)", "1.0"]),
    (lambda: kp.shortcuts.Dropout(1.5), ["`rate`", "1.5"]),
    (lambda: resnet_cifar(8, mean=[1, 2]), ["`mean`", "3"]),
    (lambda: resnet_cifar(8, std=[1, 2, 3, 4]), ["`std`", "3"]),
    (lambda: resnet_cifar(8, std=[1, -1, 1]), ["`std`", "positive"]),
    # inputs
    (lambda: resnet_cifar(8, input_shape=(3, 32, 3)), ["at least 4", "(3, 32, 3)"]),
    (lambda: resnet_imagenet(18, input_shape=(31, 64, 3)), ["at least 32", "(31, 64, 3)"]),
    (
        lambda: resnet_cifar(8, input_shape=(32, 32)),
        ["`input_shape`", "(height, width, channels)", "(32, 32)"],
    ),
    (lambda: resnet_cifar(8, input_shape=(32, 32, None)), ["known number", "channels"]),
    # images of the other order
    (
        lambda: resnet_cifar(8, input_shape=(32, 32, 3), data_format="channels_first"),
        ["channels last?", "data_format='channels_last', or input_shape=(3, 32, 32)"],
    ),
    (
        lambda: resnet_cifar(8, input_shape=(3, 32, 24)),
        ["channels first?", "data_format='channels_first', or input_shape=(32, 24, 3)"],
    ),
    (lambda: wide_resnet(10, 1, input_shape=(1, None, None)), ["channels first?"]),
    (lambda: resnet_imagenet(18, input_shape=(3, 224, 224)), ["channels first?"]),
    (
        lambda: kp.create_model("cifar_resnet20_preact", input_shape=(3, 32, 32)),
        ["channels first?", "Received: input_shape=(3, 32, 32), data_format='channels_last'"],
    ),
    (lambda: resnet_cifar(8, input_shape=(32, 32.5, 3)), ["input_shape (width)", "32.5"]),
    (lambda: dense_resnet(4, input_shape=(3, 4)), ["`input_shape`", "(features)", "(3, 4)"]),
    (lambda: on(Unit(4), 2, 3, 4), ["(batch, height, width, channels)", "(2, 3, 4)"]),
    (lambda: on(Unit(4, block="dense"), 2), ["(batch, ..., features)"]),
    (lambda: Unit(4).build((2, 8, 8, None)), ["known number", "(2, 8, 8, None)"]),
    (lambda: Unit(4).compute_output_shape((2, 8)), ["(2, 8)"]),
    (
        lambda: on(Unit(4, shape_shortcut="zero_pad"), 2, 8, 8, 6),
        ["projection", "6 channels in, 4 out"],
    ),
]


@pytest.mark.parametrize(("call", "parts"), WRONG, ids=[" ".join(parts) for _, parts in WRONG])
def test_wrong_arguments(call, parts):
    message = harness.error_of(call)
    for part in parts:
        assert part in message


def test_options_that_do_not_exist():
    with pytest.raises(ValueError, match="widht"):
        resnet_cifar(8, widht=2)


def test_unknown_activation():
    with pytest.raises(ValueError, match="rellu"):
        Unit(4, activation="rellu")


def test_units_errors_in_a_network():
    """The error of a unit inside a network is the unit's."""
    with pytest.raises(ValueError, match="Zero padding cannot take channels away"):
        kp.models.ResidualNetwork(
            [kp.models.Stage(8, 1), kp.models.Stage(4, 1)],
            stem="3x3",
            stem_filters=8,
            block="basic",
            input_shape=(8, 8, 3),
            classes=2,
            shape_shortcut="zero_pad",
        )


def test_a_name_is_an_arrangements_tuple_of_one():
    assert kp.Arrangement(first="norm", last="activation") == kp.Arrangement(
        first=("norm",), last=("activation",)
    )
    assert kp.Arrangement(first="norm").first == ("norm",)


def test_tables_are_read_only():
    for table in (kp.ARRANGEMENTS, kp.SHORTCUTS, kp.BLOCKS):
        with pytest.raises(TypeError):
            table["new"] = None
    with pytest.raises(AttributeError):
        kp.ARRANGEMENTS["original"].first = ()


def test_classes_are_registered():
    """A file names `keras_preact>ResidualUnit`, and loads without `custom_objects`
    wherever the package is imported.
    """
    for cls in (kp.ResidualUnit, kp.Arrangement, kp.models.ResidualNetwork, *kp.SHORTCUTS.values()):
        assert keras.saving.get_registered_name(cls) == f"keras_preact>{cls.__name__}"
