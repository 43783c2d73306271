"""Pixels in the wrong range, labels that no class has, and losses that do not fit the
output are reported.
"""

import contextlib
import functools
import warnings

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

N = 32
PIXELS = np.random.default_rng(0).integers(0, 256, (N, 8, 8, 3)).astype("uint8")
LABELS = np.arange(N) % 10
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
CIFAR = kp.preprocessing.PREPROCESSING["cifar10"]
OF_PIXELS = {"mean": CIFAR.mean, "std": CIFAR.std}
SOURCES = ["arrays", "dataset"]


def network(**options):
    return kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(8, 8, 3), **options)


@functools.cache
def compiled(**options):
    model = network(**options)
    model.compile("sgd", LOGITS)
    return model


def data_of(source, images):
    """Return the arguments of `fit`."""
    if source == "arrays":
        return images, LABELS
    tf = pytest.importorskip("tensorflow")
    return (tf.data.Dataset.from_tensor_slices((images, LABELS)).batch(16),)


def messages(function, *args, **kwargs):
    """Return the warnings about the input of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, verbose=0, **kwargs)
    return [str(each.message) for each in caught if str(each.message).startswith("The input")]


def fit(model, source, images, **options):
    return messages(model.fit, *data_of(source, images), **options)


@pytest.mark.backend
@pytest.mark.parametrize("source", SOURCES)
def test_a_wrong_range_warns_once_and_a_right_one_never(source):
    model = compiled(**OF_PIXELS)
    assert fit(model, source, PIXELS) == []
    [message] = fit(model, source, PIXELS / 255)
    assert "from 0 to 1. This network expects values from 0 to 255" in message
    assert "Multiply it by 255" in message


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"mean": 0.47, "std": 0.25}, "Divide it by 255"), ({}, "Build it with the `mean`")],
)
def test_pixels_that_are_too_large(options, remedy):
    assert fit(compiled(**options), "arrays", PIXELS / 255) == []
    [message] = fit(compiled(**options), "arrays", PIXELS)
    assert remedy in message


@pytest.mark.parametrize("source", SOURCES)
def test_evaluate_predict_and_validation_data_are_looked_at(source):
    model = compiled(**OF_PIXELS)
    for images, expected in ((PIXELS, 0), (PIXELS / 255, 1)):
        data = data_of(source, images)
        assert len(messages(model.evaluate, *data)) == expected
        assert len(messages(model.predict, *data[:1])) == expected
        held_out = data if len(data) > 1 else data[0]
        assert len(fit(model, "arrays", PIXELS, validation_data=held_out)) == expected


def test_a_data_set_gives_keras_the_same_elements():
    expected = kp.preprocessing.InputRange(CIFAR.mean, CIFAR.std)
    checks = kp.models.first_batch.Checks(expected, LOGITS, 10)
    seen = checks.watched(*data_of("dataset", PIXELS))
    images, labels = zip(*seen, strict=True)
    np.testing.assert_array_equal(np.concatenate(images), PIXELS)
    np.testing.assert_array_equal(np.concatenate(labels), LABELS)


def test_only_the_first_batch_is_judged():
    scaled = PIXELS / 255
    for first, second, expected in ((scaled, PIXELS, 1), (PIXELS, scaled, 0)):
        images = np.concatenate([first[:16], second[16:]])
        assert len(fit(compiled(**OF_PIXELS), "dataset", images)) == expected


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((N, 8, 8, 3)),
        np.full((1, 8, 8, 3), 255.0),
        (PIXELS[:2] < 4).astype("float32"),  # two nearly black images
        PIXELS[:1].astype("float32"),
        np.full((1, 8, 8, 3), 0.5),
        np.full((N, 8, 8, 3), np.nan),
    ],
    ids=["black", "white", "dark", "one", "constant", "nan"],
)
def test_no_false_alarm(images):
    assert messages(compiled(**OF_PIXELS).predict, images) == []


@pytest.mark.parametrize("largest", [1e19, 1e30, 3e38])
def test_squares_that_float32_cannot_hold(largest):
    images = np.float32(largest) * np.where(np.arange(N).reshape(N, 1, 1, 1) % 2, 1, -1)
    for expected in (kp.preprocessing.InputRange(), kp.preprocessing.InputRange(125.0, 64.0)):
        assert f"values from -{largest:.0e}" in expected.problem(images.astype("float32"))


def test_bounds():
    for mean, std, bounds in (
        (0, 1, (-2, 2)),
        (CIFAR.mean, CIFAR.std, (0, 255)),
        (0.5, 0.5, (0, 1)),
        (5.0, 6.0, (-7, 17)),
        (127.5, 255.0, (0, 255)),  # x / 255 - 0.5
    ):
        assert kp.preprocessing.InputRange(mean, std).bounds == bounds


# --- Every kind of data that Keras takes


class PyData(keras.utils.PyDataset):
    def __init__(self, images, labels, **options):
        super().__init__(**options)
        self.images, self.labels, self.ended = images, labels, 0

    def __len__(self):
        return len(self.images) // 8

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return self.images[rows], self.labels[rows]

    def on_epoch_end(self):
        self.ended += 1


def jax_arrays(images, labels):
    if keras.backend.backend() != "jax":
        pytest.skip("once JAX has run, it warns whenever the process forks")
    jnp = pytest.importorskip("jax.numpy")
    return jnp.asarray(images, "float32"), jnp.asarray(labels)


def torch_tensors(images, labels):
    torch = pytest.importorskip("torch")
    return torch.tensor(images.astype("float32")), torch.tensor(labels)


def tensorflow_tensors(images, labels):
    tf = pytest.importorskip("tensorflow")
    return tf.constant(images, "float32"), tf.constant(labels)


def frames(images, labels):
    pandas = pytest.importorskip("pandas")
    return images, pandas.Series(labels) if labels.ndim == 1 else pandas.DataFrame(labels)


def dataset(images, labels):
    tf = pytest.importorskip("tensorflow")
    return (tf.data.Dataset.from_tensor_slices((images, labels)).batch(8),)


def data_loader(images, labels, **options):
    torch = pytest.importorskip("torch")
    tensors = torch.utils.data.TensorDataset(*torch_tensors(images, labels))
    return (torch.utils.data.DataLoader(tensors, 8, **options),)


def generator(images, labels):
    data = PyData(images, labels)
    return ((data[i] for i in range(len(data))),)


KINDS = {
    "NumPy": lambda *data: data,
    "JAX": jax_arrays,
    "torch": torch_tensors,
    "TensorFlow": tensorflow_tensors,
    "pandas": frames,
    "tf.data": dataset,
    "PyDataset": lambda *data: (PyData(*data),),
    "PyDataset with threads": lambda *data: (PyData(*data, workers=2),),
    "generator": generator,
    "DataLoader": data_loader,
}
BATCHED = [kind for kind in KINDS if kind not in ("NumPy", "JAX", "torch", "TensorFlow", "pandas")]


@pytest.mark.backend
@pytest.mark.parametrize("kind", KINDS)
def test_the_range_in_every_kind_of_data(kind):
    # TensorFlow traces labels with other numbers of axes badly, and a Series has two
    model = compiled(**OF_PIXELS, name="of_series" if kind == "pandas" else None)
    for images, expected in ((PIXELS, 0), (PIXELS / 255, 1)):
        assert len(messages(model.evaluate, *KINDS[kind](images, LABELS))) == expected


#: Classes of the network, loss, labels, words of the error.
BINARY = keras.losses.BinaryCrossentropy(from_logits=True)
TWO = LABELS % 2
WRONG_LABELS = [
    (10, LOGITS, LABELS + 1, "labels from 1 to 10"),
    (10, LOGITS, LABELS - 1, "labels from -1 to 8"),
    # the last label alone is wrong
    (10, LOGITS, np.where(np.arange(N) == N - 1, 10, LABELS), "labels from 0 to 10"),
    (10, LOGITS, np.eye(10, dtype=int)[LABELS], "one-hot"),
    (1, BINARY, TWO + 1, "labels from 1 to 2"),
    (1, LOGITS, TWO, "use keras.losses.BinaryCrossentropy(from_logits=True)"),
    (10, BINARY, TWO, "labels of shape (examples, 10). Received: labels of shape ("),
    (10, BINARY, np.eye(10, dtype=int)[LABELS] + 1, "labels from 1 to 2"),
]


@functools.cache
def classifier(classes, loss, axes=1):
    """A compiled network. TensorFlow traces labels with other numbers of axes badly."""
    model = network(classes=classes)
    model.compile("sgd", loss)
    return model


@pytest.mark.backend
@pytest.mark.parametrize(
    ("classes", "loss", "labels", "words"), WRONG_LABELS, ids=range(len(WRONG_LABELS))
)
@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_the_outputs_cannot_have(kind, classes, loss, labels, words):
    model = classifier(classes, loss)
    if kind in BATCHED:  # a message speaks of one batch
        words = words.replace("labels from -1 to 8", "labels from -1 to ")
        words = words.replace("labels from 1 to 10", "so labels must be 0 to 9")
        words = words.replace("labels from 0 to 10", "so labels must be 0 to 9")
    images = PIXELS.astype("float32") / 255
    message = harness.error_of(lambda: model.evaluate(*KINDS[kind](images, labels), verbose=0))
    assert words in message


@pytest.mark.backend
@pytest.mark.parametrize(
    ("classes", "loss", "labels"),
    [
        (10, LOGITS, LABELS),
        (10, LOGITS, LABELS[:, None]),
        (1, BINARY, TWO),
        (1, BINARY, TWO[:, None] * 0.9 + 0.05),
        (10, BINARY, np.eye(10)[LABELS]),
        (10, "mse", np.eye(10)[LABELS] * 5),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("kind", ["NumPy", *BATCHED])
def test_labels_that_the_outputs_can_have(kind, classes, loss, labels):
    images = PIXELS.astype("float32") / 255
    steps = 4 if kind == "generator" else None  # Keras warns at the end of a generator
    classifier(classes, loss, labels.ndim).evaluate(
        *KINDS[kind](images, labels), steps=steps, verbose=0
    )


@pytest.mark.backend
@pytest.mark.parametrize("deed", ["x", "validation"])
def test_fit_refuses_them_too(deed):
    wrong = KINDS["tf.data"](PIXELS / 255, LABELS + 1)[0]
    right = KINDS["tf.data"](PIXELS / 255, LABELS)[0]
    x, held_out = (wrong, right) if deed == "x" else (right, wrong)
    model = classifier(10, LOGITS)
    message = harness.error_of(
        lambda: model.fit(x, validation_data=held_out, shuffle=False, verbose=0)
    )
    assert message.startswith("The network has 10 classes")
    arrays = (PIXELS / 255, LABELS + 1)
    message = harness.error_of(
        lambda: model.fit(right, validation_data=arrays, shuffle=False, verbose=0)
    )
    assert message.startswith("The network has 10 classes")


def test_arguments_by_position():
    data = (PIXELS[:4] / 255, LABELS[:4])
    history = classifier(10, LOGITS).fit(*data, 2, 1, 0, None, 0.0, data)
    assert len(history.history["val_loss"]) == 1


def test_a_py_dataset_is_told_of_epochs():
    plain = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    plain.compile(loss="mse")
    data, expected = PyData(PIXELS / 255, LABELS), PyData(PIXELS / 255, LABELS)
    classifier(10, LOGITS).fit(data, epochs=2, verbose=0)
    plain.fit(expected, epochs=2, verbose=0)
    assert data.ended == expected.ended >= 2


def test_a_data_loader_keeps_its_order():
    torch = pytest.importorskip("torch")
    expected, seen = (
        [batch[1].tolist() for batch in loader]
        for loader in (
            data_loader(PIXELS, LABELS, shuffle=True, generator=torch.Generator().manual_seed(1))[
                0
            ],
            kp.models.first_batch.Checks(kp.preprocessing.InputRange(125.0, 64.0)).watched(
                data_loader(
                    PIXELS, LABELS, shuffle=True, generator=torch.Generator().manual_seed(1)
                )[0]
            ),
        )
    )
    assert seen == expected


SPARSE, ENTROPY = (
    keras.losses.sparse_categorical_crossentropy,
    keras.losses.CategoricalCrossentropy(),
)
#: Loss, activation, classes, and a pattern of the warning; None for a loss that fits.
LOSSES = [
    ("categorical_crossentropy", None, 10, r"returns logits.*\(from_logits=True\)"),
    (SPARSE, None, 10, r"returns logits.*\(from_logits=True\)"),
    ([ENTROPY], None, 5, "classifier_activation='softmax'"),
    ("binary_crossentropy", None, 1, "classifier_activation='sigmoid'"),
    (keras.losses.BinaryCrossentropy(), None, 5, "classifier_activation='sigmoid'"),
    (LOGITS, "softmax", 10, "returns probabilities"),
    (BINARY, "sigmoid", 1, "returns probabilities"),
    (BINARY, "softmax", 1, "always 1"),
    *((loss, "softmax", 10, None) for loss in ("categorical_crossentropy", SPARSE, [ENTROPY])),
    *((loss, None, 10, None) for loss in ("mse", LOGITS, lambda y, p: p, np.subtract)),
    # activations that the check does not know
    (LOGITS, lambda x: x, 10, None),
    (LOGITS, keras.layers.PReLU(), 10, None),
]


@pytest.mark.parametrize(("loss", "activation", "classes", "words"), LOSSES, ids=range(len(LOSSES)))
def test_losses_that_do_not_fit_the_output(loss, activation, classes, words):
    warned = pytest.warns(UserWarning, match=words) if words else contextlib.nullcontext()
    with warned:
        network(classes=classes, classifier_activation=activation).compile("sgd", loss)


#: Function to its arguments; of `fit`, Keras would warn that it cannot shuffle.
STEPS = {"fit": {"steps_per_epoch": 5, "shuffle": False}}


@pytest.mark.backend
@pytest.mark.parametrize("deed", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("batches", [1, 2])
def test_an_error_in_the_data_leaves_the_model_as_it_was(deed, batches):
    """On JAX, Keras alone would lose all weights."""
    model = network(classes=10)
    model.compile(keras.optimizers.SGD(0.0), LOGITS)
    before = harness.weights(model)

    def data():
        for _ in range(batches):
            yield PIXELS[:8] / 255, LABELS[:8]
        raise RuntimeError("no more data")

    with pytest.raises(Exception, match="no more data"):  # TensorFlow has a class of its own
        getattr(model, deed)(data(), verbose=0, **STEPS.get(deed, {"steps": 5}))
    for path, value in harness.weights(model).items():
        if "moving_" not in path:
            np.testing.assert_array_equal(value, before[path], path)
    model.fit(PIXELS / 255, LABELS, verbose=0)  # it can go on


@pytest.mark.backend
@pytest.mark.parametrize("deed", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize(
    "images",
    [PIXELS.transpose(0, 3, 1, 2), PIXELS[..., :2], PIXELS[0], PIXELS[:, 0, 0]],
    ids=lambda images: str(images.shape),
)
def test_keras_speaks_of_inputs_that_do_not_fit(deed, images):
    model = compiled(**OF_PIXELS)
    call = getattr(model, deed)
    labels = () if deed == "predict" else (LABELS[: len(images)],)
    with pytest.raises(Exception, match=r"[sS]hape") as caught:
        call(images, *labels, verbose=0)
    assert "operands could not be broadcast" not in str(caught.value)  # by NumPy, in our check
