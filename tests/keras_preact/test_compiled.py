"""Losses and metrics that do not fit the outputs of a model: what is said agrees with their
values.
"""

import re

import keras
import numpy as np
import pytest
from keras import layers, losses, metrics

import keras_preact as kp
from keras_preact import compiled
from keras_preact.analysis import audit
from tests.keras_preact import harness

#: Keras says it only there, and not through a cast or a layer of a person.
ONLY_ON_TENSORFLOW = pytest.mark.filterwarnings("ignore:.*does not represent logits:UserWarning")

X = harness.images(8, 6)
IMAGES = harness.images(8, 8, 8, 3)


class Head(keras.Layer):
    """A layer of a person, around another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


class LastPooling(Head):
    """Pools, and changes the values too."""

    def call(self, x):
        return self.inner(keras.ops.mean(x, axis=1))


class Subclassed(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.head = Head(inner)

    def call(self, x):
        return self.head(x)


def functional(*ending):
    """Return a function from a number of outputs to a model that ends in some layers."""

    def build(count):
        x = inputs = keras.Input((6,))
        for layer in (layers.Dense(count), *ending):
            x = layer(x)
        return keras.Model(inputs, x)

    return build


def of_places(*ending):
    """Return the same for models of two places with so many channels each."""

    def build(count):
        x = inputs = keras.Input((6,))
        for layer in (layers.Dense(2 * count), layers.Reshape((2, count)), *ending):
            x = layer(x)
        return keras.Model(inputs, x)

    return build


def nested(count):
    return keras.Sequential([keras.Input((6,)), functional(layers.Softmax())(count)])


def subclassed(count):
    return Subclassed(layers.Dense(count, activation="softmax"))


IN_FLOAT32 = layers.Activation("linear", dtype="float32")

POOLINGS = {
    "average": layers.GlobalAveragePooling1D(),
    "mean": lambda x: keras.ops.mean(x, axis=1),
    "local averages": layers.AveragePooling1D(2),
    "maximum": layers.GlobalMaxPooling1D(),
    "max": lambda x: keras.ops.max(x, axis=-2),
}
#: Ending to a function that builds a model with so many outputs, and what it returns.
ENDINGS = {
    "none": (functional(), "linear"),
    "linear activation": (functional(IN_FLOAT32), "linear"),
    "convolution": (
        functional(layers.Reshape((1, -1)), layers.Conv1D(3, 1), layers.Flatten()),
        "linear",
    ),
    "relu": (functional(layers.ReLU()), "other"),
    "tanh": (functional(layers.Dense(3, activation="tanh")), "other"),
    "softmax": (functional(layers.Softmax()), "softmax"),
    "function": (functional(keras.ops.softmax), "softmax"),
    "activation": (functional(layers.Activation(keras.ops.softmax)), "softmax"),
    "lambda": (functional(layers.Lambda(keras.ops.softmax)), "softmax"),
    "softmax, then float32": (functional(layers.Softmax(), IN_FLOAT32), "softmax"),
    "sigmoid, then cast": (
        functional(keras.ops.sigmoid, lambda x: keras.ops.cast(x, "float32")),
        "sigmoid",
    ),
    "layer of a person": (functional(Head(layers.Dense(3, activation="sigmoid"))), "sigmoid"),
    **{
        f"{name} of {activation}": (
            of_places(layers.Dense(3, activation=activation), pooling),
            kept,
        )
        for name, pooling in POOLINGS.items()
        for activation, kept in (
            ("softmax", "other" if "max" in name else "softmax"),
            ("sigmoid", "sigmoid"),
            ("linear", "linear"),
            ("relu", "other"),
        )
    },
    "average of a convolution": (
        of_places(layers.Conv1D(3, 1), layers.GlobalAveragePooling1D()),
        "linear",
    ),
    "average over classes": (
        of_places(layers.Permute((2, 1)), layers.Softmax(), lambda x: keras.ops.mean(x, axis=-1)),
        "other",
    ),
    "softmax over places": (
        of_places(layers.Dense(3), layers.Softmax(axis=1), layers.GlobalAveragePooling1D()),
        "other",
    ),
    "softmax over the last axis": (
        of_places(layers.Dense(3), layers.Softmax(axis=2), layers.GlobalAveragePooling1D()),
        "softmax",
    ),
    "function over the last axis": (functional(lambda x: keras.ops.softmax(x, axis=1)), "softmax"),
    "a pooling that does more": (
        of_places(
            layers.Dense(3, activation="softmax"), LastPooling(layers.Dense(3, activation="tanh"))
        ),
        "other",
    ),
    "each step": (
        of_places(layers.TimeDistributed(layers.Dense(3, activation="softmax"))),
        "softmax",
    ),
    "model of each step, averaged": (
        of_places(
            layers.TimeDistributed(
                keras.Sequential([keras.Input((3,)), layers.Dense(3), layers.Softmax()])
            ),
            layers.GlobalAveragePooling1D(),
        ),
        "softmax",
    ),
    "nested": (nested, "softmax"),
    "subclassed": (subclassed, "softmax"),
}
#: Activation to its values.
VALUES = {
    "linear": lambda x: x,
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


@pytest.mark.backend
@pytest.mark.parametrize("name", ENDINGS)
def test_how_a_model_ends(name):
    build, activation = ENDINGS[name]
    model = build(3)
    model(X)
    [found] = compiled.outputs_of(model, X)
    assert (found.activation, found.count) == (activation, 3)


def entropy(activation, logits, labels):
    """Return the cross-entropy that is right for logits."""
    p = np.clip(VALUES[activation](logits), 1e-7, 1 - 1e-7)
    if activation == "softmax":
        return -np.log(p[np.arange(len(p)), labels]).mean()
    return -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).mean()


BINARY = {
    "binary": losses.BinaryCrossentropy(),
    "binary of logits": losses.BinaryCrossentropy(from_logits=True),
    "binary text": "binary_crossentropy",
}
#: Losses in the forms that `compile` takes; a dictionary names the output.
LOSSES = {
    "sparse": losses.SparseCategoricalCrossentropy(),
    "sparse of logits": losses.SparseCategoricalCrossentropy(from_logits=True),
    "function": losses.sparse_categorical_crossentropy,
    "text": "crossentropy",
    "list": [losses.SparseCategoricalCrossentropy(from_logits=True)],
    "dictionary": {"out": "sparse_categorical_crossentropy"},
    **BINARY,
}


@pytest.mark.parametrize("are_logits", [True, False], ids=["logits", "probabilities"])
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 3) for name in LOSSES),
        *((name, 1) for name in LOSSES if name in BINARY),
        ("text", 1),
    ],
)
def test_a_loss_fits_if_it_is_the_cross_entropy(name, count, are_logits):
    loss = LOSSES[name]
    is_binary = name in BINARY or count == 1
    needed = "sigmoid" if is_binary else "softmax"
    ending = "linear" if are_logits else needed
    inputs = keras.Input((count,))
    outputs = layers.Activation(ending, name="out")(layers.Dense(count, use_bias=False)(inputs))
    model = keras.Model(inputs, outputs)
    model.layers[1].set_weights([np.eye(count)])
    model.compile("sgd", loss)
    logits = np.linspace(-2, 3, 8 * count, dtype="float32").reshape(8, count)
    labels = np.arange(8) % 3
    if is_binary:
        labels = (np.arange(8 * count).reshape(8, count) % 3 == 0).astype("float32")
    # from the values alone: TensorFlow sees the softmax before them, and reads its input
    outputs = keras.ops.convert_to_tensor(model.predict(logits, verbose=0))

    def is_the_cross_entropy() -> bool:
        value = model.compute_loss(y=keras.ops.convert_to_tensor(labels), y_pred=outputs)
        return np.isclose(value, entropy(needed, logits, labels), rtol=1e-3)

    fits = is_the_cross_entropy()
    found = compiled.problems(model)
    assert [problem.of for problem in found] == ["loss"] * (not fits)
    for problem in found:  # what it says to use fits these labels too
        name, takes_logits = re.search(r"losses\.(\w+)\(from_logits=(\w+)\)", problem.text).groups()
        model.compile("sgd", getattr(losses, name)(from_logits=takes_logits == "True"))
        assert is_the_cross_entropy()


#: Metric, number of outputs, ending, and the remedy; None if the metric fits.
METRICS = [
    ("accuracy", 1, "linear", "BinaryAccuracy(threshold=0)"),
    ("acc", 1, "linear", "BinaryAccuracy(threshold=0)"),
    ("binary_accuracy", 1, "linear", "BinaryAccuracy(threshold=0)"),
    (metrics.binary_accuracy, 3, "linear", "BinaryAccuracy(threshold=0)"),
    (metrics.BinaryAccuracy(), 3, "linear", "BinaryAccuracy(threshold=0)"),
    (metrics.BinaryAccuracy(threshold=0), 1, "linear", None),
    (metrics.BinaryAccuracy(threshold=0), 3, "sigmoid", "BinaryAccuracy(threshold=0.5)"),
    (metrics.BinaryAccuracy(threshold=0.3), 3, "sigmoid", None),
    ("accuracy", 1, "sigmoid", None),
    ("accuracy", 3, "linear", "BinaryAccuracy(threshold=0)"),
    ("accuracy", 3, "sigmoid", "BinaryAccuracy(threshold=0.5)"),
    (metrics.Precision(), 3, "linear", "Precision(thresholds=0)"),
    (metrics.Precision(thresholds=[0, 1]), 3, "linear", None),
    (metrics.Recall(top_k=1), 3, "linear", None),
    ("AUC", 1, "linear", "AUC(from_logits=True)"),
    (metrics.AUC(from_logits=True), 1, "linear", None),
    ("mae", 1, "linear", None),
]


@pytest.mark.parametrize(
    ("metric", "count", "ending", "remedy"), METRICS, ids=lambda value: harness.label(value)
)
def test_metrics(metric, count, ending, remedy):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(count, activation=ending)(inputs))
    loss = losses.BinaryCrossentropy(from_logits=ending == "linear")
    for options in ({"metrics": [metric]}, {"weighted_metrics": [metric]}):
        model.compile("sgd", loss, **options)
        found = compiled.problems(model)
        assert [problem.of for problem in found] == ["metrics"] * (remedy is not None)
        assert all(f"keras.metrics.{remedy}" in problem.text for problem in found)


def test_the_binary_accuracy_of_logits_is_that_of_their_probabilities():
    """Keras compares logits with 0.5 in `"accuracy"`: the remedy is right, the default is not."""
    inputs = keras.Input((1,))
    model = keras.Model(inputs, layers.Identity()(inputs))
    x, y = np.array([[-1.0], [0.3], [0.4], [2.0]]), np.array([[0], [1], [1], [1]])
    found = []
    for metric in ("accuracy", keras.metrics.BinaryAccuracy(threshold=0)):
        model.compile("sgd", losses.BinaryCrossentropy(from_logits=True), metrics=[metric])
        found.append(model.evaluate(x, y, verbose=0)[1])
    np.testing.assert_allclose(found, [0.5, 1.0])


LOGITS = losses.SparseCategoricalCrossentropy(from_logits=True)
MEAN = losses.MeanSquaredError()


#: Losses for several outputs, and the names of those that they do not fit.
IN_ORDER = [
    ([LOGITS, LOGITS], ["q"]),
    (("crossentropy", "binary_crossentropy"), ["p"]),
    ([None, LOGITS], ["q"]),
    ([MEAN, MEAN], []),
]
BY_NAME = [({"p": LOGITS, "q": "ce"}, []), ({"q": LOGITS, "p": "ce"}, ["p", "q"]), (LOGITS, ["q"])]


@pytest.mark.parametrize(
    ("kind", "loss", "wrong"),
    [
        *(("list", *row) for row in (*IN_ORDER, *BY_NAME)),
        *(("dictionary", *row) for row in BY_NAME),
    ],
    ids=harness.label,
)
def test_each_output_has_its_loss(kind, loss, wrong):
    inputs = keras.Input((6,))
    # the outputs are not in the order of their names
    q = layers.Dense(1, activation="sigmoid", name="q")(inputs)
    p = layers.Dense(3, name="p")(inputs)
    model = keras.Model(inputs, [p, q] if kind == "list" else {"q": q, "p": p})
    model.compile("sgd", loss)
    found = compiled.problems(model)
    assert [problem.output for problem in found] == wrong
    assert all(problem.text.startswith(f"Output {problem.output!r}: ") for problem in found)


@ONLY_ON_TENSORFLOW
@pytest.mark.backend
@pytest.mark.parametrize("sample", [None, X], ids=["without sample", "with sample"])
@pytest.mark.parametrize("name", ["none", "softmax, then float32", "subclassed"])
def test_training_health_reports_it_once_before_the_first_update(name, sample):
    build, activation = ENDINGS[name]
    model = build(3)
    model(X)
    wrong = losses.SparseCategoricalCrossentropy(from_logits=activation != "linear")
    model.compile("sgd", wrong)
    messages = []
    health = kp.TrainingHealth(sample=sample, report=messages.append)
    is_unknown = name == "subclassed" and sample is None
    for _ in range(2):
        model.fit(X, np.arange(8) % 3, epochs=1, verbose=0, callbacks=[health])
        assert len(messages) == (not is_unknown)
    assert all("it would learn little" in message for message in messages)


def test_training_health_reports_every_metric():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy", "AUC"])
    messages = []
    for health in [kp.TrainingHealth(report=messages.append)] * 2:
        model.fit(X, np.arange(8) % 2, verbose=0, callbacks=[health])
    remedies = [message.partition("keras.metrics.")[2] for message in messages]
    assert remedies == ["BinaryAccuracy(threshold=0)", "AUC(from_logits=True)"]


@pytest.mark.parametrize(
    ("activation", "loss", "metric", "status", "words"),
    [
        (None, None, None, "PASS", "not compiled"),
        (None, LOGITS, "accuracy", "PASS", "take what the model returns"),
        (None, "sparse_categorical_crossentropy", None, "FAIL", "from_logits=True"),
        ("softmax", LOGITS, None, "FAIL", "from_logits=False"),
        ("sigmoid", "binary_crossentropy", "accuracy", "WARN", "BinaryAccuracy(threshold=0.5)"),
    ],
)
def test_the_audit(activation, loss, metric, status, words):
    network = kp.models.resnet_cifar(8, input_shape=(8, 8, 3), include_top=False)
    outputs = layers.Dense(4, activation=activation, name="mine")(network.output)
    model = keras.Model(network.input, outputs)
    if loss is not None:
        model.compile("sgd", loss, metrics=metric and [metric])
    finding = audit(model, IMAGES)["loss and metrics"]
    assert (finding.status, finding.locations) == (status, ("mine",) * (status != "PASS"))
    assert words in finding.detail


@pytest.mark.parametrize("count", [1, 3])
def test_networks_of_the_package_warn_about_metrics(count):
    build = {"classes": count, "input_shape": (8, 8, 3)}
    network = kp.models.resnet_cifar(8, **build)
    loss = losses.BinaryCrossentropy(from_logits=True)
    with pytest.warns(UserWarning, match=r"Use keras.metrics.BinaryAccuracy\(threshold=0\)"):
        network.compile("sgd", loss, metrics=["accuracy"])
    network.compile("sgd", loss, metrics=[metrics.BinaryAccuracy(threshold=0)])


def test_the_loss_that_keras_chooses_by_the_labels():
    network = kp.models.resnet_cifar(8, input_shape=(8, 8, 3), classifier_activation="softmax")
    network.compile(keras.optimizers.SGD(0.0), "crossentropy")
    for labels in (np.arange(8), np.eye(10)[np.arange(8)]):
        network.fit(IMAGES, labels, verbose=0)
        network.compile(keras.optimizers.SGD(0.0), "crossentropy")


def test_analyses_take_probabilities_for_what_they_are():
    """A network in mixed precision often ends in a layer that only casts."""
    network = kp.models.resnet_cifar(8, input_shape=(8, 8, 3), include_top=False)
    logits = layers.Dense(4)(layers.GlobalAveragePooling2D()(network.output))
    labels = np.arange(8) % 4
    found = []
    for ending in ([], [layers.Softmax()], [layers.Softmax(), IN_FLOAT32]):
        outputs = logits
        for layer in ending:
            outputs = layer(outputs)
        result = audit(keras.Model(network.input, outputs), IMAGES, labels=labels)
        found.append([result[name].figure for name in ("gradient of the signal", "output scale")])
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=1e-3)


@pytest.mark.parametrize("each_place", ["softmax", "sigmoid", None])
def test_analyses_see_what_is_averaged_over_places(each_place):
    network = kp.models.resnet_cifar(8, input_shape=(8, 8, 3), include_top=False)
    at_places = layers.Conv2D(4, 1, activation=each_place)(network.output)
    model = keras.Model(network.input, layers.GlobalAveragePooling2D()(at_places))
    outputs, labels = model.predict(IMAGES, verbose=0).astype("float64"), np.arange(8) % 4
    if each_place == "sigmoid":
        labels = np.eye(4)[labels]
    # `entropy` takes logits; of a softmax, logarithms of the probabilities are some
    logits = {
        "softmax": np.log,
        "sigmoid": lambda p: np.log(p / (1 - p)),
        None: lambda x: x,
    }[each_place](outputs)
    expected = entropy(each_place or "softmax", logits, labels)
    found = kp.analysis.propagation(model, IMAGES, labels, training=False).loss
    np.testing.assert_allclose(found, expected, rtol=1e-3)
