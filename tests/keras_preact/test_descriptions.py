"""`describe()` of units, stacks and networks, and what notebooks show of them."""

import html
import re

import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness


def words(line: str) -> list[str]:
    return line.partition(": ")[2].split(", ")


@pytest.mark.parametrize("block", ["basic", "bottleneck", "single"])
@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_a_unit_lists_its_layers_in_the_order_of_their_weights(arrangement, block):
    unit = kp.ResidualUnit(4, block=block, arrangement=arrangement, strides=2)
    text = unit.describe()
    unit(np.zeros((1, 8, 8, 3), "float32"))
    branch, shortcut, after = unit.describe().splitlines()
    assert text.splitlines()[0] == branch  # for a unit that is not built, too
    paths = dict.fromkeys(weight.path.rsplit("/", 1)[0] for weight in unit.weights)
    for line, place in ((branch, "branch"), (shortcut, "projection"), (after, "after_addition")):
        listed = [word.split()[0] for word in words(line)]
        named = [path.split("/")[-1] for path in paths if f"/{place}/" in path]
        assert [word for word in listed if word in named] == named
        rest = [word for word in listed if word not in named]
        assert set(rest) <= {"relu", "identity"}
    assert ("relu" in words(after)) == ("activation" in kp.ARRANGEMENTS[arrangement].after_addition)


#: Options of a unit, and its layers on F, h and f.
DESCRIBED = [
    (
        {"arrangement": "original", "shortcut": "exclusive_gating", "dropout": 0.1},
        "conv_1 3x3, norm_1, relu, dropout_1, conv_2 3x3, norm_2",
        "conv 1x1, ExclusiveGating",
        "relu",
    ),
    (
        {"strides": 2, "downsampling": "average", "shape_shortcut": "zero_pad", "block": "single"},
        "norm_0, relu, conv_1 3x3/2",
        "projection_downsampling, zero_pad",
        "identity",
    ),
    (
        {"block": "swiglu", "arrangement": "post_norm", "normalization": "rms", "shortcut": "none"},
        "dense_1, silu, * gate_1, dense_2",
        "NoShortcut",
        "norm",
    ),
]


@pytest.mark.parametrize(("options", "branch", "shortcut", "after"), DESCRIBED, ids=harness.label)
def test_the_whole_text(options, branch, shortcut, after):
    unit = harness.unit_of(4, **options)
    described = unit.describe()
    assert described == f"F: {branch}\nh: {shortcut}\nf: {after}"
    unit.build((2, 5, 4) if unit.block.name == "swiglu" else (2, 8, 8, 4))
    assert unit.describe() == described


@pytest.mark.parametrize(
    ("shortcut", "line"),
    [
        ("identity", "h: identity"),
        ("none", "h: NoShortcut"),
        ("conv1x1", "h: conv 1x1, Conv1x1"),
        ("constant_scaling", "h: ConstantScaling"),
        ("exclusive_gating", "h: conv 1x1, ExclusiveGating"),
        ("dropout", "h: dropout, Dropout"),
        ("scaled_residual", "h: ScaledResidual"),
        ("hyper_connections", "h: coefficients, HyperConnections"),
    ],
)
def test_shortcuts(shortcut, line):
    assert kp.ResidualUnit(4, shortcut=shortcut).describe().splitlines()[1] == line


def test_a_stack_describes_its_unit():
    unit = kp.ResidualUnit(4, block="bottleneck")
    stack = kp.UnitStack(unit, 5)
    assert stack.describe() == f"5 units, each:\n{unit.describe()}"
    assert "5 units" in stack._repr_html_()


@pytest.mark.parametrize("stacked", [False, True])
def test_the_table_of_a_network_adds_up(stacked):
    network = kp.models.resnet_imagenet((2, 3, 4, 2), input_shape=(32, 32, 3), stacked=stacked)
    table, *kinds = network.describe().split("\n\n")
    _, _, *rows = [re.split(r"  +", line) for line in table.splitlines()]
    *parts, (_, units, parameters) = rows
    counts = [int(row[-1].replace(",", "")) for row in parts]
    assert sum(counts) == network.count_params() == int(parameters.replace(",", ""))
    assert sum(int(row[1]) for row in parts if row[0].startswith("stage")) == int(units)
    assert int(units) == len(network.unit_names)
    listed = [re.match(r"(\w+)(?: and (\d+) more)?\n", kind).groups() for kind in kinds]
    assert sum(1 + int(more or 0) for _, more in listed) == int(units)
    unstacked = kp.models.unstack(network) if stacked else network
    for name, _ in listed:
        text = unstacked.get_layer(name).describe()
        assert f"{text}" in network.describe()


def test_a_notebook_shows_the_same_and_names_as_text():
    network = kp.models.resnet_cifar(8, input_shape=(8, 8, 1), name="a<b>")
    page = network._repr_html_()
    assert "a&lt;b&gt;" in page
    assert "<b>a" not in page
    for line in network.describe().splitlines():
        for word in re.split(r"  +|, |: ", line):
            assert html.escape(word.removesuffix(" ")) in page
