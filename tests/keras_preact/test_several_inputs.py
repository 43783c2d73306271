"""Models with several inputs: every analysis takes a sample in each form that `fit` takes, and
gives the same figures.
"""

import re

import keras
import numpy as np
import pytest
from keras import layers

from keras_preact import analysis
from keras_preact.health.activations import Activations
from tests.keras_preact import harness

IMAGES, EXTRA = harness.images(8, 6, 6, 3), harness.images(8, 5)
LABELS = np.arange(8) % 4


def model_of(kind: str) -> keras.Model:
    """Return a residual network of an image and a vector: in this order for a list; Keras
    sorts a dictionary by the names.
    """
    image, extra = keras.Input((6, 6, 3), name="picture"), keras.Input((5,), name="about")
    x = layers.Conv2D(4, 3, padding="same")(image)
    for _ in range(2):
        y = layers.Activation("relu")(layers.BatchNormalization()(x))
        x = layers.add([x, layers.Conv2D(4, 3, padding="same")(y)])
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.Dense(4)(layers.concatenate([x, layers.Dense(4)(extra)]))
    inputs = [image, extra] if kind == "list" else {"picture": image, "about": extra}
    model = keras.Model(inputs, outputs)
    rng = np.random.default_rng(0)
    model.set_weights([abs(rng.normal(size=w.shape, scale=0.3)) + 0.1 for w in model.weights])
    return harness.compiled(model, keras.optimizers.SGD(0.1))


LIST = [IMAGES, EXTRA]
BY_NAME = {"about": EXTRA, "picture": IMAGES}
#: Kind of a model and a sample.
FORMS = [
    ("list", LIST),
    ("list", tuple(LIST)),
    ("list", BY_NAME),
    ("list", BY_NAME | {"of no input": EXTRA}),
    ("dictionary", LIST[::-1]),
    ("dictionary", BY_NAME),
    ("dictionary", dict(reversed(BY_NAME.items()))),
]


#: Analysis to a function of a model and a sample that returns its figures.
ANALYSES = {
    "propagation": lambda m, x: analysis.propagation(m, x, LABELS).gradient_norm,
    "channel_profile": lambda m, x: analysis.channel_profile(m, x).size,
    "check_identities": lambda m, x: analysis.check_identities(m, x).forward_error,
    "composite_gain": lambda m, x: analysis.composite_gain(m, x).forward,
    "direct_path": lambda m, x: analysis.direct_path(m, x).gain,
    "curvature": lambda m, x: analysis.curvature(m, x, LABELS).eigenvalues,
    "gradient_noise": lambda m, x: analysis.gradient_noise(m, x, LABELS, parts=2).variance,
    "critical_rate": lambda m, x: analysis.critical_rate(m, x, LABELS).rate,
    "lesions": lambda m, x: analysis.lesions(m, x, LABELS, batch_size=3).error,
    "audit": lambda m, x: [f.figure or 0 for f in analysis.audit(m, x, labels=LABELS).findings],
    "health": lambda m, x: Activations(m, x)(),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_every_form_of_a_sample(name):
    measure = ANALYSES[name]
    models = {kind: model_of(kind) for kind in ("list", "dictionary")}
    expected = np.array(measure(models["list"], LIST), "float64")
    assert np.isfinite(expected).any()
    for kind, sample in FORMS:
        found = np.array(measure(models[kind], sample), "float64")
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"about": EXTRA}, "has the inputs picture, about. Received: `x` with about"),
        ({"about": EXTRA, "more": IMAGES}, "Received: `x` with about, more"),
        ([IMAGES], "has 2 inputs. Received: 1 array as `x`"),
        (IMAGES, "has 2 inputs. Received: 1 array as `x`"),
    ],
)
def test_samples_that_do_not_fit(sample, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        analysis.propagation(model_of("list"), sample)
