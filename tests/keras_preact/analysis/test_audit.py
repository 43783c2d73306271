"""The audit: clean networks pass, every planted mistake is found where it is, and the
figures equal NumPy's.
"""

import dataclasses
import json
import math
import types

import keras
import numpy as np
import pytest
from keras import layers

import keras_preact as kp
from keras_preact.analysis.audit import Status, audit, causes
from keras_preact.analysis.audit.checks import CHECKS
from keras_preact.backend import keras_private
from keras_preact.export._flat import flat
from tests.keras_preact import harness
from tests.keras_preact.harness import error_of, images

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
    return {each.check: str(each.status) for each in result.findings if each.status != Status.PASS}


CLEAN = {
    "bottleneck": lambda: imagenet(block="bottleneck"),
    "stochastic depth": lambda: cifar(
        14, stochastic_depth=0.5, dropout=0.1, dropout_at="before_addition", stacked=True
    ),
    "layer normalisation": lambda: cifar(14, normalization="layer"),
    "blurred, squeezed and excited": lambda: imagenet(
        block="basic", downsampling="blur", squeeze_excitation=4
    ),
    "no top": lambda: cifar(14, include_top=False),
    # with zeros in the padded channels, half or more of the inputs do not vary
    "zero-initialised branches": lambda: cifar(14, zero_init_last=True),
    "vectors": lambda: kp.models.dense_resnet(12, width=16, input_shape=(20,)),
    "gated pre-norm transformer": lambda: kp.models.transformer(
        2, width=16, input_shape=(8, 8, 3), normalization="rms", mlp="swiglu"
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.backend if name == "vectors" else []) for name in CLEAN],
)
def test_clean_networks_pass(name):
    model = CLEAN[name]()
    result = audit(model, images(8, *model.input_shape[1:]))
    assert result.passed, result
    assert result.arrangement == ("pre_norm" if "transformer" in name else "full_preactivation")
    assert result.units == len(model.unit_names)
    assert [finding.check for finding in result.findings] == [check.name for check in CHECKS]


def chain(
    normalized=True,
    head="na",
    shortcut=lambda x, activated: x,
    after=None,
    epsilon=1e-5,
    **options,
) -> keras.Model:
    """A full pre-activation network of Keras layers, with places for a mistake.

    Args:
        normalized: Whether unit 2 has its second normalisation.
        head: Layers between the last addition and the pooling: n, a, or c, a convolution.
        shortcut: Shortcut of unit 2, a function of x and the activated x.
        after: Function of unit 2's sum.
        epsilon: Epsilon of every normalisation.
        options: Options of every convolution.
    """
    options = {"kernel_initializer": "he_normal"} | options
    inputs = keras.Input((8, 8, 3))

    def norm(x, name):
        return layers.BatchNormalization(momentum=0.9, epsilon=epsilon, name=name)(x)

    def conv(x, name):
        return layers.Conv2D(8, 3, padding="same", use_bias=False, name=name, **options)(x)

    x = layers.ReLU(name="stem_relu")(norm(conv(inputs, "stem"), "stem_norm"))
    for i in (1, 2, 3):
        activated = x if i == 1 else layers.ReLU(name=f"unit{i}_relu1")(norm(x, f"unit{i}_norm1"))
        y = conv(activated, f"unit{i}_conv1")
        y = norm(y, f"unit{i}_norm2") if normalized or i != 2 else y
        y = layers.ReLU(name=f"unit{i}_relu2")(y)
        y = conv(y, f"unit{i}_conv2")
        x = layers.Add(name=f"unit{i}")([shortcut(x, activated) if i == 2 else x, y])
        x = after(x) if after and i == 2 else x
    for j, kind in enumerate(head):
        if kind == "a":
            x = layers.ReLU(name=f"head_relu{j}")(x)
        else:
            x = norm(x, f"head_norm{j}") if kind == "n" else conv(x, f"head_conv{j}")
    x = layers.Dense(5, name="classifier")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, x, name="chain")


def gated(x, _):
    return layers.Multiply()([x, layers.Conv2D(8, 1, activation="sigmoid")(x)])


PATH, AFTER, ORDER = "identity path", "activation after addition", "branch order"
LAST, INPUT = "final activation", "normalised input"
CONSTANT = keras.initializers.Constant(0.02)
ONE_SEED = keras.initializers.HeNormal(seed=3)

#: Mistake: options of `chain`, checks that must not pass, and the place that the first of them must
#: name.
MISTAKES = {
    "activated shortcut": (
        {"shortcut": lambda x, activated: activated},
        {PATH: "FAIL", AFTER: "WARN", ORDER: "FAIL"},
        "unit2",
    ),
    "relu after addition": ({"after": layers.ReLU()}, {PATH: "FAIL", AFTER: "FAIL"}, "unit3"),
    "relu after the last addition": ({"head": "ana"}, {LAST: "FAIL"}, "head_relu0"),
    "large epsilon": ({"epsilon": 0.1}, {INPUT: "FAIL"}, "stem_norm"),
    # the normalisation of unit 3 directly follows that after the addition
    "norm after addition": (
        {"after": layers.BatchNormalization()},
        {PATH: "FAIL", LAST: "WARN"},
        "unit3",
    ),
    "scaling": ({"shortcut": lambda x, _: 0.5 * x}, {PATH: "FAIL"}, "unit2"),
    "gate": ({"shortcut": gated}, {PATH: "FAIL"}, "unit2"),
    "convolution": ({"shortcut": lambda x, _: layers.Conv2D(8, 1)(x)}, {PATH: "FAIL"}, "unit2"),
    "dropout on the shortcut": (
        {"shortcut": lambda x, _: layers.Dropout(0.3)(x)},
        {PATH: "FAIL"},
        "unit2",
    ),
    "dropout after addition": ({"after": layers.SpatialDropout2D(0.5)}, {PATH: "FAIL"}, "unit3"),
    "no final activation": ({"head": ""}, {LAST: "FAIL"}, "unit3"),
    "final norm alone": ({"head": "n"}, {LAST: "FAIL"}, "unit3"),
    "final relu alone": ({"head": "a"}, {LAST: "FAIL"}, "unit3"),
    "doubled final norm": ({"head": "nna"}, {LAST: "WARN"}, "head_norm1"),
    "weight without norm": ({"normalized": False}, {ORDER: "FAIL", INPUT: "FAIL"}, "unit2_conv2"),
    "one seed": ({"kernel_initializer": ONE_SEED}, {"distinct weights": "FAIL"}, "unit1_conv2"),
    "constant weights": ({"kernel_initializer": CONSTANT}, {"live weights": "FAIL"}, "stem"),
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


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(name, marks=pytest.mark.backend if name == "gate" else []) for name in MISTAKES],
)
def test_each_mistake_is_found_at_its_place_and_nothing_else(mistake):
    options, wanted, place = MISTAKES[mistake]
    result = audit(chain(**options), IMAGES)
    assert statuses(result) == wanted, result
    assert result[next(iter(wanted))].locations[0] == place
    assert str(result.worst) == max(wanted.values(), key=list(Status).index)
    # the doubled normalisation is in the next unit, not where the first one is
    causes = [*wanted] if mistake == "norm after addition" else [*wanted][:1]
    assert [each.check for each in result.causes] == causes
    if mistake in WORDS:
        assert f"has {WORDS[mistake]}. In {place}: " in result[PATH].detail


def of_no_known_arrangement(starts, sums, last) -> keras.Model:
    """A network of dense units `x + W ReLU(W start(x))`, of which none is in
    `kp.ARRANGEMENTS`.

    Args:
        starts: Layers before the first weight of each of 3 units: n, a.
        sums: Layers after each addition but the last.
        last: Layers after the last addition.
    """

    def applied(x, kinds):
        for kind in kinds:
            x = layers.BatchNormalization()(x) if kind == "n" else layers.ReLU()(x)
        return x

    inputs = keras.Input((20,))
    x = layers.Dense(16)(inputs)
    for i, start in enumerate(starts, 1):
        y = layers.Dense(16)(layers.Dense(16, activation="relu")(applied(x, start)))
        x = applied(layers.Add(name=f"unit{i}")([x, y]), sums if i < 3 else last)
    return keras.Model(inputs, layers.Dense(5)(x))


@pytest.mark.parametrize(
    ("head", "status"),
    [("cna", "PASS"), ("nacna", "PASS"), ("c", "FAIL"), ("ca", "FAIL"), ("can", "FAIL")],
)
def test_a_convolution_may_read_the_last_sum_if_a_norm_and_an_activation_follow(head, status):
    """As in Xception."""
    assert str(audit(chain(head=head), IMAGES)[LAST].status) == status


NORM, RELU = "a normalisation", "an activation"


@pytest.mark.parametrize(
    ("start", "sums", "last", "needed", "status"),
    [
        # the classifier needs the branches' BN-ReLU: the ReLU of the sums is no part of it
        ("na", "a", "a", f"{NORM}, then {RELU}", "FAIL"),
        ("na", "a", "na", f"{NORM}, then {RELU}", "PASS"),
        ("na", "a", "ana", f"{NORM}, then {RELU}", "FAIL"),
        ("na", "", "a", f"{NORM}, then {RELU}", "FAIL"),
        ("na", "", "na", f"{NORM}, then {RELU}", "PASS"),
        # the order of original units, without normalisation
        ("", "a", "a", RELU, "PASS"),
        ("", "a", "", RELU, "FAIL"),
        ("n", "a", "an", f"{RELU}, then {NORM}", "PASS"),
        ("n", "a", "a", f"{RELU}, then {NORM}", "FAIL"),
        ("", "", "", "none", "PASS"),
    ],
)
def test_without_a_known_arrangement_the_classifier_needs_what_a_unit_needs(
    start, sums, last, needed, status
):
    result = audit(of_no_known_arrangement([start] * 3, sums, last), VECTORS)
    assert result.arrangement is None
    assert result[LAST].detail.endswith(f"Needed: {needed}.")
    assert str(result[LAST].status) == status


@pytest.mark.parametrize(("last", "status"), [("", "WARN"), ("a", "WARN"), ("na", "PASS")])
def test_what_the_classifier_needs_is_unknown_if_units_differ(last, status):
    found = audit(of_no_known_arrangement(["na", "na", ""], "", last), VECTORS)[LAST]
    assert ("Needed: unknown" in found.detail) == (status == "WARN")
    assert str(found.status) == status


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
    finding = audit(multiply(chain(), {name: factor}), IMAGES)[check]
    assert (str(finding.status), finding.locations[0]) == (status, name)


def test_a_branch_of_zeros_never_learns_and_one_zero_weight_does():
    assert audit(multiply(chain(), {"unit2_conv2": 0}), IMAGES).passed
    model = multiply(chain(), {"unit2_conv1": 0, "unit2_conv2": 0})
    found = audit(model, IMAGES)["live weights"]
    assert (found.status, found.locations) == (Status.FAIL, ("unit2",))


def test_dead_channels():
    model = chain()
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
        (NORMALIZED, PIXELS, "PASS"),
        ({"mean": 0.5, "std": 0.25}, PIXELS, "FAIL"),
    ],
)
def test_pixels_in_the_wrong_range(options, sample, status):
    found = audit(cifar(8, **options), sample)["sample scale"]
    assert found.status == status
    assert found.locations == (() if status == "PASS" else ("stem_conv",))
    std = np.sqrt(sample.var((0, 1, 2)).mean()) / options.get("std", 1.0)
    np.testing.assert_allclose(found.figure, std, rtol=1e-5, atol=1e-7)


ON_PATH = {PATH, AFTER}
ARRANGEMENTS = {
    "original": ({*ON_PATH, ORDER, INPUT}, "WARN"),
    "bn_after_addition": ({*ON_PATH, ORDER}, "FAIL"),
    "relu_before_addition": ({ORDER, INPUT}, "WARN"),
    "relu_only_preactivation": ({ORDER, INPUT}, "WARN"),
    "bn_only_preactivation": ({*ON_PATH, ORDER}, "WARN"),
    "full_preactivation": (set(), "PASS"),
}


@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_arrangements_are_recognised(arrangement):
    result = audit(cifar(14, arrangement=arrangement), IMAGES)
    checks, worst = ARRANGEMENTS[arrangement]
    assert result.arrangement == arrangement
    assert (set(statuses(result)), str(result.worst)) == (checks, worst)
    assert len(result.causes) == bool(checks)


@pytest.mark.parametrize("units", [3, pytest.param(120, marks=pytest.mark.soak)])
def test_post_activation_is_a_design_at_every_depth(units):
    """The paper trained original units at 1,001 layers, to 7.61 % (Table 3)."""
    inputs = keras.Input((20,))
    x = layers.Dense(8)(inputs)
    for i in range(1, units + 1):
        y = layers.Dense(8, kernel_initializer="zeros")(layers.Dense(8, activation="relu")(x))
        x = layers.ReLU()(layers.Add(name=f"unit{i}")([x, y]))
    result = audit(keras.Model(inputs, layers.Dense(3)(x)), VECTORS)
    assert result.depth == 2 * units + 2
    for check in (AFTER, PATH):
        # the first sum is half negative, the others are what a ReLU returned
        assert (result[check].status, result[check].locations[0]) == (Status.WARN, "unit2")
    detail = result[AFTER].detail
    assert f"This one has {2 * units + 2}." in detail
    errors = {
        row.error for row in kp.published.results(table="3") + kp.published.results(table="2")
    }
    for shown in ("6.61", "6.37", "7.61", "4.92"):
        assert shown in detail
        assert float(shown) in errors


def test_the_share_of_values_cut_is_that_of_the_zeros():
    model = cifar(14, arrangement="original")
    outputs = keras.Model(model.input, model.unit_outputs).predict(IMAGES, verbose=0)
    # x_{l+1} = ReLU(sum) is 0 if the sum was cut; it counts if the next unit keeps its shape
    zeros = {model.units[i].name: np.mean(outputs[i - 1] == 0) for i in (1, 3, 5)}
    found = audit(model, IMAGES)[AFTER]
    np.testing.assert_allclose(found.figure, np.mean(list(zeros.values())), rtol=1e-6)
    assert found.locations[0] == max(zeros, key=zeros.get)


@pytest.mark.backend
def test_the_change_on_the_identity_path_is_that_of_numpy():
    """`||x - (1 - g) x|| / ||x||` with a NumPy gate; without normalisation, training
    equals inference.
    """
    options = {"shortcut": "shortcut_only_gating", "normalization": "none", "gate_bias": -1.0}
    model = kp.models.dense_resnet(8, width=6, input_shape=(20,), **options)
    outputs = keras.Model(model.input, [model.units[0].input, *model.unit_outputs])
    wanted = {}
    for x, unit in zip(outputs.predict(VECTORS, verbose=0), model.units, strict=False):
        weights = harness.weights(unit)
        z = x @ weights["gate/dense/kernel"] + weights["gate/dense/bias"]
        gate = 1 / (1 + np.exp(-z))
        wanted[unit.name] = np.linalg.norm(gate * x) / np.linalg.norm(x)
    found = audit(model, VECTORS)[PATH]
    assert found.locations == tuple(sorted(wanted, key=wanted.get, reverse=True))
    np.testing.assert_allclose(found.figure, max(wanted.values()), rtol=1e-5)


BOUNDED = "a doubly stochastic matrix mixes the residual streams. The product of such matrices"
FREE = "a free matrix mixes the residual streams"
CLEAN_PATH = ("PASS", "The identity path leaves its input unchanged in 3 of 3 units")
GATE = ("FAIL", "In 3 of 3 units, the identity path has a gate")
SHORTCUTS = {name: make() for name, make in kp.SHORTCUTS.items() if name != "none"}
SHORTCUTS |= {
    "to 1 of 0.5": kp.shortcuts.ConstantScaling(1.0, 0.5),
    "layer scale": kp.shortcuts.ScaledResidual(0.1, per_channel=True),
    "orthogonal maps": kp.shortcuts.Orthogonal("map"),
    "any matrices": kp.shortcuts.HyperConnections(2, "none"),
    "permutations": kp.shortcuts.HyperConnections(2, "permutations"),
    "one matrix per map": kp.shortcuts.HyperConnections(2, "permutations", "map"),
}
#: Status of the identity path, and words for it. All others have `CLEAN_PATH`.
ON_PATH_OF = {
    "constant_scaling": ("FAIL", "the identity path has a scaling by 0.5."),
    "exclusive_gating": GATE,
    "shortcut_only_gating": GATE,
    "conv1x1": ("FAIL", "the identity path has a weight layer."),
    "dropout": ("FAIL", "the identity path has dropout."),
    "decayed_identity": ("FAIL", "the identity path has a scaling by 0.6 to 0.867."),
    "any matrices": ("WARN", f"In 3 of 3 units, {FREE}"),
} | dict.fromkeys(
    ("hyper_connections", "permutations", "one matrix per map"),
    ("PASS", f"In 3 of 3 units, {BOUNDED}"),
)


def of_one_shape(shortcut, **options):
    """Three units that keep the shape; the numbers that their shortcuts train have left
    their start.
    """
    settings = {"block": "basic", "stem": "3x3", "stem_filters": 8, "input_shape": (6, 6, 3)}
    settings |= {"classes": 5, "seed": 0}
    model = kp.models.ResidualNetwork(((8, 3),), shortcut=shortcut, **settings | options)
    random = np.random.default_rng(0)
    for weight in model.weights:
        if "/coefficients/" in weight.path or "/shortcut/scale" in weight.path:
            weight.assign(np.array(weight) + random.normal(0, 0.2, weight.shape))
    return model


@pytest.mark.parametrize("stacked", [False, True], ids=["separate", "stacked"])
@pytest.mark.parametrize("name", SHORTCUTS)
def test_every_shortcut_is_named_for_what_it_is(name, stacked):
    """Nothing else is found: the first branch reads a mix of the activated stem, and what
    mixes streams is no weight layer without a normalisation.
    """
    result = audit(of_one_shape(SHORTCUTS[name], stacked=stacked), images(8, 6, 6, 3))
    status, words = ON_PATH_OF.get(name, CLEAN_PATH)
    assert statuses(result) == ({} if status == "PASS" else {PATH: status}), result
    found = result[PATH]
    assert words in found.detail
    assert "3 residual units, 8 weight layers" in str(result)
    if status != "PASS":
        where = {each.rsplit("/", 1)[-1] for each in found.locations}
        assert where == {f"stage1_unit{i}" for i in (1, 2, 3)}
    if status == "WARN":
        assert "kp.analysis.composite_gain" in str(result)  # also without the evidence
        assert "constraint='sinkhorn'" in found.advice
        assert found.figure > 0.1


def test_a_plain_network_has_no_shortcut_to_audit():
    assert "no residual unit" in error_of(lambda: audit(of_one_shape("none"), IMAGES[:, :6, :6]))


POST_NORM = {PATH: "WARN", ORDER: "WARN", INPUT: "WARN"}
#: Shortcuts with other things on the identity path: options, checks that must not pass, words of
#: the first one, and of its advice.
MIXED = {
    "free streams in transformers": (
        {"shortcut": "any matrices", "arrangement": "peri_norm"},
        {PATH: "WARN"},
        FREE,
        "Make the matrices that mix the residual streams doubly stochastic",
    ),
    "decay in transformers": (
        {"shortcut": "decayed_identity"},
        {PATH: "FAIL"},
        "a scaling by 0.6 to 0.9.",
        "Remove layer2_mlp/multiply",
    ),
    "layer scale": ({"shortcut": "layer scale"}, {}, "unchanged in 4 of 4", ""),
    "orthogonal": ({"shortcut": "orthogonal", "arrangement": "peri_norm"}, {}, "unchanged", ""),
    "DeepNorm": (
        kp.models.DEEP_NORM,
        POST_NORM,
        "a scaling by 1.41, or a normalisation and a scaling.",
        "Use pre-norm",
    ),
    "streams after post-norm": (
        {"shortcut": "permutations", "arrangement": "post_norm"},
        POST_NORM,
        "the identity path has a normalisation.",
        "Use pre-norm",
    ),
    "a gate after post-norm": (
        {"shortcut": "exclusive_gating", "arrangement": "post_norm"},
        POST_NORM | {PATH: "FAIL"},
        "the identity path has a gate",
        "Remove layer",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_shortcuts_in_transformers(name):
    options, wanted, words, advice = MIXED[name]
    shortcut = SHORTCUTS.get(options["shortcut"], options["shortcut"])
    settings = {"width": 16, "input_shape": (8, 8, 3), "patch_size": 4}
    settings |= options | {"shortcut": shortcut}
    result = audit(kp.models.transformer(2, **settings), IMAGES)
    assert statuses(result) == wanted, result
    assert words in result[PATH].detail
    assert result[PATH].advice.startswith(advice)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("permutations", "single"),
        ("shortcut_only_gating", "basic"),
        ("shortcut_only_gating", "single"),
        ("exclusive_gating", "single"),
    ],
)
def test_projections_are_shortcuts(name, block):
    """A projection with a gate after it has as many weights as the branch or more, and one
    whose streams are mixed has more steps.
    """
    settings = {"stem": "3x3", "stem_filters": 8, "input_shape": (6, 6, 3), "classes": 5}
    stages = ((8, 2), (16, 2))
    model = kp.models.ResidualNetwork(stages, block=block, shortcut=SHORTCUTS[name], **settings)
    result = audit(model, images(8, 6, 6, 3))
    assert str(result[ORDER].status) == "PASS", result
    assert result.arrangement == "full_preactivation"
    assert result.depth == 2 + 4 * (2 if block == "basic" else 1)


def test_activations_between_streams():
    """f acts on each stream by itself."""
    original = of_one_shape(SHORTCUTS["permutations"], arrangement="original")
    original = audit(original, images(8, 6, 6, 3))
    assert statuses(original) == {PATH: "WARN", AFTER: "WARN", ORDER: "WARN", INPUT: "WARN"}
    assert "In 2 of 3 units, the identity path has an activation." in original[PATH].detail
    assert original[PATH].advice.startswith("Use full pre-activation")
    assert BOUNDED in original[PATH].detail
    twice = of_one_shape(SHORTCUTS["any matrices"], arrangement="bn_after_addition", stacked=False)
    twice = audit(twice, images(8, 6, 6, 3))
    assert str(twice[PATH].status) == "FAIL"
    assert FREE in twice[PATH].detail
    for check in (PATH, ORDER):  # the layers that split and join streams are no help
        assert "/norm" in twice[check].advice
        assert "split" not in twice[check].advice


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("any matrices", flat),
        ("permutations", lambda model: keras.Sequential([keras.Input((6, 6, 3)), model])),
    ],
    ids=["plain layers", "nested"],
)
def test_shortcuts_in_other_models(name, wrap):
    """Networks of plain layers and operations, and networks in another model."""
    model = of_one_shape(SHORTCUTS[name], stacked=True)
    one, other = audit(model, images(8, 6, 6, 3)), audit(wrap(model), images(8, 6, 6, 3))
    assert statuses(one) == statuses(other)
    np.testing.assert_allclose(one[PATH].figure, other[PATH].figure, rtol=1e-4)
    assert one[PATH].detail.partition(". ")[0] == other[PATH].detail.partition(". ")[0]


@pytest.mark.backend
@pytest.mark.parametrize(
    ("labels", "ending"), [(None, None), (np.arange(4) % 3, None), (np.arange(4) % 3, "softmax")]
)
def test_gradients_and_signals_are_those_of_propagation(labels, ending):
    model = kp.models.dense_resnet(
        10,
        width=5,
        input_shape=(20,),
        classes=3,
        normalization="none",
        classifier_activation=ending,
        stacked=True,
    )
    found = audit(model, VECTORS[:4], labels=labels)
    signals = kp.analysis.propagation(model, VECTORS[:4], labels)
    gradients, growth = signals.gradient_norm[1:], signals.x_norm[-1] / signals.x_norm[1]
    ratio = found["gradient of the signal"].figure
    np.testing.assert_allclose(ratio, gradients[0] / gradients[-1], rtol=1e-4)
    np.testing.assert_allclose(found["signal growth"].figure, growth**2 / 4, rtol=1e-4)
    classifier = model.get_layer("head_classifier")
    kernel, bias = classifier.get_weights()
    features = keras.Model(model.input, classifier.input).predict(VECTORS[:4], verbose=0)
    size = np.sqrt(np.mean((features @ kernel + bias) ** 2))
    np.testing.assert_allclose(found["output scale"].figure, size, rtol=1e-4)


def test_a_softmax_inside_the_classifier_is_left_out():
    model = chain()
    classifier = model.get_layer("classifier")
    probabilities = layers.Dense(5, activation="softmax", name="classifier")
    other = keras.Model(model.input, probabilities(classifier.input))
    other.set_weights(model.get_weights())
    logits, found = audit(model, IMAGES), audit(other, IMAGES)
    for check in ("weight scale", "output scale"):
        np.testing.assert_allclose(found[check].figure, logits[check].figure, rtol=1e-5)
    assert found["weight scale"].detail == logits["weight scale"].detail


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
    options = {
        "normalization": "none",
        "shortcut": kp.shortcuts.ConstantScaling(0.1, 1.0),
        "kernel_initializer": keras.initializers.RandomNormal(stddev=0.02, seed=0),
    }
    model = kp.models.dense_resnet(14, width=16, input_shape=(20,), **options)
    result = audit(model, VECTORS)
    found = result["gradient of the signal"]
    assert found.status == Status.FAIL
    np.testing.assert_allclose(found.figure, 0.1**5, rtol=0.5)
    assert "a scaling by 0.1" in result[PATH].detail


def test_stacks_are_found_as_single_units_are():
    stacked = cifar(stacked=True, arrangement="original", shortcut="exclusive_gating")
    results = [audit(model, IMAGES) for model in (stacked, kp.models.unstack(stacked))]
    for one, other in zip(*(result.findings for result in results), strict=True):
        assert one.status == other.status
        np.testing.assert_allclose(one.figure, other.figure, rtol=1e-3, atol=1e-6)
        assert {name.split("_units/")[-1] for name in one.locations} == set(other.locations)
    assert results[0].depth == results[1].depth == 20


def test_peri_norm():
    model = kp.models.transformer(
        2, width=16, input_shape=(8, 8, 3), patch_size=2, arrangement="peri_norm"
    )
    result = audit(model, IMAGES)
    assert result.arrangement == "peri_norm"
    assert {finding.status for finding in result.findings} == {Status.PASS}


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


def parallel(shared):
    """A transformer whose attention and MLP read the same x, as in GPT-J (with one
    normalisation) and GPT-NeoX.
    """
    inputs = keras.Input((16,), dtype="int32")
    x = layers.Embedding(50, 32)(inputs)
    for _ in range(3):
        first = layers.LayerNormalization()(x)
        second = first if shared else layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(2, 16)(first, first)
        x = x + attention + layers.Dense(32)(layers.Dense(64, activation="gelu")(second))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(x))


def falcon():
    """A transformer of keras-hub, whose attention reads a mask."""
    backbone = pytest.importorskip("keras_hub").models.FalconBackbone(
        vocabulary_size=50, num_layers=3, num_attention_heads=2, hidden_dim=32, intermediate_dim=64
    )
    tokens = keras.Input((16,), dtype="int32")
    x = backbone({"token_ids": tokens, "padding_mask": keras.ops.cast(tokens != 0, "int32")})
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def mobile_net():
    return keras.applications.MobileNetV2(weights=None, input_shape=(64, 64, 3), classes=10)


#: Well-known networks, all of them sound, with what the audit says: builder, arrangement, units,
#: checks that warn. Nothing fails.
DESIGNS = {
    "pre-norm": (lambda: encoder(True), "pre_norm", 6, {}),
    "post-norm": (lambda: encoder(False), "post_norm", 6, {PATH: "WARN", ORDER: "WARN"}),
    "parallel, one norm": (lambda: parallel(True), "pre_norm", 3, {}),
    "parallel, two norms": (lambda: parallel(False), "pre_norm", 3, {}),
    "with a mask": (falcon, "pre_norm", 6, {}),
    # the branch ends in a normalisation, the next one begins with a convolution
    "MobileNetV2": (mobile_net, None, 10, {ORDER: "WARN", INPUT: "WARN"}),
}


@pytest.mark.parametrize("name", DESIGNS)
def test_sound_designs_of_others_do_not_fail(name):
    build, arrangement, units, wanted = DESIGNS[name]
    model, random = build(), np.random.default_rng(0)
    if name == "MobileNetV2":  # coarse images: noise alone vanishes in the poolings
        sample = np.kron(random.integers(0, 256, (8, 8, 8, 3)), np.ones((1, 8, 8, 1))) / 64 - 2
    else:
        sample = random.integers(0, 50, (8, 16))
    result = audit(model, sample, labels=np.arange(8))
    assert (result.arrangement, result.units) == (arrangement, units)
    assert statuses(result) == wanted, result


class Plus(keras.Model):
    """A pre-activation network whose additions are `+`, which Keras names anew in every
    trace.
    """

    def __init__(self, factor=1.0):
        super().__init__(name="plus")
        self.factor = factor
        self.norms = [layers.BatchNormalization() for _ in range(4)]
        self.dense = [layers.Dense(8) for _ in range(5)]

    def call(self, x, training=None):
        def activated(x, norm):
            return keras.ops.relu(norm(x, training=training))

        x = self.dense[0](x)
        for i in (1, 2, 3):
            y = self.dense[i](activated(x, self.norms[i - 1]))
            x = (self.factor if i == 2 else 1.0) * x + y
        return self.dense[4](activated(x, self.norms[3]))


@pytest.mark.backend
def test_an_average_halves_the_identity_path():
    inputs = x = keras.Input((20,))
    for _ in range(4):
        x = layers.Average()([x, layers.Dense(20)(layers.ReLU()(layers.BatchNormalization()(x)))])
    x = layers.ReLU()(layers.BatchNormalization()(x))
    found = audit(keras.Model(inputs, layers.Dense(3)(x)), VECTORS)[PATH]
    assert (found.status, found.figure) == ("FAIL", pytest.approx(0.5))
    assert "In 3 of 4 units, the identity path has a scaling by 0.5." in found.detail


@pytest.mark.backend
def test_a_subclass_with_plain_additions():
    for factor, path in ((1.0, "PASS"), (0.5, "FAIL")):
        model = Plus(factor)
        model(VECTORS)
        result = audit(model, VECTORS)
        assert (result.units, str(result[PATH].status)) == (3, path)
        assert result[PATH].locations == (() if path == "PASS" else ("add_1",))
        assert str(audit(model, VECTORS)) == str(result)


def with_statistics(model, images=IMAGES, momentum=0.0):
    """Return the model with the moving statistics of one update on some images."""
    for layer in keras_private.layers(model):
        if hasattr(layer, "moving_mean"):
            layer.momentum = momentum
    model(images, training=True)
    return model


STATISTICS = "moving statistics"


@pytest.mark.parametrize(
    "make",
    [chain, lambda: cifar(20, stacked=True), lambda: cifar(14)],
    ids=["layers of Keras", "stacked", "separate"],
)
def test_moving_statistics(make):
    """New ones are not judged, fitting ones pass, and those of few updates or of other images
    fail.
    """
    model = make()
    assert math.isnan(audit(model, IMAGES)[STATISTICS].figure)
    assert audit(with_statistics(make(), 0.2 * IMAGES), IMAGES)[STATISTICS].status != "PASS"
    assert audit(with_statistics(make(), momentum=0.999), 20 * IMAGES)[STATISTICS].status != "PASS"
    found = audit(with_statistics(model), IMAGES)[STATISTICS]
    assert found.status == "PASS"
    np.testing.assert_allclose(found.figure, 1, atol=0.1)
    assert math.isnan(audit(model)[STATISTICS].figure)  # those of noise are others


@pytest.mark.parametrize(("factor", "status"), [(2.0, "PASS"), (36.0, "WARN"), (400.0, "FAIL")])
def test_moving_statistics_of_one_normalisation(factor, status):
    model = with_statistics(chain())
    norm = model.get_layer("unit2_norm2")
    norm.moving_variance.assign(norm.moving_variance / factor)
    found = audit(model, IMAGES)[STATISTICS]
    assert found.status == status
    np.testing.assert_allclose(found.figure, factor**0.5, rtol=0.02)
    assert status == "PASS" or found.locations[0] == "unit2_norm2"


def test_a_sample_is_made():
    assert audit(imagenet(mean=(1.0, 2.0, 3.0), std=(9.0, 5.0, 7.0))).passed
    assert audit(kp.models.dense_resnet(12, width=16, input_shape=(20,))).passed
    inputs = keras.Input((16,), dtype="int32")
    tokens = keras.Model(inputs, layers.Embedding(50, 16)(inputs))
    assert "Pass a sample" in error_of(lambda: audit(tokens))
    assert "takes a Keras model" in error_of(lambda: audit("model.keras"))


class Alpha(layers.Layer):
    """ReZero in a model of Keras layers."""

    def build(self, input_shape):
        self.alpha = self.add_weight(shape=(), initializer="zeros", name="alpha")

    def call(self, x):
        return self.alpha * x


def rezero():
    x = inputs = keras.Input((8, 8, 3))
    for _ in range(3):
        x = layers.add([x, Alpha()(layers.Conv2D(3, 3, padding="same")(x))])
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


SMALL = {"width_factor": 0.25, "input_shape": (8, 8, 3)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: kp.models.resnet_cifar(14, shortcut="scaled_residual", **SMALL),
        lambda: kp.models.resnet_cifar(20, shortcut="scaled_residual", stacked=True, **SMALL),
        lambda: kp.models.resnet_cifar(14, arrangement="original", zero_init_last=True, **SMALL),
        rezero,
    ],
    ids=["alphas", "alphas in stacks", "gammas", "model of others"],
)
def test_branches_that_start_closed(make):
    result = audit(make(), IMAGES)
    finding = result["gradient of the weights"]
    assert finding.status == "PASS"
    assert "start closed" in finding.detail
    assert "nan" not in result.text(evidence=True)


def test_some_branches_that_are_closed():
    """They have no part in the ratio. Zeros after the last unit are not their fault."""
    options = SMALL | {"width_factor": 0.5}
    model = kp.models.resnet_cifar(20, shortcut=kp.shortcuts.ScaledResidual(0.1), **options)
    assert audit(model, IMAGES)["gradient of the weights"].status == "PASS"
    alphas = [weight for weight in model.trainable_weights if "scale" in weight.path]
    for alpha in (alphas[0], alphas[5]):
        alpha.assign(0)
    finding = audit(model, IMAGES)["gradient of the weights"]
    assert finding.status == "PASS", finding.detail
    assert "start closed" not in finding.detail
    model = kp.models.resnet_cifar(14, shortcut="scaled_residual", **SMALL)
    classifier = model.get_layer("head_classifier")
    classifier.set_weights([np.zeros(weight.shape) for weight in classifier.weights])
    finding = audit(model, IMAGES, labels=np.arange(len(IMAGES)) % 10)["gradient of the weights"]
    assert finding.status == "WARN"
    assert "a later layer" in finding.detail


def test_several_mistakes_are_several_causes():
    result = audit(chain(shortcut=lambda x, _: 0.5 * x, normalized=False, head=""), IMAGES)
    assert [each.check for each in result.causes] == [PATH, ORDER, LAST]


@pytest.mark.parametrize(
    ("statuses", "explained"),
    [
        ({PATH: "FAIL", "gradient of the signal": "FAIL"}, {"gradient of the signal": PATH}),
        ({PATH: "WARN", "gradient of the signal": "FAIL"}, {}),  # it would hide a failure
        (
            {PATH: "FAIL", "gradient of the signal": "WARN", "gradient of the weights": "WARN"},
            {"gradient of the signal": PATH, "gradient of the weights": PATH},
        ),
        (
            {"gradient of the signal": "WARN", "gradient of the weights": "WARN"},
            {"gradient of the weights": "gradient of the signal"},
        ),
        ({PATH: "FAIL", AFTER: "WARN", ORDER: "FAIL"}, {}),  # in other units
        ({PATH: "FAIL", "dead channels": "WARN"}, {}),
    ],
)
def test_what_explains_what(statuses, explained):
    network = types.SimpleNamespace(graph=types.SimpleNamespace(steps=[]), units=[])
    findings = [
        check.finding(Status(statuses.get(check.name, "PASS")), 0.5, [f"of {check.name}"], "It is.")
        for check in CHECKS
    ]
    found = causes.explained(CHECKS, findings, network)
    assert {each.check: each.explained_by for each in found if each.explained_by} == explained
    assert [dataclasses.replace(each, explained_by="") for each in found] == findings


def test_report():
    result = audit(chain(**MISTAKES["activated shortcut"][0]), IMAGES)
    network = "chain: 3 residual units, 8 weight layers, read as"
    lines = str(result).splitlines()
    assert lines[:3] == [
        f"{network} bn_after_addition. FAIL: 2 of {len(CHECKS)} checks fail, 1 warns.",
        "",
        "FAIL  Remove unit2_norm1 and unit2_relu1 from the shortcut.",
    ]
    assert lines[3].startswith(f"      Found ({PATH}): In 1 of 3 units, the identity path has a")
    assert lines[-1] == f"      It may also explain: {AFTER}, {ORDER}."
    evidence = result.text(evidence=True)
    assert evidence.startswith(str(result))
    for each in result.findings:
        words = [each.unit] if each.status == Status.PASS else [each.check, each.unit, each.source]
        assert all(word in evidence for word in words)
    shares = " ".join(evidence.split())
    assert f"{AFTER} {100 * result[AFTER].figure:.3g} % mean share of values" in shares
    held = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert held["findings"][1]["explained_by"] == PATH
    assert held["findings"][1]["figure"] == result[AFTER].figure  # a share, not percent
    result = audit(chain(**MISTAKES["scaling"][0]), IMAGES)
    held = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (held["passed"], held["worst"], len(held["findings"])) == (False, "FAIL", len(CHECKS))
    assert held["findings"][0]["locations"] == ["unit2"]


@pytest.mark.parametrize(
    "build", [kp.models.fast_resnet, lambda **o: kp.models.resnet_cifar(8, **o)]
)
def test_a_network_for_images_of_any_size_is_read_as_one_of_their_size(build):
    """A unit that halves the map, with as many channels, has no shortcut of its shape."""
    images = harness.images(4, 11, 11, 3)
    of_any, of_one = (build(input_shape=shape) for shape in ((None, None, 3), images.shape[1:]))
    harness.randomize(of_any)
    of_one.set_weights(of_any.get_weights())
    assert audit(of_any, images).to_dict() == audit(of_one, images).to_dict()
