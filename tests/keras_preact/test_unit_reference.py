"""Every unit computes what the paper's figures say: the library against NumPy."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

#: Block, filters, shape of the input and strides; some units keep the shape, some change it.
#: Height and width differ, and one of them is odd.
SHAPES = {
    "basic, kept": ("basic", 4, (2, 5, 6, 4), 1),
    "basic, changed": ("basic", 4, (2, 5, 6, 3), 2),
    "bottleneck, kept": ("bottleneck", 2, (2, 5, 6, 8), 1),
    "bottleneck, changed": ("bottleneck", 2, (2, 5, 6, 3), 2),
    "dense, kept": ("dense", 4, (6, 4), 1),
    "dense, changed": ("dense", 4, (6, 3), 1),
}


def check(filters, shape, make=None, **options):
    """Compare the output at inference and in training, and the moving statistics after
    each.

    `make` has options of the library's unit that mean the same as some of `options`.
    """
    named = {key: value for key, value in options.items() if key not in ("factors", "hyper")}
    named |= make or {}
    x = harness.images(*harness.with_streams(shape, named.get("shortcut", "identity")))
    unit = harness.unit_on(x, filters, **named)
    before = harness.weights(unit)
    y = harness.numpy(unit(x, training=False))
    np.testing.assert_allclose(y, harness.reference_of(unit, **options)(x), 1e-4, 1e-4)
    assert not harness.changed(unit, before)  # inference changes nothing
    if options.get("shortcut") == "dropout":
        return  # random in training: test_dropout.py

    expected = harness.reference_of(unit, training=True, **options)
    want = expected(x)
    np.testing.assert_allclose(harness.numpy(unit(x, training=True)), want, 1e-4, 1e-4)
    assert harness.changed(unit, before) == expected.updates.keys()
    after = harness.weights(unit)
    for path, value in expected.updates.items():
        np.testing.assert_allclose(after[path], value, 1e-4, 1e-5, err_msg=path)


#: Every arrangement with every shortcut. Shapes are a Latin square, so that every pair of options
#: occurs. The identity shortcut has every shape.
COMBINATIONS = [
    (arrangement, shortcut, shape)
    for i, arrangement in enumerate(kp.ARRANGEMENTS)
    for j, shortcut in enumerate(kp.SHORTCUTS)
    for k, shape in enumerate(SHAPES)
    if (i + j) % len(SHAPES) == k or shortcut == "identity"
]


@pytest.mark.parametrize(("arrangement", "shortcut", "shape"), COMBINATIONS)
def test_arrangements_and_shortcuts(arrangement, shortcut, shape):
    block, filters, input_shape, strides = SHAPES[shape]
    check(
        filters,
        input_shape,
        block=block,
        strides=strides,
        arrangement=arrangement,
        shortcut=shortcut,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"shape_shortcut": "zero_pad"},
        {"shape_shortcut": "zero_pad", "activate_shape_shortcut": False},
        {"shape_shortcut": "zero_pad", "shortcut": "conv1x1"},
        {"activate_shape_shortcut": False},
        {"activate_shape_shortcut": False, "shortcut": "conv1x1"},
        {"block": "bottleneck", "stride_on": "3x3"},
        {"block": "bottleneck", "stride_on": "3x3", "shape_shortcut": "zero_pad"},
        {"block": "single"},
        {"block": "dense", "shape_shortcut": "zero_pad"},
        {"block": "dense", "activate_shape_shortcut": False},
    ],
    ids=lambda options: ", ".join(map(str, options.values())),
)
@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_units_that_change_the_shape(arrangement, options):
    dense = options.get("block") == "dense"
    check(
        4,
        (6, 3) if dense else (2, 5, 6, 3),
        arrangement=arrangement,
        strides=1 if dense else 2,
        **options,
    )


#: Filters, shape of the input and options.
OTHERS = [
    *((4, (2, size, size + 1, 4), {"strides": s}) for size in (5, 6, 7) for s in (1, 3)),
    # a stride alone changes the shape; a single layer may keep it
    (4, (2, 5, 6, 4), {"arrangement": "original", "strides": 2}),
    (4, (2, 5, 6, 4), {"arrangement": "original", "block": "single"}),
    *(  # 12 channels: 4 groups of 3
        (12, (2, 5, 6, 6), {"arrangement": name, "normalization": norm, "strides": 2})
        for name in kp.ARRANGEMENTS
        for norm in ("layer", "group", "rms", "none")
    ),
    *(
        (6, (5, 6), {"block": "dense", "normalization": norm, "arrangement": "original"})
        for norm in ("layer", "group", "rms", "none", "batch")
    ),
]


@pytest.mark.parametrize(("filters", "shape", "options"), OTHERS, ids=str)
def test_sizes_and_normalizations(filters, shape, options):
    check(filters, shape, **options)


@pytest.mark.parametrize("activation", [*reference.ACTIVATIONS, keras.ops.tanh], ids=harness.label)
def test_activations(activation):
    given = "tanh" if callable(activation) else activation
    check(4, (2, 5, 6, 4), activation=given, make={"activation": activation})


@pytest.mark.parametrize(
    ("groups", "base_width", "width"), [(2, 64, 8), (4, 32, 8), (2, 24, 2), (1, 128, 8)]
)
def test_groups_and_base_width(groups, base_width, width):
    """The width of the 3x3 convolution is int(filters * base_width / 64) * groups, and each
    group sees only its own channels.
    """
    options = {"block": "bottleneck", "groups": groups, "strides": 2, "stride_on": "3x3"}
    check(4, (2, 5, 6, 5), make={"base_width": base_width}, **options)
    unit = harness.unit_of(4, base_width=base_width, **options)
    unit.build((2, 5, 6, 5))
    assert {path: value.shape for path, value in harness.kernels(unit).items()} == {
        "branch/conv_1/kernel": (1, 1, 5, width),
        "branch/conv_2/kernel": (3, 3, width // groups, width),
        "branch/conv_3/kernel": (1, 1, width, 16),
        "projection/conv/kernel": (1, 1, 5, 16),
    }


@pytest.mark.parametrize("block", ["basic", "bottleneck", "dense"])
def test_biases(block):
    """The projection has one as well."""
    shape = (4, 3) if block == "dense" else (2, 5, 6, 3)
    check(4, shape, block=block, make={"use_bias": True})
    paths = harness.paths(harness.unit_on(np.zeros(shape), 4, block=block, use_bias=True))
    biases, kernels = (sum(path.endswith(end) for path in paths) for end in ("/bias", "/kernel"))
    assert biases == kernels


@pytest.mark.parametrize("factors", [(0.0, 1.0), (0.5, 1.0), (0.5, 0.5), (0.3, 2.0)])
def test_factors_of_constant_scaling(factors):
    scaling = kp.shortcuts.ConstantScaling(*factors)
    check(4, (2, 5, 6, 4), shortcut="constant_scaling", factors=factors, make={"shortcut": scaling})
