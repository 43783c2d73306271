"""The audit: clean networks pass, every planted mistake is found where it is, and the
figures equal NumPy's.
"""

import itertools
import json
import re

import keras
import numpy as np
import pytest
from keras import layers

import keras_preact as kp
from keras_preact.analysis.audit import Audit, AuditFinding, Status, audit, order
from keras_preact.analysis.audit.check import Limits
from keras_preact.analysis.audit.checks import CHECKS
from tests.keras_preact import harness
from tests.keras_preact.harness import error_of, images

pytestmark = pytest.mark.backend

IMAGES = images(8, 8, 8, 3)
VECTORS = images(16, 20)


def cifar(depth=20, **options):
    return kp.models.resnet_cifar(depth, input_shape=(8, 8, 3), **options)


def imagenet(**options):
    """Two stages: fewer shapes to compile."""
    return kp.models.resnet_imagenet(
        (2, 1), width_factor=0.25, input_shape=(16, 16, 3), classes=5, **options
    )


def statuses(result) -> dict[str, str]:
    """The checks that did not pass."""
    return {
        finding.check: str(finding.status)
        for finding in result.findings
        if finding.status != Status.PASS
    }


ONE_BY_ONE = pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="the many shapes of a whole ResNet-50 are compiled one by one, for a minute",
)

CLEAN = {
    "basic": lambda: cifar(14),
    "bottleneck": lambda: imagenet(block="bottleneck"),
    "dropout in the branch": lambda: kp.models.wide_resnet(
        10, 1, input_shape=(8, 8, 3), dropout=0.1
    ),
    "stochastic depth": lambda: cifar(
        14, stochastic_depth=0.5, dropout=0.1, dropout_at="before_addition", stacked=True
    ),
    "layer normalisation": lambda: cifar(14, normalization="layer"),
    "blurred, squeezed and excited": lambda: imagenet(
        block="basic", downsampling="blur", squeeze_excitation=4
    ),
    "no top": lambda: cifar(14, include_top=False),
    "imagenet": lambda: imagenet(block="basic"),
    "pre-norm transformer": lambda: kp.models.pre_ln_transformer(
        2, width=16, input_shape=(8, 8, 3)
    ),
    "vectors": lambda: kp.models.dense_resnet(12, width=16, input_shape=(20,)),
    "gated pre-norm transformer": lambda: kp.models.pre_ln_transformer(
        2, width=16, input_shape=(8, 8, 3), normalization="rms", mlp="swiglu"
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_networks_pass(name):
    model = CLEAN[name]()
    result = audit(model, images(8, *model.input_shape[1:]))
    assert result.passed, result
    assert result.arrangement == ("pre_norm" if "transformer" in name else "full_preactivation")
    assert result.units == len(model.units)
    assert [finding.check for finding in result.findings] == [check.name for check in CHECKS]


class Chain:
    """A full pre-activation network of Keras layers, with places for a mistake.

    Args:
        normalized: Whether unit 2 has its second normalisation.
        head: Layers between the last addition and the pooling: n, a.
        shortcut: Shortcut of unit 2, a function of x and the activated x.
        after: Function of unit 2's sum.
        dropout: Dropout rate in every branch.
        epsilon: Epsilon of every normalisation.
        options: Options of every convolution.
    """

    def __init__(
        self,
        normalized=True,
        head="na",
        shortcut=lambda x, activated: x,
        after=None,
        dropout=0.0,
        epsilon=1e-5,
        **options,
    ):
        options = {"kernel_initializer": "he_normal"} | options
        inputs = keras.Input((8, 8, 3))

        def norm(x, name):
            return layers.BatchNormalization(momentum=0.9, epsilon=epsilon, name=name)(x)

        def conv(x, name):
            return layers.Conv2D(8, 3, padding="same", use_bias=False, name=name, **options)(x)

        x = layers.ReLU(name="stem_relu")(norm(conv(inputs, "stem"), "stem_norm"))
        for i in (1, 2, 3):
            activated = (
                x if i == 1 else layers.ReLU(name=f"unit{i}_relu1")(norm(x, f"unit{i}_norm1"))
            )
            y = conv(activated, f"unit{i}_conv1")
            y = norm(y, f"unit{i}_norm2") if normalized or i != 2 else y
            y = layers.ReLU(name=f"unit{i}_relu2")(y)
            y = layers.Dropout(dropout)(y) if dropout else y
            y = conv(y, f"unit{i}_conv2")
            x = layers.Add(name=f"unit{i}")([shortcut(x, activated) if i == 2 else x, y])
            x = after(x) if after and i == 2 else x
        for j, kind in enumerate(head):
            x = norm(x, f"head_norm{j}") if kind == "n" else layers.ReLU(name=f"head_relu{j}")(x)
        x = layers.Dense(5, name="classifier")(layers.GlobalAveragePooling2D()(x))
        self.model = keras.Model(inputs, x, name="chain")


@keras.saving.register_keras_serializable("tests")
class Gate(keras.Layer):
    """`x (1 - sigmoid(W x))`."""

    def build(self, shape):
        self.conv = layers.Conv2D(shape[-1], 1)
        self.conv.build(shape)

    def call(self, x):
        return x * (1 - keras.ops.sigmoid(self.conv(x)))


@pytest.fixture(scope="module")
def chain():
    """A clean network, not to be changed."""
    return Chain().model


def conv1x1(x, activated):
    return layers.Conv2D(8, 1, use_bias=False, name="on_shortcut")(x)


#: Mistake: options of `Chain`, checks that must not pass, and the place that the first of them must
#: name.
MISTAKES = {
    "nothing": ({}, {}, None),
    "dropout in the branch": ({"dropout": 0.2}, {}, None),
    "activated shortcut": (
        {"shortcut": lambda x, activated: activated},
        {"identity path": "FAIL", "activation after addition": "WARN", "branch order": "FAIL"},
        "unit2",
    ),
    "relu after addition": (
        {"after": lambda x: layers.ReLU()(x)},
        {"identity path": "FAIL", "activation after addition": "FAIL"},
        "unit3",
    ),
    "relu after the last addition": (
        {"head": "ana"},
        {"final activation": "FAIL"},
        "head_relu0",
    ),
    "large epsilon": ({"epsilon": 0.1}, {"normalised input": "FAIL"}, "stem_norm"),
    "norm after addition": (
        {"after": lambda x: layers.BatchNormalization(name="after")(x)},
        {
            "identity path": "FAIL",
            "final activation": "WARN",
        },  # the norm of unit 3 directly follows it
        "unit3",
    ),
    "scaling": ({"shortcut": lambda x, activated: 0.5 * x}, {"identity path": "FAIL"}, "unit2"),
    "rescaling": (
        {"shortcut": lambda x, activated: layers.Rescaling(1.25)(x)},
        {"identity path": "FAIL"},
        "unit2",
    ),
    "gate": ({"shortcut": lambda x, activated: Gate()(x)}, {"identity path": "FAIL"}, "unit2"),
    "convolution": ({"shortcut": conv1x1}, {"identity path": "FAIL"}, "unit2"),
    "dropout on the shortcut": (
        {"shortcut": lambda x, activated: layers.Dropout(0.3)(x)},
        {"dropout": "FAIL", "identity path": "FAIL"},
        "unit2",
    ),
    "dropout after addition": (
        {"after": lambda x: layers.SpatialDropout2D(0.5)(x)},
        {"dropout": "FAIL", "identity path": "FAIL"},
        "unit3",
    ),
    "no final activation": ({"head": ""}, {"final activation": "FAIL"}, "unit3"),
    "final norm alone": ({"head": "n"}, {"final activation": "FAIL"}, "unit3"),
    "final relu alone": ({"head": "a"}, {"final activation": "FAIL"}, "unit3"),
    "doubled final norm": ({"head": "nna"}, {"final activation": "WARN"}, "head_norm1"),
    "doubled final activation": ({"head": "nana"}, {"final activation": "WARN"}, "head_norm0"),
    "weight without norm": (
        {"normalized": False},
        {"branch order": "FAIL", "normalised input": "FAIL"},
        "unit2_conv2",
    ),
    "one seed": (
        {"kernel_initializer": keras.initializers.HeNormal(seed=3)},
        {"distinct weights": "FAIL"},
        "unit1_conv2",
    ),
    "constant weights": (
        {"kernel_initializer": keras.initializers.Constant(0.02)},
        {"live weights": "FAIL"},
        "stem",
    ),
}


#: Words for a mistake on the identity path.
WORDS = {
    "scaling": "a scaling by 0.5",
    "gate": "a gate",
    "convolution": "a weight layer",
    "dropout on the shortcut": "dropout",
    "norm after addition": "a normalisation",
    "activated shortcut": "a normalisation and an activation",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found_at_its_place_and_nothing_else(mistake):
    options, wanted, place = MISTAKES[mistake]
    result = audit(Chain(**options).model, IMAGES)
    assert statuses(result) == wanted, result
    if wanted:
        assert result[next(iter(wanted))].locations[0] == place
    assert str(result.worst) == max(wanted.values(), key=list(Status).index, default="PASS")
    if mistake in WORDS:
        found = result["identity path"]
        assert found.detail.startswith(
            f"In 1 of 3 units, the identity path has {WORDS[mistake]}. In {place}: "
        )
        assert len(found.locations) == 1


@pytest.mark.parametrize(
    ("layer", "check"),
    [
        (layers.ReLU(name="oops"), "activation after addition"),
        (layers.Dropout(0.5, name="oops"), "dropout"),
        (layers.BatchNormalization(name="oops"), "identity path"),
    ],
    ids=["activation", "dropout", "norm"],
)
def test_the_layer_on_the_identity_path_is_named(layer, check):
    result = audit(Chain(after=layer).model, IMAGES)
    assert "In unit3: oops." in result["identity path"].detail
    assert "oops" in result[check].detail
    assert result["identity path"].advice == "Take oops off the shortcut."
    # one activation is no pair of normalisation and activation to start before
    assert "Start" not in result["activation after addition"].advice


class ActivatedShortcuts:
    """A network of six units whose identity shortcuts start after BN-ReLU, without a
    last BN-ReLU.
    """

    def __init__(self):
        inputs = keras.Input((8, 8, 3))

        def conv(x, filters, name, size=3, strides=1):
            return layers.Conv2D(filters, size, strides, padding="same", use_bias=False, name=name)(
                x
            )

        x = conv(inputs, 8, "stem")  # torch 2.13 crashes on AVX2 with strides and fewer channels
        for i, (filters, strides) in enumerate(
            [(8, 1), (8, 1), (16, 2), (16, 1), (32, 2), (32, 1)], start=1
        ):
            activated = layers.ReLU(name=f"relu{i}a")(
                layers.BatchNormalization(name=f"norm{i}a")(x)
            )
            shortcut = (
                activated if strides == 1 else conv(activated, filters, f"projection{i}", 1, 2)
            )
            y = conv(activated, filters, f"conv{i}a", strides=strides)
            y = layers.ReLU(name=f"relu{i}b")(layers.BatchNormalization(name=f"norm{i}b")(y))
            x = layers.Add(name=f"unit{i}")([shortcut, conv(y, filters, f"conv{i}b")])
        x = layers.Dense(5, name="classifier")(layers.GlobalAveragePooling2D()(x))
        self.model = keras.Model(inputs, x)


def test_shortcuts_that_start_after_an_activation():
    result = audit(ActivatedShortcuts().model, IMAGES)
    assert statuses(result) == {
        "identity path": "FAIL",
        "activation after addition": "WARN",
        "branch order": "WARN",
        "final activation": "FAIL",
    }
    checks = ("identity path", "activation after addition", "branch order")
    path, activation, branch = (result[name] for name in checks)
    assert set(path.locations) == set(activation.locations) == {"unit2", "unit4", "unit6"}
    first, *others = (name[-1] for name in path.locations)
    assert path.advice == (
        f"Take norm{first}a and relu{first}a off the shortcut, and likewise the layers on the "
        f"shortcuts of unit{others[0]} and unit{others[1]}."
    )
    names = [f"norm{name[-1]}a" for name in activation.locations]
    assert (
        activation.advice
        == f"Start each shortcut at the addition, before {names[0]}, {names[1]} and {names[2]}."
    )
    assert branch.locations == ("conv2a", "conv4a", "conv6a")
    assert branch.detail == (
        "In 3 of 6 units, the normalisation and activation before a weight layer also feed the "
        "shortcut (first: before conv2a). Most units are read as 'bn_after_addition'."
    )
    assert branch.advice == "Start each shortcut at the addition, before norm2a, norm4a and norm6a."
    text = str(result)
    assert f"Where (worst first): {', '.join(path.locations[:2])} and {path.locations[2]}." in text
    assert "Where: conv2a, conv4a and conv6a." in text  # they are equally bad
    assert "Where: unit6." in text
    assert "read as bn_after_addition." in text


def test_advice_without_a_shared_activation():
    found = audit(Chain(normalized=False).model, IMAGES)["branch order"]
    assert found.detail.startswith(
        "In 1 of 3 units, a weight layer has no normalisation and activation right before it"
    )


def multiply(model, factors):
    for name, factor in factors.items():
        layer = model.get_layer(name)
        layer.set_weights([layer.get_weights()[0] * factor, *layer.get_weights()[1:]])
    return model


@pytest.mark.parametrize(
    ("name", "factor", "check", "status"),
    [
        ("unit2_conv1", 10, "weight scale", "WARN"),
        ("unit2_conv1", 200, "weight scale", "FAIL"),
        ("unit2_conv1", 1e-3, "weight scale", "WARN"),
        ("classifier", 50, "output scale", "WARN"),
        ("classifier", np.nan, "live weights", "FAIL"),
    ],
    ids=str,
)
def test_weights_of_the_wrong_size(name, factor, check, status):
    finding = audit(multiply(Chain().model, {name: factor}), IMAGES)[check]
    assert (str(finding.status), finding.locations[0]) == (status, name)


def test_a_branch_of_zeros_never_learns_and_one_zero_weight_does():
    assert audit(multiply(Chain().model, {"unit2_conv2": 0}), IMAGES).passed
    found = audit(multiply(Chain().model, {"unit2_conv1": 0, "unit2_conv2": 0}), IMAGES)[
        "live weights"
    ]
    assert (found.status, found.locations) == (Status.FAIL, ("unit2",))


def test_dead_channels():
    model = Chain().model
    gamma, beta, mean, variance = model.get_layer("unit2_norm2").get_weights()
    beta[:5] = -100
    model.get_layer("unit2_norm2").set_weights([gamma, beta, mean, variance])
    found = audit(model, IMAGES)["dead channels"]
    assert (found.status, found.figure, found.locations) == (Status.FAIL, 5 / 8, ("unit2_relu2",))


PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3)).astype("float32")
NORMALIZED = {"mean": 127.5, "std": 74.0}


@pytest.mark.parametrize(
    ("options", "sample", "status"),
    [
        ({}, PIXELS, "FAIL"),
        ({}, PIXELS / 255, "PASS"),
        ({}, PIXELS - 127.5, "WARN"),  # as the first ImageNet networks take them
        ({}, PIXELS * 0, "WARN"),
        (NORMALIZED, PIXELS, "PASS"),
        (NORMALIZED, PIXELS / 255, "FAIL"),
        (NORMALIZED, PIXELS / 16, "FAIL"),
        ({"mean": 0.5, "std": 0.25}, PIXELS, "FAIL"),
        ({"mean": 0.5, "std": 0.25}, PIXELS / 255, "PASS"),
    ],
)
def test_pixels_in_the_wrong_range(options, sample, status):
    found = audit(cifar(8, **options), sample)["sample scale"]
    assert found.status == status
    assert found.locations == (() if status == "PASS" else ("stem_conv",))
    std = np.sqrt(sample.var((0, 1, 2)).mean()) / options.get("std", 1.0)
    np.testing.assert_allclose(found.figure, std, rtol=1e-5, atol=1e-7)


ON_PATH = {"identity path", "activation after addition"}
ARRANGEMENTS = {
    "original": ({*ON_PATH, "branch order", "normalised input"}, "WARN"),
    "bn_after_addition": ({*ON_PATH, "branch order"}, "FAIL"),
    "relu_before_addition": ({"branch order", "normalised input"}, "WARN"),
    "relu_only_preactivation": ({"branch order", "normalised input"}, "WARN"),
    "bn_only_preactivation": ({*ON_PATH, "branch order"}, "WARN"),
    "full_preactivation": (set(), "PASS"),
}


@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_arrangements_are_recognised(arrangement):
    result = audit(cifar(14, arrangement=arrangement), IMAGES)
    checks, worst = ARRANGEMENTS[arrangement]
    assert result.arrangement == arrangement
    assert (set(statuses(result)), str(result.worst)) == (checks, worst)


def test_post_activation_fails_in_a_deep_network(monkeypatch):
    assert order.POST_ACTIVATION_DEPTHS == (50, 200)
    monkeypatch.setattr(order, "POST_ACTIVATION_DEPTHS", (5, 10))
    for units, status in ((3, Status.WARN), (4, Status.FAIL)):
        inputs = keras.Input((20,))
        x = layers.Dense(8)(inputs)
        for i in range(1, units + 1):
            y = layers.Dense(8, kernel_initializer="zeros")(layers.Dense(8, activation="relu")(x))
            x = layers.ReLU()(layers.Add(name=f"unit{i}")([x, y]))
        result = audit(keras.Model(inputs, layers.Dense(3)(x)), VECTORS)
        assert result.depth == 2 * units + 2
        for check in ("activation after addition", "identity path"):
            # the first sum is half negative, the others are what a ReLU returned
            assert (result[check].status, result[check].locations[0]) == (status, "unit2")


def test_the_share_of_values_cut_is_that_of_the_zeros():
    model = cifar(14, arrangement="original")
    outputs = keras.Model(model.input, model.unit_outputs).predict(IMAGES, verbose=0)
    # x_{l+1} = ReLU(sum) is 0 if the sum was cut; an x_{l+1} counts if the next unit keeps its
    # shape
    shares = [
        np.mean(x == 0)
        for x, following in itertools.pairwise(outputs)
        if x.shape == following.shape
    ]
    found = audit(model, IMAGES)["activation after addition"]
    np.testing.assert_allclose(found.figure, np.mean(shares), rtol=1e-6)
    units = [unit.name for unit in model.units]
    worst = max(
        (share, name) for share, name in zip(shares, [units[i] for i in (1, 3, 5)], strict=True)
    )
    assert found.locations[0] == worst[1]


def test_the_change_on_the_identity_path_is_that_of_numpy():
    """`||x - (1 - g) x|| / ||x||` with a NumPy gate; without normalisation, training
    equals inference.
    """
    model = kp.models.dense_resnet(
        8,
        width=6,
        input_shape=(20,),
        shortcut="shortcut_only_gating",
        normalization="none",
        gate_bias=-1.0,
    )
    outputs = keras.Model(model.input, [model.units[0].input, *model.unit_outputs])
    wanted = {}
    for x, unit in zip(outputs.predict(VECTORS, verbose=0), model.units, strict=False):
        weights = harness.weights(unit)
        z = x @ weights["gate/dense/kernel"] + weights["gate/dense/bias"]
        gate = 1 / (1 + np.exp(-z))
        wanted[unit.name] = np.linalg.norm(gate * x) / np.linalg.norm(x)
    found = audit(model, VECTORS)["identity path"]
    assert found.locations == tuple(sorted(wanted, key=wanted.get, reverse=True))
    np.testing.assert_allclose(found.figure, max(wanted.values()), rtol=1e-5)


class Plain:
    """Forward pass of a dense pre-activation tanh network without normalisation, in
    NumPy, float64.
    """

    def __init__(self, model):
        self.weights = {weight.path: np.array(weight, "float64") for weight in model.weights}
        self.units = [unit.name for unit in model.units]

    def x(self, images, added=None, until=None):
        """Return x_1 ... x_L and the output; `added` is an index and a shift of that
        x_l.
        """
        x = np.tanh(images @ self.weights["stem_dense/kernel"])
        outputs = []
        for i, name in enumerate(self.units):
            y = x if i == 0 else np.tanh(x)
            y = (
                np.tanh(y @ self.weights[f"{name}/branch/dense_1/kernel"])
                @ self.weights[f"{name}/branch/dense_2/kernel"]
            )
            x = x + y
            if added is not None and added[0] == i:
                x = x + added[1]
            outputs.append(x)
        head = np.tanh(x)
        return outputs, head @ self.weights["head_classifier/kernel"] + self.weights[
            "head_classifier/bias"
        ]

    def gradient_norm(self, images, unit, loss, step=1e-6):
        """Return the gradient norm by central differences."""
        shape = self.x(images)[0][unit].shape
        gradient = np.zeros(shape)
        for index in np.ndindex(shape):
            shift = np.zeros(shape)
            shift[index] = step
            above, below = (loss(self.x(images, (unit, sign * shift))[1]) for sign in (1, -1))
            gradient[index] = (above - below) / (2 * step)
        return np.linalg.norm(gradient)


def half_square(output):
    return 0.5 * (output**2).sum(-1).mean()


def cross_entropy(output):
    labels = np.arange(len(output)) % output.shape[1]
    return np.mean(np.log(np.exp(output).sum(-1)) - output[np.arange(len(output)), labels])


@pytest.mark.parametrize(
    ("loss", "ending"), [(half_square, None), (cross_entropy, None), (cross_entropy, "softmax")]
)
def test_the_gradient_ratio_is_that_of_finite_differences(loss, ending):
    model = kp.models.dense_resnet(
        10,
        width=5,
        input_shape=(20,),
        classes=3,
        normalization="none",
        activation="tanh",
        classifier_activation=ending,
        stacked=True,
    )
    plain = Plain(kp.models.unstack(model))
    x = VECTORS[:4]
    labels = np.arange(4) % 3 if loss is cross_entropy else None
    found = audit(model, x, labels=labels)
    wanted = plain.gradient_norm(x.astype("float64"), 0, loss) / plain.gradient_norm(
        x.astype("float64"), 3, loss
    )
    np.testing.assert_allclose(found["gradient of the signal"].figure, wanted, rtol=1e-3)
    outputs, logits = plain.x(x)
    np.testing.assert_allclose(found["output scale"].figure, np.sqrt(np.mean(logits**2)), rtol=1e-4)
    growth = np.mean(outputs[-1] ** 2) / np.mean(outputs[0] ** 2) / 4
    np.testing.assert_allclose(found["signal growth"].figure, growth, rtol=1e-4)


def dense(depth, scale, **options):
    """A network without normalisation, whose weights have the variance `scale / fan_in`."""
    he = keras.initializers.VarianceScaling(scale, "fan_in", "untruncated_normal", seed=0)
    options |= {"width": 16, "input_shape": (20,), "normalization": "none"}
    return kp.models.dense_resnet(depth, kernel_initializer=he, **options)


@pytest.mark.parametrize(("scale", "status"), [(2.0, "WARN"), (12.0, "FAIL")])
def test_gradients_that_explode(scale, status):
    """Each branch multiplies the signal and its gradient."""
    result = audit(dense(22, scale), VECTORS)
    assert str(result["gradient of the signal"].status) == status
    assert result["gradient of the signal"].figure > 10
    assert status == "WARN" or result["signal growth"].status == Status.FAIL


@pytest.mark.parametrize(("units", "status"), [(2, "PASS"), (3, "WARN"), (4, "FAIL")])
def test_growth_is_judged_per_unit(units, status):
    """`x + 3 x` multiplies the mean square by 16."""
    inputs = keras.Input((20,))
    x = layers.Dense(20)(inputs)
    for i in range(units):
        tripled = layers.Dense(20, kernel_initializer=keras.initializers.Identity(3.0))
        x = layers.Add(name=f"unit{i}")([x, tripled(x)])
    found = audit(keras.Model(inputs, layers.Dense(3)(x)), VECTORS)["signal growth"]
    np.testing.assert_allclose(found.figure, 16 ** (units - 1) / units, rtol=1e-4)
    assert str(found.status) == status


def test_gradients_that_vanish():
    """A factor of 0.1 on every shortcut, and small weights in the branches."""
    result = audit(dense(14, 1e-2, shortcut=kp.shortcuts.ConstantScaling(0.1, 1.0)), VECTORS)
    found = result["gradient of the signal"]
    assert found.status == Status.FAIL
    np.testing.assert_allclose(found.figure, 0.1**5, rtol=0.5)
    assert "a scaling by 0.1" in result["identity path"].detail


def test_no_gradient_at_all():
    found = audit(multiply(Chain().model, {"classifier": 0}), IMAGES)["gradient of the signal"]
    assert (found.status, np.isnan(found.figure)) == (Status.WARN, True)


def test_stacks_are_found_as_single_units_are():
    stacked = cifar(stacked=True, arrangement="original", shortcut="exclusive_gating")
    results = [audit(model, IMAGES) for model in (stacked, kp.models.unstack(stacked))]
    for one, other in zip(*(result.findings for result in results), strict=True):
        assert one.status == other.status
        np.testing.assert_allclose(one.figure, other.figure, rtol=1e-3, atol=1e-6)
        assert {name.split("_units/")[-1] for name in one.locations} == set(other.locations)
    assert results[0].depth == results[1].depth == 20


def test_nothing_of_the_model_changes():
    model = cifar(14, dropout=0.2, shortcut="dropout", stacked=True)
    before = [np.array(variable) for variable in model.variables]
    audit(model, IMAGES, labels=np.arange(8))
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, np.array(variable))


def test_channels_first_is_the_same():
    last = cifar(8)
    first = kp.models.resnet_cifar(8, input_shape=(3, 8, 8), data_format="channels_first")
    if keras.backend.backend() == "tensorflow":
        pytest.skip("TensorFlow has no convolution with the channels first on a CPU")
    first.set_weights(last.get_weights())
    results = [audit(last, IMAGES), audit(first, np.moveaxis(IMAGES, -1, 1))]
    for one, other in zip(*(result.findings for result in results), strict=True):
        np.testing.assert_allclose(one.figure, other.figure, rtol=1e-3, atol=1e-6)


class PostNorm(keras.Layer):
    """A transformer layer, `LN(x + F(x))` twice; with `pre`, `x + F(LN(x))` twice."""

    def __init__(self, pre, **kwargs):
        super().__init__(**kwargs)
        self.pre = pre
        self.attention = layers.MultiHeadAttention(2, 8, name="attention")
        self.norm_1, self.norm_2 = (
            layers.LayerNormalization(name="norm_1"),
            layers.LayerNormalization(name="norm_2"),
        )
        self.dense_1 = layers.Dense(32, activation="gelu", name="dense_1")
        self.dense_2 = layers.Dense(16, name="dense_2")

    def build(self, shape):
        self.attention.build(shape, shape)
        for norm in (self.norm_1, self.norm_2):
            norm.build(shape)
        self.dense_1.build(shape)
        self.dense_2.build((*shape[:-1], 32))

    def call(self, x):
        if self.pre:
            y = self.norm_1(x)
            x = x + self.attention(y, y)
            return x + self.dense_2(self.dense_1(self.norm_2(x)))
        x = self.norm_1(x + self.attention(x, x))
        return self.norm_2(x + self.dense_2(self.dense_1(x)))


class Transformer(keras.Model):
    """A subclassed model of tokens."""

    def __init__(self, pre):
        super().__init__(name="transformer")
        self.embedding = layers.Embedding(
            50, 16, embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0, seed=0)
        )
        self.blocks = [PostNorm(pre, name=f"block{i}") for i in (1, 2)]
        self.norm = layers.LayerNormalization(name="norm") if pre else None
        self.classifier = layers.Dense(4, name="classifier")

    def call(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = x if self.norm is None else self.norm(x)
        return self.classifier(keras.ops.mean(x, axis=1))


@pytest.mark.parametrize("pre", [True, False], ids=["pre-norm", "post-norm"])
def test_transformers_of_keras_layers(pre):
    model = Transformer(pre)
    tokens = np.random.default_rng(0).integers(0, 50, (8, 6))
    model(tokens)
    result = audit(model, tokens, labels=np.arange(8) % 4)
    assert result.units == 4
    if pre:
        assert result.passed, result
        return
    assert result.arrangement == "post_norm"
    assert set(statuses(result)) == {"identity path", "branch order", "normalised input"}
    found = result["identity path"]
    assert str(result.worst) == "WARN"  # it trains well in this depth, as BERT does
    # the first unit reads the embedding directly
    assert set(found.locations) == {
        "block1 (addition 2)",
        "block2 (addition 1)",
        "block2 (addition 2)",
    }
    assert result["normalised input"].locations == ("block1/attention",)
    branch = result["branch order"]
    assert (
        "In 3 of 4 units, the normalisation before a weight layer also feeds the shortcut "
        "(first: before " in branch.detail
    )
    assert (
        "In 1 of 4 units, a weight layer has no normalisation right before it (first: "
        "block1/attention)" in branch.detail
    )
    assert branch.advice.endswith("Put a normalisation right before block1/attention.")


def test_sequential_of_units():
    model = keras.Sequential(
        [keras.Input((8, 8, 8)), *(kp.ResidualUnit(8, name=f"unit{i}") for i in (1, 2, 3))]
    )
    found = audit(model, images(4, 8, 8, 8))
    assert statuses(found) == {"final activation": "FAIL"}
    assert found["final activation"].locations == ("unit3",)


def test_plain_units_in_between():
    units = [
        kp.ResidualUnit(8, name=f"unit{i}", shortcut="none" if i == 2 else "identity")
        for i in (1, 2, 3)
    ]
    result = audit(keras.Sequential([keras.Input((8, 8, 8)), *units]), images(4, 8, 8, 8))
    assert result.units == 2
    assert result["identity path"].locations == ("unit3",)


def vision_transformer():
    hub = pytest.importorskip("keras_hub")
    inputs = keras.Input((32, 32, 3))
    tokens = hub.models.ViTBackbone(
        image_shape=(32, 32, 3),
        patch_size=(4, 4),
        num_layers=3,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
    )(inputs)
    return keras.Model(inputs, layers.Dense(10)(tokens[:, 0]))


def encoder(normalize_first):
    """A transformer of keras-hub's layers on tokens."""
    hub = pytest.importorskip("keras_hub").layers
    inputs = keras.Input((16,), dtype="int32")
    x = hub.TokenAndPositionEmbedding(50, 16, 32)(inputs)
    x = x if normalize_first else layers.LayerNormalization()(x)
    for _ in range(3):
        x = hub.TransformerEncoder(64, 2, normalize_first=normalize_first)(x)
    x = layers.LayerNormalization()(x) if normalize_first else x
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def of_keras(name):
    return getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=10)


ADDED = {"branch order": "WARN", "normalised input": "WARN"}
ACTIVATED = {"identity path": "WARN", "activation after addition": "WARN"}
#: Well-known networks, all of them sound, with what the audit says: builder, factor and offset from
#: pixels of 0 to 255 to their input, arrangement, units, checks that warn. Nothing fails.
DESIGNS = {
    "ResNet50V2": (lambda: of_keras("ResNet50V2"), (1 / 64, -2), "full_preactivation", 16, {}),
    # a ReLU after every addition; its pixels are centred and not scaled
    "ResNet50": (
        lambda: of_keras("ResNet50"),
        (1, -128),
        "original",
        16,
        {**ACTIVATED, **ADDED, "sample scale": "WARN"},
    ),
    # the branch ends in a normalisation, the next one begins with a convolution
    "MobileNetV2": (lambda: of_keras("MobileNetV2"), (1 / 64, -2), None, 10, ADDED),
    "EfficientNetB0": (lambda: of_keras("EfficientNetB0"), (1, 0), None, 9, ADDED),
    # the branch begins with a depthwise convolution
    "ConvNeXtTiny": (lambda: of_keras("ConvNeXtTiny"), (1, 0), None, 18, ADDED),
    "ViT": (vision_transformer, (1 / 64, -2), "pre_norm", 6, {}),
    "pre-norm transformer": (lambda: encoder(True), None, "pre_norm", 6, {}),
    "post-norm transformer": (
        lambda: encoder(False),
        None,
        "post_norm",
        6,
        {"identity path": "WARN", "branch order": "WARN"},
    ),
}
OF_KERAS = [name for name in DESIGNS if hasattr(keras.applications, name)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.soak, ONE_BY_ONE] if name in OF_KERAS else [])
        for name in DESIGNS
    ],
)
def test_sound_designs_of_others_do_not_fail(name):
    build, pixels, arrangement, units, wanted = DESIGNS[name]
    model, random = build(), np.random.default_rng(0)
    if pixels is None:
        sample = random.integers(0, 50, (8, 16))
    else:  # coarse images: noise alone vanishes in the poolings
        sample = np.kron(random.integers(0, 256, (8, 8, 8, 3)), np.ones((1, 8, 8, 1)))
        sample = sample[:, : model.input_shape[1], : model.input_shape[2]] * pixels[0] + pixels[1]
    result = audit(model, sample, labels=np.arange(8))
    assert (result.arrangement, result.units) == (arrangement, units)
    assert statuses(result) == wanted, result


def test_zero_initialised_branches_pass():
    """With zeros in the padded channels, half or more of the inputs do not vary."""
    assert audit(cifar(14, zero_init_last=True), IMAGES).passed


class Plus(keras.Model):
    """A pre-activation network whose additions are `+`, which Keras names anew in every
    trace.
    """

    def __init__(self, factor=1.0):
        super().__init__(name="plus")
        self.factor = factor
        self.stem = layers.Conv2D(8, 3, padding="same", name="stem")
        self.norms = [layers.BatchNormalization(name=f"norm{i}") for i in range(7)]
        self.convs = [layers.Conv2D(8, 3, padding="same", name=f"conv{i}") for i in range(6)]
        self.classifier = layers.Dense(5, name="classifier")

    def call(self, x, training=None):
        x = self.stem(x)
        for i in range(3):
            y = x
            for j in (2 * i, 2 * i + 1):
                y = self.convs[j](keras.ops.relu(self.norms[j](y, training=training)))
            x = (self.factor if i == 1 else 1.0) * x + y
        x = keras.ops.relu(self.norms[6](x, training=training))
        return self.classifier(keras.ops.mean(x, axis=(1, 2)))


def test_a_subclass_with_plain_additions():
    for factor, path in ((1.0, "PASS"), (0.5, "FAIL")):
        model = Plus(factor)
        model(IMAGES)
        result = audit(model, IMAGES)
        assert (result.units, str(result["identity path"].status)) == (3, path)
        assert result["identity path"].locations == (() if path == "PASS" else ("add_1",))
        assert str(audit(model, IMAGES)) == str(result)


def test_a_sample_is_made():
    assert audit(cifar(14)).passed
    assert audit(cifar(14, **NORMALIZED)).passed
    assert audit(imagenet(mean=(1.0, 2.0, 3.0), std=(9.0, 5.0, 7.0))).passed
    assert audit(kp.models.dense_resnet(12, width=16, input_shape=(20,))).passed
    assert "Pass a sample" in error_of(lambda: audit(encoder(True)))


def test_report():
    result = audit(Chain(**MISTAKES["scaling"][0]).model, IMAGES)
    text = str(result)
    assert max(map(len, text.splitlines())) <= 120
    first, _, heading, *_ = text.splitlines()
    network = "chain: 3 residual units, 8 weight layers, read as full_preactivation."
    assert first == f"{network} FAIL: 1 of 15 checks fails."
    assert heading.split("  ")[-1] == "where"
    assert [heading.index(word) for word in ("check", "what it is", "where")] == [6, 43, 83]
    assert "FAIL  identity path" in text
    assert re.search(r"What to do: Take multiply\S* off the shortcut\.\n", text)
    assert "PASS  dropout" in text
    assert text.count("What to do") == 1
    held = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (held["passed"], held["worst"], len(held["findings"])) == (False, "FAIL", len(CHECKS))
    assert held["findings"][0]["locations"] == ["unit2"]
    np.testing.assert_allclose(held["findings"][0]["figure"], 0.5, rtol=1e-6)
    rows = result.to_markdown().splitlines()
    assert len(rows) == 2 + len(CHECKS)
    assert "| FAIL | identity path | 0.5 |" in rows[2]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("PPP", "PASS: all 3 checks pass."),
        ("PWP", "WARN: 1 of 3 checks warns."),
        ("WFF", "FAIL: 2 of 3 checks fail, 1 warns."),
    ],
)
def test_verdict(found, words):
    status = {status.name[0]: status for status in Status}
    findings = [
        AuditFinding(str(i), status[letter], 0.5, "", (), "", "", "", "")
        for i, letter in enumerate(found)
    ]
    text = str(Audit("net", None, 20, 9, tuple(findings)))
    assert (
        text.splitlines()[0]
        == f"net: 9 residual units, 20 weight layers, no known arrangement. {words}"
    )


def test_limits():
    limits = Limits((0.5, 2), (0.1, 10))
    assert (str(limits), str(Limits((0, 10), (0, 100)))) == (
        "healthy: 0.5 to 2",
        "healthy: up to 10",
    )
    wanted = {"PASS": (0.5, 2), "WARN": (2.1, 0.1, 10), "FAIL": (10.1, 0.09, np.nan, np.inf)}
    for status, values in wanted.items():
        assert {str(limits.status(value)) for value in values} == {status}
    values = {"a": 1.0, "b": 0.05, "c": 3.0, "d": 8.0}
    assert limits.worst_first(values) == ["b", "d", "c", "a"]
    assert limits.unhealthy(values, values) == ("b", "c", "d")


class Branching(keras.Layer):
    """A layer that needs values, which a trace does not have."""

    def call(self, x):
        return x if float(keras.ops.sum(x)) > 0 else -x


class Untraceable(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.branching = layers.Dense(20), Branching()

    def call(self, x):
        return x + self.branching(self.dense(x))


ERRORS = {
    "empty": ({"sample": IMAGES[:0]}, "at least one example. Received: an array of shape (0, 8"),
    "one": ({"sample": IMAGES[:1]}, "at least 2 examples, for batch statistics. Received: 1"),
    "nan": ({"sample": np.full_like(IMAGES, np.nan)}, "must be finite"),
    "shape": ({"sample": images(8, 9, 8, 3)}, "(None, 8, 8, 3). Received: (8, 9, 8, 3)"),
    "inputs": ({"sample": [IMAGES] * 2}, "The model has 1 inputs. Received: 2 arrays"),
    "labels": ({"labels": np.arange(3)}, "one per example. Received: int64 of shape (3,)"),
    "floats": ({"labels": np.zeros(8)}, "one per example. Received: float64"),
    "classes": ({"labels": np.arange(8)}, "has 5 outputs, so labels must be 0 to 4. Received"),
    "unbuilt": (
        {"model": keras.Sequential([layers.Dense(3)], name="unbuilt")},
        "The model 'unbuilt' is not built. Call it once on a batch",
    ),
    "plain": (
        {"model": kp.models.vanilla_cnn(5, filters=4, input_shape=(8, 8, 3))},
        "has no residual unit. The audit checks models in which two paths",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, chain):
    arguments, words = ERRORS[name]
    assert words in error_of(lambda: audit(**({"model": chain, "sample": IMAGES} | arguments)))


def test_a_model_that_cannot_be_traced():
    eager = Untraceable()
    eager.built = True
    eager.dense.build((None, 20))
    assert "cannot be traced" in error_of(lambda: audit(eager, VECTORS))
