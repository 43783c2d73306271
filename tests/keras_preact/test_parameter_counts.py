"""Exact numbers of trainable parameters: the paper's, torchvision's, and the arithmetic
that gives them.
"""

import math

import pytest

import keras_preact as kp
from keras_preact.published import PARAMETER_COUNTS

WIDTHS = (16, 32, 64)


def counts(build, *arguments, **options):
    """All trainable parameters, and only those of kernels and the classifier's bias
    ("conv + fc").

    The kernels are zeros: to draw 60 million values takes longer than all other tests here.
    """
    model = build(*arguments, kernel_initializer="zeros", **options)
    sizes = {weight.path: math.prod(weight.shape) for weight in model.trainable_weights}
    convs = [size for path, size in sizes.items() if not path.endswith(("gamma", "beta"))]
    return sum(sizes.values()), sum(convs)


def basic_counts(depth):
    """6n+2 with option A: there is one BN per convolution, in any arrangement. (The first
    unit of a pre-activation net lacks a BN, and there is one before the pooling.)
    """
    convs, norms, channels = 3 * 3 * 3 * 16, 2 * 16, 16
    for width in WIDTHS:
        for _ in range((depth - 2) // 6):
            convs += 3 * 3 * channels * width + 3 * 3 * width * width
            norms += 2 * (2 * width)
            channels = width
    fc = 64 * 10 + 10
    return convs + fc + norms, convs + fc


def bottleneck_counts(depth):
    """9n+2, full pre-activation: a stage begins with a projection without BN, and the
    input of each convolution of a branch has a BN.
    """
    convs, norms, channels = 3 * 3 * 3 * 16, 2 * 16, 16
    for s, width in enumerate(WIDTHS):
        for u in range((depth - 2) // 9):
            convs += channels * width + 3 * 3 * width * width + width * 4 * width
            convs += channels * 4 * width if u == 0 else 0
            norms += 2 * (2 * width)
            norms += 0 if (s, u) == (0, 0) else 2 * channels  # the stem has the first unit's BN
            channels = 4 * width
    fc = 256 * 10 + 10
    norms += 2 * channels  # before the pooling
    return convs + fc + norms, convs + fc


def test_published():
    """This includes the deepest networks, without building them."""
    for network, published in PARAMETER_COUNTS.items():
        depth = int(network.removeprefix("ResNet-"))
        formula = bottleneck_counts if depth in (164, 1001) else basic_counts
        assert published == formula(depth)


@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_basic_in_every_arrangement(arrangement):
    depth = 56 if arrangement == "full_preactivation" else 20
    assert counts(kp.models.resnet_cifar, depth, arrangement=arrangement) == basic_counts(depth)


def test_bottleneck():
    options = {"block": "bottleneck", "stacked": True}
    assert counts(kp.models.resnet_cifar, 29, **options) == bottleneck_counts(29)
    assert counts(kp.models.resnet_cifar, 164, stacked=True) == bottleneck_counts(164)


@pytest.mark.parametrize(
    ("depth", "options", "count"),
    [
        (18, {}, 11_689_512),
        (50, {}, 25_557_032),
        (50, {"groups": 32, "base_width": 4}, 25_028_904),
        (152, {"stacked": True}, 60_192_808),
    ],
    ids=str,
)
def test_imagenet_original_as_in_torchvision(depth, options, count):
    build = kp.models.resnet_imagenet
    assert counts(build, depth, arrangement="original", **options)[0] == count


def test_wide_resnet():
    assert counts(kp.models.wide_resnet, 28, 10)[0] == 36_479_194


def test_cost_of_the_shortcuts():
    """Identity shortcuts have no parameters; a gate, a 1x1 convolution, a scale and the
    coefficients of hyper-connections have parameters in every unit.
    """
    squares = sum(width**2 for width in WIDTHS)
    gates = squares + sum(WIDTHS)  # a bias for each channel
    # 24 coefficients from all channels of the unit's input, their biases, three scalars
    coefficients = sum(4 * width * 24 + 24 + 3 for width in (16, 16, 32))
    cost = {"exclusive_gating": gates, "shortcut_only_gating": gates, "conv1x1": squares}
    cost["scaled_residual"] = len(WIDTHS)
    cost["hyper_connections"] = coefficients
    for name in kp.SHORTCUTS:
        options = {"shortcut": name, "shape_shortcut": "zero_pad"}
        found = counts(kp.models.resnet_cifar, 8, **options)[0]
        assert found - basic_counts(8)[0] == cost.get(name, 0)
