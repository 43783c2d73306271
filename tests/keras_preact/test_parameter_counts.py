"""Exact numbers of trainable parameters: the paper's, torchvision's, and the arithmetic
behind them.
"""

import math

import pytest

import keras_preact as kp

WIDTHS = (16, 32, 64)


def counts(build, *arguments, **options):
    """All trainable parameters, and those of kernels and the classifier's bias alone
    ("conv + fc").

    Zeros: drawing 60 million values takes longer than everything else here.
    """
    model = build(*arguments, kernel_initializer="zeros", **options)
    sizes = {weight.path: math.prod(weight.shape) for weight in model.trainable_weights}
    return sum(sizes.values()), sum(
        size for path, size in sizes.items() if not path.endswith(("gamma", "beta"))
    )


def basic_counts(depth):
    """6n+2 with option A: each convolution has a BN, in any arrangement (the extra BN
    in front of the pooling of a pre-activation net is the one that its first unit
    lacks)."""
    n = (depth - 2) // 6
    convs, norms, channels = 3 * 3 * 3 * 16, 2 * 16, 16
    for width in WIDTHS:
        for _ in range(n):
            convs += 3 * 3 * channels * width + 3 * 3 * width * width
            norms += 2 * (2 * width)
            channels = width
    fc = 64 * 10 + 10
    return convs + fc + norms, convs + fc


def bottleneck_counts(depth):
    """9n+2, full pre-activation: a projection without BN where a stage begins, BN on
    what enters each convolution.
    """
    n = (depth - 2) // 9
    convs, norms, channels = 3 * 3 * 3 * 16, 2 * 16, 16
    for s, width in enumerate(WIDTHS):
        for u in range(n):
            convs += channels * width + 3 * 3 * width * width + width * 4 * width
            convs += channels * 4 * width if u == 0 else 0
            norms += 2 * (2 * width)
            norms += 0 if (s, u) == (0, 0) else 2 * channels  # the first unit's stands in the stem
            channels = 4 * width
    fc = 256 * 10 + 10
    norms += 2 * channels  # in front of the pooling
    return convs + fc + norms, convs + fc


#: Depth: with BN affine, conv + fc only.
BASIC = {
    20: (269_722, 268_346),
    32: (464_154, 461_882),
    44: (658_586, 655_418),
    56: (853_018, 848_954),
    110: (1_727_962, 1_719_866),
    1202: (19_421_274, 19_331_642),
}
BOTTLENECK = {164: (1_703_258, 1_679_034), 1001: (10_327_706, 10_178_490)}


def depths(table):
    return [
        pytest.param(depth, marks=[pytest.mark.soak] if depth > 1000 else []) for depth in table
    ]


@pytest.mark.parametrize("depth", depths(BASIC))
def test_basic(depth):
    assert basic_counts(depth) == BASIC[depth]
    assert counts(kp.models.resnet_cifar, depth) == BASIC[depth]


@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_every_arrangement_has_the_same_count(arrangement):
    assert counts(kp.models.resnet_cifar, 20, arrangement=arrangement) == BASIC[20]


@pytest.mark.parametrize("depth", depths(BOTTLENECK))
def test_bottleneck(depth):
    assert bottleneck_counts(depth) == BOTTLENECK[depth]
    assert counts(kp.models.resnet_cifar, depth) == BOTTLENECK[depth]


@pytest.mark.soak
def test_units_of_resnet_1001():
    model = kp.models.resnet_cifar(1001, width_factor=1 / 16)
    assert len(model.units) == 333
    assert [sum(unit.name.startswith(f"stage{s}_") for unit in model.units) for s in (1, 2, 3)] == [
        111,
        111,
        111,
    ]


@pytest.mark.parametrize(
    ("depth", "count"),
    [
        (18, 11_689_512),
        (34, 21_797_672),
        (50, 25_557_032),
        pytest.param(101, 44_549_160, marks=pytest.mark.soak),
        pytest.param(152, 60_192_808, marks=pytest.mark.soak),
    ],
)
def test_imagenet_original_as_in_torchvision(depth, count):
    assert counts(kp.models.resnet_imagenet, depth, arrangement="original")[0] == count


def test_resnext_original_as_in_torchvision():
    assert (
        counts(kp.models.resnet_imagenet, 50, arrangement="original", groups=32, base_width=4)[0]
        == 25_028_904
    )


def test_wide_resnet():
    assert counts(kp.models.wide_resnet, 28, 10)[0] == 36_479_194


def test_cost_of_the_shortcuts():
    """Identity shortcuts cost nothing; a gate and a 1x1 convolution cost theirs in
    every unit.
    """
    build = kp.models.resnet_cifar
    shortcuts = {
        name: counts(build, 20, shortcut=name, shape_shortcut="zero_pad")[0] - BASIC[20][0]
        for name in kp.SHORTCUTS
    }
    squares = sum(3 * width**2 for width in WIDTHS)
    gates = squares + sum(3 * width for width in WIDTHS)  # a bias for each channel
    assert shortcuts == {
        "identity": 0,
        "constant_scaling": 0,
        "exclusive_gating": gates,
        "shortcut_only_gating": gates,
        "conv1x1": squares,
        "dropout": 0,
        "none": 0,
    }
