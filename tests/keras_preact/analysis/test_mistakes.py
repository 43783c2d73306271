"""Wrong arguments of the analyses end in an error that says what was received. Pixels in
the wrong range cause a warning.
"""

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers import SGD

import keras_preact as kp
from keras_preact.analysis import (
    MeanField,
    audit,
    contributions,
    figures,
    grad_cam,
    jacobians,
    lesions,
    propagation,
)
from tests.keras_preact import harness

IMAGES = harness.images(2, 8, 8, 2)
FLOATS = np.ones((1, 3), "float32")


def of_values(*values):
    return jacobians.Spectrum(np.array(values), (3, 3), exact=True)


def network(**options):
    return kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(8, 8, 2), **options)


def dense():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def images_to(*own):
    return keras.Sequential([keras.Input((8, 8, 2)), *own])


def deep(**options):
    return kp.models.resnet_cifar(14, width_factor=0.25, input_shape=(8, 8, 2), **options)


def two_ends():
    model = network()
    ends = [layers.GlobalAveragePooling2D()(model.unit_outputs[i]) for i in (0, -1)]
    return keras.Model(model.input, layers.Dense(3)(layers.Concatenate()(ends)))


def signals(labels, images=IMAGES):
    return propagation(network(), images, labels)


def without_slope(_, outputs):
    """Finite, with a gradient that is NaN."""
    return keras.ops.sqrt(keras.ops.sum(0 * outputs, axis=-1))


def double(x):
    return 2 * x


class Growing:
    """A function that returns something else in each call."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * self.calls


@keras.saving.register_keras_serializable("tests")
class Bent(kp.shortcuts.Shortcut):
    def paths(self, x, residual, transformed):
        return keras.ops.tanh(x), residual


#: What is called, and words that its message must hold.
WRONG = [
    # batches, labels and models
    (lambda: signals(None, IMAGES[:0]), "at least one example"),
    (lambda: signals(None, IMAGES[..., :1]), "(None, 8, 8, 2)", "(2, 8, 8, 1)"),
    (lambda: signals([1, 2, 3]), "3 labels for 2 examples"),
    (lambda: signals(1), "the single label 1 for 2 examples"),
    (lambda: propagation(network(), IMAGES, [1, 2], loss="mse"), "`loss` must be a function"),
    (lambda: kp.analysis.critical_rate(network(), IMAGES, [1, 2], "sgd"), "optimizer='sgd'"),
    (lambda: signals([0, 10]), "labels from 0 to 10"),
    (lambda: signals([-1, 3]), "labels from -1 to 3"),
    (lambda: signals(np.eye(10)[[1, 2]]), "looks one-hot"),
    (lambda: propagation(dense(), FLOATS), "no residual unit"),
    (lambda: audit(dense(), np.ones((2, 3))), "has no residual unit"),
    (lambda: audit(network(), IMAGES * np.nan), "`sample` must be finite"),
    (lambda: audit(network(), IMAGES[:1]), "at least 2 examples, for batch statistics"),
    (lambda: audit(network(), IMAGES, labels=[0.5, 1]), "whole numbers, 0 to 9"),
    (lambda: audit(keras.Sequential([keras.layers.Dense(3)]), FLOATS), "is not built"),
    # lesions and shortcuts
    (lambda: lesions(network(), IMAGES, [0, 1], [(3,)]), "3 units"),
    (lambda: lesions(network(), [IMAGES] * 2, [0, 1]), "has 1 input. Received: 2 arrays"),
    (lambda: lesions(network(), IMAGES, None), "labels=None"),
    (lambda: lesions(network(), IMAGES, [0, 1], batch_size=0), "batch_size=0"),
    (lambda: list(kp.analysis.random_lesions(3, [4], 1)), "from 0 to 3"),
    (lambda: kp.analysis.path_lengths(0), "units=0"),
    (lambda: kp.analysis.expected_gain("conv1x1", 2), "depends on its weights"),
    # Jacobians
    (lambda: jacobians.jacobian(double, FLOATS[:0]), "at least one example"),
    (lambda: jacobians.jacobian(double, FLOATS * np.nan), "finite"),
    (lambda: jacobians.jacobian(lambda x: x > 0, FLOATS), "tensor of floats"),
    (lambda: jacobians.jacobian(Growing(), FLOATS), "same for the same x"),
    (lambda: jacobians.spectrum(double, FLOATS, k=4), "k=4"),
    (lambda: jacobians.spectrum(double, FLOATS, method="svd"), "method='svd'"),
    (lambda: jacobians.spectrum(double, FLOATS, k=2).condition_number, "2 largest of 3"),
    (lambda: jacobians.between(network(), 1, 8), "last=8"),
    (lambda: jacobians.between(network(), "x", 3), "first='x'"),
    # curvature and gradient noise
    (lambda: kp.analysis.curvature(dense(), FLOATS, k=0), "`k`"),
    (lambda: kp.analysis.curvature(dense(), FLOATS, probes=0), "`probes`"),
    (lambda: kp.analysis.gradient_noise(dense(), np.ones((8, 3)), parts=3), "divide the 8"),
    (lambda: kp.analysis.gradient_noise(dense(), FLOATS, parts=1), "at least 2"),
    # the critical rate
    (lambda: kp.analysis.critical_rate(dense(), FLOATS), "compile the model"),
    (lambda: kp.analysis.critical_rate(dense(), FLOATS, None, SGD(0.0)), "an update of 0"),
    (
        lambda: kp.analysis.critical_rate(dense(), FLOATS, None, SGD(0.1), loss=without_slope),
        "gradient and the update must be finite",
    ),
    # Grad-CAM
    (lambda: grad_cam(network(), IMAGES, [1, 2, 3]), "a label for each example"),
    (lambda: grad_cam(network(), IMAGES, [1, 10]), "0 to 9"),
    (lambda: grad_cam(network(), IMAGES, layer="mapss"), "which it does not have"),
    (lambda: grad_cam(network(), IMAGES, layer="conv_1"), "stage3"),
    (lambda: grad_cam(network(), IMAGES, layer="head_classifier"), "must be a map"),
    (lambda: grad_cam(images_to(layers.Conv2D(2, 1)), IMAGES), "(batch, classes)"),
    (lambda: grad_cam(images_to(layers.Flatten(), layers.Dense(5)), IMAGES), "Name a layer"),
    # contributions
    (lambda: contributions(network(), IMAGES, [1, 10]), "0 to 9"),
    (lambda: contributions(network(include_top=False), IMAGES), "(batch, classes)", "over units"),
    (lambda: contributions(network(activation="gelu"), IMAGES), "head_activation (Activation"),
    (lambda: contributions(network(normalization="group"), IMAGES), "GroupNormalization"),
    (lambda: contributions(network(arrangement="original"), IMAGES), "stage3_unit1", "an f"),
    (
        lambda: contributions(deep(shortcut=Bent()), IMAGES),
        "stage3_unit2",
        "not linear",
    ),
    (lambda: contributions(two_ends(), IMAGES), "also reads earlier tensors"),
    # mean-field theory
    (lambda: MeanField("tahn"), "'tanh'"),
    (lambda: MeanField("tanh", -1.0), "weight_variance=-1.0"),
    (lambda: MeanField().chi(-1.0), "q=-1.0"),
    (lambda: MeanField(shortcut="dropout"), "shortcut='dropout'"),
    (lambda: MeanField(weights=0), "weights=0"),
    (lambda: MeanField(shortcut="identity").phase, "shortcut='identity'"),
    (lambda: MeanField(normalization="batch").xi, "plain networks"),
    # figures
    (lambda: figures.gradient_norms({}), "empty mapping"),
    (lambda: figures.unit_diagram("orginal"), "Did you mean"),
    (lambda: figures.singular_values({}), "0 spectra; the largest value is 0.0"),
    *(
        (
            lambda value=value: figures.singular_values({"unit": of_values(value, 0.0)}),
            f"is {value}",
        )
        for value in (0.0, np.inf, np.nan)
    ),
    (lambda: figures.training_curves({"a": {"accuracy": [1.0]}}), "needs a `loss`"),
    (lambda: figures.training_health({"step": [1.0, 2.0]}), "1 columns, 2 rows"),
    (lambda: figures.path_length_shares(np.ones(3)), "sum of 1"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[1])
def test_error(case):
    call, *words = case
    message = harness.error_of(call)
    assert all(word in message for word in words), message


PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 2)).astype("float32")
OF_PIXELS = {"mean": 127.5, "std": 74.0}
ANALYSES = {
    "propagation": propagation,
    "check_identities": kp.analysis.check_identities,
    "direct_path": kp.analysis.direct_path,
    "channel_profile": kp.analysis.channel_profile,
    "lesions": lambda model, x: lesions(model, x, np.arange(8), [(1,)]),
    "curvature": lambda model, x: kp.analysis.curvature(model, x, probes=1),
    "gradient_noise": kp.analysis.gradient_noise,
    "critical_rate": lambda model, x: kp.analysis.critical_rate(model, x, None, SGD(0.1)),
    "grad_cam": grad_cam,
    "contributions": contributions,
}


@pytest.mark.parametrize("name", ANALYSES)
def test_pixels_in_the_wrong_range_warn_where_the_caller_is(name):
    """The messages are those of `fit`. Any other warning is an error."""
    with pytest.warns(UserWarning, match="expects values from 0 to 255") as found:
        ANALYSES[name](network(**OF_PIXELS), PIXELS / 255)
    ours = [warning for warning in found if warning.category is UserWarning]
    assert [warning.filename for warning in ours] == [__file__]


def test_pixels_in_the_right_range_and_models_of_unknown_range_do_not_warn():
    plain = network()
    with pytest.warns(UserWarning, match="This network has no preprocessing"):
        propagation(plain, PIXELS)
    propagation(plain, PIXELS / 255)
    propagation(network(**OF_PIXELS), PIXELS)
    propagation(keras.Model(plain.input, plain.output), PIXELS)
