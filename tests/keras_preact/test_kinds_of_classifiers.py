"""Classifiers of one class among many, of two classes with one output, and of several
classes at once, with logits or probabilities: each feature measures what NumPy computes from
the logits.
"""

import dataclasses
import functools
import json
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_preact as kp
from keras_preact.classifiers import Outputs
from keras_preact.export import _check, _scores
from keras_preact.serving.servable import Servable
from tests.keras_preact import harness
from tests.keras_preact.export.one_process import in_this_process
from training.commands.predict.__main__ import predict

pytestmark = pytest.mark.backend

X = harness.images(12, 6, 6, 1)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of classifier: number of outputs, activation of the last layer, loss of
    `compile`, and the function that turns its logits into probabilities.
    """

    outputs: int
    activation: str | None
    loss: str | None
    probabilities: str

    @property
    def is_binary(self) -> bool:
        return self.probabilities == "sigmoid" and self.outputs == 1


KINDS = {
    "softmax": Kind(3, "softmax", "sparse_categorical_crossentropy", "softmax"),
    "logits": Kind(3, None, None, "softmax"),
    "binary": Kind(1, "sigmoid", "binary_crossentropy", "sigmoid"),
    "binary logit": Kind(1, None, None, "sigmoid"),
    "several": Kind(3, "sigmoid", "binary_crossentropy", "sigmoid"),
    "several logits": Kind(3, None, "BinaryCrossentropy", "sigmoid"),
}
MAKERS = ("network", "layers", "nested")


@functools.cache
def made(name: str, maker: str) -> tuple[keras.Model, np.ndarray]:
    """A model and its logits. Features leave it as it is."""
    kind = KINDS[name]
    options = {"input_shape": (6, 6, 1), "classes": 3, "stem": "3x3", "stem_filters": 4}
    options |= {"block": "basic", "mean": 0.1, "std": 1.1}
    options["classes"] = kind.outputs
    network = kp.models.ResidualNetwork(
        [(4, 1), (4, 2, 2)], classifier_activation=kind.activation, **options
    )
    harness.randomize(network)
    kernel, bias = network.get_layer("head_classifier").get_weights()
    network.get_layer("head_classifier").set_weights([3 * kernel, 0 * bias])
    # about half of the answers of a classifier are yes
    middle = np.median(harness.numpy(keras.Model(network.input, network.logits)(X)), axis=0)
    network.get_layer("head_classifier").set_weights([3 * kernel, -middle])
    logits = harness.numpy(keras.Model(network.input, network.logits)(X)).astype("float64")
    model = network
    if maker == "layers":
        pooled = network.get_layer("head_pool").output
        dense = keras.layers.Dense(kind.outputs, activation=kind.activation, name="head")
        model = keras.Model(network.input, dense(pooled))
        dense.set_weights(network.get_layer("head_classifier").get_weights())
    elif maker == "nested":
        inputs = keras.Input((6, 6, 1))
        model = keras.Model(inputs, network(inputs))
    if kind.loss is not None:
        loss = keras.losses.get(kind.loss)
        if kind.activation is None:
            loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    return model, logits


def probabilities(name: str, logits: np.ndarray) -> np.ndarray:
    if KINDS[name].probabilities == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits)
    return powers / powers.sum(1, keepdims=True)


def answers(name: str, logits: np.ndarray) -> np.ndarray:
    """The answers, as labels have them; some of them wrong."""
    kind = KINDS[name]
    if kind.probabilities == "softmax":
        labels = logits.argmax(1)
        labels[0] = (labels[0] + 1) % 3
        return labels
    labels = (logits > 0).astype(int)
    labels[0] = 1 - labels[0]
    return labels[:, 0] if kind.is_binary else labels


def cross_entropy(name: str, logits: np.ndarray, labels: np.ndarray) -> float:
    chances = probabilities(name, logits)
    if KINDS[name].probabilities == "softmax":
        return float(-np.log(chances[np.arange(len(labels)), labels]).mean())
    labels = labels.reshape(chances.shape)
    return float(-np.log(np.where(labels, chances, 1 - chances)).mean())


EVERY = pytest.mark.parametrize(
    ("name", "maker"), [(name, maker) for name in KINDS for maker in MAKERS]
)


@EVERY
def test_analyses(name, maker):
    model, logits = made(name, maker)
    labels = answers(name, logits)
    signals = kp.analysis.propagation(model, X, labels, training=False)
    assert signals.loss == pytest.approx(cross_entropy(name, logits, labels), rel=1e-3)
    lesions = kp.analysis.lesions(model, X, labels, [(), (0,)], batch_size=5)
    assert lesions.error[0] == lesions.intact_error == pytest.approx(1 / len(X))
    findings = {each.check: each for each in kp.analysis.audit(model, X, labels=labels).findings}
    of_logits, _ = made("binary logit" if KINDS[name].outputs == 1 else "logits", "network")
    with keras.StatelessScope():  # moving statistics stay
        in_training = harness.numpy(of_logits(X, training=True))
    size = findings["output scale"].figure
    assert size == pytest.approx(np.sqrt(np.mean(in_training**2)), rel=1e-3)
    one = labels[:, None] if KINDS[name].is_binary else labels
    np.testing.assert_equal(
        kp.analysis.propagation(model, X, one, training=False).loss, signals.loss
    )


@functools.cache
def of_pixels(name: str) -> tuple[keras.Model, np.ndarray]:
    """A classifier of each pixel, and its logits `(12, 6, 6, outputs)`."""
    kind = KINDS[name]
    inputs = keras.Input((6, 6, 1))
    features = kp.ResidualUnit(4, name="unit")(inputs)
    heads = [keras.layers.Conv2D(kind.outputs, 1, activation=a) for a in (kind.activation, None)]
    model, of_logits = (keras.Model(inputs, head(features)) for head in heads)
    harness.randomize(model)
    heads[1].set_weights(heads[0].get_weights())
    if kind.loss is not None:
        model.compile("sgd", keras.losses.get(kind.loss))
    return model, harness.numpy(of_logits(X)).astype("float64")


@pytest.mark.parametrize("name", KINDS)
def test_a_class_for_each_pixel(name):
    model, logits = of_pixels(name)
    rows = logits.reshape(-1, logits.shape[-1])
    flat = answers(name, rows)
    labels = flat.reshape(*logits.shape[:-1], *flat.shape[1:])
    masks = [labels] if flat.ndim == 2 else [labels, labels[..., None]]
    wrong = 1 / len(rows)  # of several classes, all of one pixel are wrong
    for each in masks:
        lesions = kp.analysis.lesions(model, X, each, [], batch_size=5)
        assert lesions.intact_error == pytest.approx(wrong)
        if (name, keras.backend.backend()) == ("softmax", "torch"):
            continue  # `fit` fails too: "grad_input must be contiguous" (Keras 3.15, torch 2.13)
        signals = kp.analysis.propagation(model, X, each, training=False)
        assert signals.loss == pytest.approx(cross_entropy(name, rows, flat), rel=1e-3)
    for badly in (labels[:, 0], labels[:, :5], flat[:12]):
        for function in (kp.analysis.propagation, kp.analysis.lesions):
            message = harness.error_of(lambda badly=badly, run=function: run(model, X, badly))
            assert "for each of the places (6, 6) of its output. Received: shape (12" in message


@EVERY
def test_maps_are_those_of_the_logits(name, maker):
    """A network that is sure of its answer has the same map."""
    model, logits = made(name, maker)
    kind = KINDS[name]
    classes = np.arange(len(X)) % (2 if kind.is_binary else 3)
    maps = kp.analysis.grad_cam(model, X, classes)
    body = model if maker != "nested" else model.layers[-1]
    pooled = body.get_layer("head_pool").output
    head = body.get_layer("head" if maker == "layers" else "head_classifier")
    kernel = harness.numpy(head.kernel)
    if kind.is_binary:
        kernel = np.concatenate([-kernel, kernel], axis=1)
    activations = harness.numpy(
        keras.Model(body.input, body.get_layer("head_activation").output)(X)
    )
    weights = kernel.T[classes] / np.prod(activations.shape[1:3])
    sums = np.maximum((activations * weights[:, None, None]).sum(-1, keepdims=True), 0)
    sums = sums.astype("float32")
    expected = harness.numpy(keras.ops.image.resize(sums, (6, 6), data_format="channels_last"))
    harness.close(maps, expected[..., 0], 1e-4)
    assert pooled.shape[-1] == len(kernel)
    predicted = kp.analysis.grad_cam(model, X)
    own = logits.argmax(1) if not kind.is_binary else (logits[:, 0] > 0).astype(int)
    harness.close(predicted, kp.analysis.grad_cam(model, X, own), 1e-6)


@pytest.mark.parametrize(("name", "maker"), list(zip(KINDS, 2 * MAKERS, strict=True)))
def test_parts_add_up_to_logits(name, maker):
    model, logits = made(name, maker)
    kind = KINDS[name]
    classes = np.arange(len(X)) % (2 if kind.is_binary else 3)
    found = kp.analysis.contributions(model, X, classes)
    outputs = np.concatenate([-logits, logits], axis=1) if kind.is_binary else logits
    assert len(found.residual) == 2
    total = found.start + found.residual.sum(axis=0) + found.bias
    harness.close(total, outputs[np.arange(len(X)), classes])


@EVERY
def test_temperature(name, maker):
    _, logits = made(name, maker)
    labels = answers(name, logits)
    options = {} if KINDS[name].outputs == 1 else {"activation": KINDS[name].probabilities}
    temperature = kp.transfer.fit_temperature(logits, labels, **options)
    losses = [cross_entropy(name, logits / (temperature * t), labels) for t in (0.99, 1, 1.01)]
    assert losses[1] == min(losses)


NAMES = {"softmax": ["a", "b", "c"], "binary": ["no", "yes"]}


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="a process with TensorFlow writes exports"
)
@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("softmax", "network"),
        ("binary logit", "network"),
        ("several", "nested"),
        ("binary", "layers"),
        *(
            pytest.param(*pair, marks=pytest.mark.soak)
            for pair in (
                ("logits", "nested"),
                ("binary", "network"),
                ("several logits", "network"),
                ("several logits", "layers"),
            )
        ),
    ],
)
def test_exports(name, maker, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_check, "replay", in_this_process)
    monkeypatch.setattr(_check, "compare", lambda *_: {})  # closer below
    # the command for files reads the export that this test has read
    monkeypatch.setattr(tf.saved_model, "load", functools.cache(tf.saved_model.load))
    model, logits = made(name, maker)
    kind, labels = KINDS[name], answers(name, logits)
    names = ["a", "b", "c"]
    if kind.is_binary:
        names = ["no", "yes"] if maker == "network" else ["yes"]
    path = kp.export.save(model, tmp_path / names[0], classes=names, top_k=2, batch_sizes=[1])
    served = tf.saved_model.load(str(path))
    outputs = served.signatures["serving_default"](images=tf.constant(X))
    harness.close(outputs["logits"].numpy(), logits, 1e-4)
    expected = probabilities(name, logits)
    harness.close(outputs["probabilities"].numpy(), expected, 1e-4)
    # what the check of an export compares with
    compared = _check.expected(_scores.take_apart(model), X)
    harness.close(compared["probabilities"], expected, 1e-4)
    file = tf.io.encode_png(np.full((6, 6, 1), 40, "uint8"))
    found = served.signatures["predict_bytes"](image_bytes=file[None])
    [expected] = served.signatures["serving_default"](images=np.full((1, 6, 6, 1), 40, "float32"))[
        "probabilities"
    ].numpy()
    expected = [1 - expected[0], expected[0]] if names == ["no", "yes"] else expected
    order = np.argsort(expected)[::-1][: len(names)][:2]
    assert [each.decode() for each in found["classes"][0].numpy()] == [names[i] for i in order]
    harness.close(found["scores"][0].numpy(), np.array(expected)[order], 1e-5)
    card = json.loads((path.parent / "model_card.json").read_text())
    assert (card["classes"], card["activation"]) == (names, kind.probabilities)
    # the server, and the command for files, name the same classes
    server = types.SimpleNamespace(classes=names, top_k=card["top_k"])
    best = Servable.best(server, served.core(np.full((1, 6, 6, 1), 40.0))["probabilities"].numpy())
    assert best["classes"][0].tolist() == [names[i] for i in order]
    harness.close(best["scores"][0], np.array(expected)[order], 1e-5)
    (tmp_path / "image.png").write_bytes(file.numpy())
    predict(path.parent, (tmp_path / "image.png",), top=1)
    assert f"  {names[order[0]]}" in capsys.readouterr().out
    if (name, maker) in (("binary logit", "network"), ("several logits", "network")):
        path = kp.export.save(
            model,
            tmp_path / "bfloat16",
            classes=names,
            precision="bfloat16",
            validation_data=(X, labels),
            max_accuracy_loss=1,
            batch_sizes=[1],
        )
        card = json.loads((path.parent / "model_card.json").read_text())
        assert card["activation"] == kind.probabilities
        assert card["check"]["accuracy"]["model"] == pytest.approx(1 - 1 / len(X))


def nested_twice(model):
    inputs = keras.Input((6, 6, 1))
    return keras.Model(inputs, model(inputs))


def in_a_sequence(model):
    return keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Rescaling(1.0), model])


@EVERY
@pytest.mark.parametrize("wrap", [nested_twice, in_a_sequence])
def test_the_logits_of_a_classifier_inside_a_model(name, maker, wrap):
    model, logits = made(name, maker)
    kind, outer = KINDS[name], wrap(model)
    if kind.loss is not None:  # only the outer model is compiled
        outer.compile("sgd", model.loss)
    scores = _scores.take_apart(outer)
    assert (scores.activation, scores.outputs.count) == (kind.probabilities, kind.outputs)
    found = _check.expected(scores, X)
    harness.close(found["logits"], logits, 1e-4)
    harness.close(found["probabilities"], probabilities(name, logits), 1e-4)
    of_export = scores.core(X)
    harness.close(harness.numpy(of_export[0]), logits, 1e-4)
    assert of_export[1].shape == (len(X), 4)
    if kind.activation is None:
        last = keras.layers.Activation(kind.probabilities)
        sure = _scores.take_apart(keras.Sequential([outer, last]))
        assert (sure.activation, sure.gives_probabilities) == (kind.probabilities, True)
        harness.close(harness.numpy(sure.core(X)[0]), logits, 1e-4)


WRONG = [
    ("softmax", [0, 3], "0 to 2"),
    ("softmax", [[1, 0, 0], [0, 1, 0]], "argmax"),
    ("binary", [1, 2], "0 or 1, one per example"),
    ("binary", [[0, 1], [1, 0]], "0 or 1, one per example"),
    ("binary logit", [-1, 1], "0 or 1, one per example"),
    ("several", [0, 1], "an array (examples, 3)"),
    ("several logits", [[0, 2, 0], [0, 1, 1]], "labels from 0 to 2"),
]


@pytest.mark.parametrize(("name", "labels", "words"), WRONG, ids=range(len(WRONG)))
def test_labels_that_do_not_fit(name, labels, words):
    model, _ = made(name, "network")
    scores = _scores.take_apart(model)
    labels, outputs = np.array(labels), scores.outputs
    for function in (
        lambda: kp.analysis.propagation(model, X[:2], labels),
        lambda: kp.analysis.lesions(model, X[:2], labels),
        lambda: _check.labelled((X[:2], labels), "bfloat16", scores),
        lambda: kp.transfer.fit_temperature(
            np.zeros((2, outputs.count)), labels, outputs.activation
        ),
    ):
        assert words in harness.error_of(function)


def test_one_hot_labels_are_not_taken_for_several_classes():
    message = harness.error_of(lambda: kp.transfer.fit_temperature(np.eye(3), np.eye(3)))
    assert "may be one-hot" in message


def test_activations_without_a_meaning():
    for options, words in (
        ({"classes": 1, "classifier_activation": "softmax"}, "always 1"),
        ({"classes": 3, "classifier_activation": "tanh"}, "classifier_activation='tanh'"),
    ):
        model = kp.models.resnet_cifar(8, width_factor=0.125, input_shape=(8, 8, 1), **options)
        assert words in harness.error_of(lambda model=model: _scores.take_apart(model))
    dense = keras.layers.Dense(1, activation="softmax")
    model = keras.Sequential([keras.Input((3,)), dense])
    assert "always 1" in harness.error_of(lambda: _scores.take_apart(model))
    assert Outputs(1, "sigmoid", are_logits=True).is_binary
