"""Pixels in the wrong range, labels that no class has, and losses that do not fit the
output are reported.
"""

import functools
import warnings

import keras
import numpy as np
import pytest

import keras_preact as kp

pytestmark = pytest.mark.backend

N = 32
PIXELS = np.random.default_rng(0).integers(0, 256, (N, 8, 8, 3)).astype("uint8")
LABELS = np.arange(N) % 10
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
CIFAR = kp.preprocessing.PREPROCESSING["cifar10"]
CIFAR_RANGE = kp.preprocessing.InputRange(CIFAR.mean, CIFAR.std)
#: Name to the arguments of a network and the factor from pixels to the input that it expects.
NETWORKS = {
    "pixels": ({"mean": CIFAR.mean, "std": CIFAR.std}, 1.0),
    "plain": ({}, 1 / 255),
    "unit": ({"mean": 0.47, "std": 0.25}, 1 / 255),
}


@functools.cache
def network(name):
    model = kp.models.resnet_cifar(8, input_shape=(8, 8, 3), **NETWORKS[name][0])
    model.compile("sgd", LOGITS)
    return model


class Batches(keras.utils.PyDataset):
    def __init__(self, images):
        super().__init__()
        self.images = images

    def __len__(self):
        return 2

    def __getitem__(self, i):
        rows = slice(16 * i, 16 * i + 16)
        return self.images[rows], LABELS[rows]


def as_dataset(images):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((images, LABELS)).batch(16)


def as_loader(images):
    data = pytest.importorskip("torch").utils.data
    return data.DataLoader(list(zip(images.astype("float32"), LABELS, strict=True)), batch_size=16)


def as_generator(images):
    return (Batches(images)[i] for i in range(2))


SOURCES = {
    "arrays": lambda images: (images, LABELS),
    "tensors": lambda images: (keras.ops.convert_to_tensor(images), LABELS),
    "dataset": lambda images: (as_dataset(images),),
    "PyDataset": lambda images: (Batches(images),),
    "loader": lambda images: (as_loader(images),),
    "generator": lambda images: (as_generator(images),),
}


def messages(function, *args, **kwargs):
    """Return the warnings about the input of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, verbose=0, **kwargs)
    return [str(each.message) for each in caught if str(each.message).startswith("The input")]


def fit(model, source, images, **options):
    steps = {"steps_per_epoch": 2} if source == "generator" else {}
    return messages(model.fit, *SOURCES[source](images), **steps, **options)


@pytest.mark.parametrize("source", SOURCES)
def test_a_wrong_range_warns_once_and_a_right_one_never(source):
    for name, (_, factor) in NETWORKS.items():
        right, wrong = PIXELS * factor, PIXELS / 255 / factor
        assert fit(network(name), source, right) == []
        [message] = fit(network(name), source, wrong)
        assert f"values from 0 to {wrong.max():.4g}" in message
        assert "`mean` and `std` of your images" in message


def test_the_message_has_both_ranges_and_the_remedy():
    [message] = fit(network("pixels"), "arrays", PIXELS / 255)
    assert "from 0 to 1. This network expects values from 0 to 255" in message
    assert "Multiply it by 255" in message
    [message] = fit(network("unit"), "arrays", PIXELS)
    assert "from 0 to 255. This network expects values from 0 to 1" in message
    assert "Divide it by 255" in message
    [message] = fit(network("plain"), "arrays", PIXELS)
    assert "has no preprocessing" in message
    assert "Build it with the `mean` and `std`" in message


@pytest.mark.parametrize("source", ["arrays", "dataset", "PyDataset"])
def test_evaluate_predict_and_validation_data_are_looked_at(source):
    model = network("pixels")
    for images, expected in ((PIXELS, 0), (PIXELS / 255, 1)):
        data = SOURCES[source](images)
        assert len(messages(model.evaluate, *data)) == expected
        assert len(messages(model.predict, *data[:1])) == expected
        held_out = data if len(data) > 1 else data[0]
        assert len(fit(model, "arrays", PIXELS, validation_data=held_out, epochs=2)) >= expected
        if not expected:
            assert fit(model, "arrays", PIXELS, validation_data=held_out, epochs=2) == []


def test_a_dataset_gives_keras_the_same_elements():
    tf = pytest.importorskip("tensorflow")
    opened = []

    def examples():
        opened.append(1)
        yield from zip(PIXELS, LABELS, strict=True)

    specs = tf.TensorSpec((8, 8, 3), tf.uint8), tf.TensorSpec((), tf.int64)
    data = tf.data.Dataset.from_generator(examples, output_signature=specs).batch(16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = kp.models.first_batch.watched(data, kp.preprocessing.InputRange())
        assert opened == []
        got = list(seen.as_numpy_iterator())
    assert opened == [1]
    assert len(caught) == 1
    np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), PIXELS)
    np.testing.assert_array_equal(np.concatenate([y for _, y in got]), LABELS)


def test_a_generator_gives_keras_the_same_elements():
    got = list(kp.models.first_batch.watched(as_generator(PIXELS), CIFAR_RANGE))
    np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), PIXELS)
    np.testing.assert_array_equal(np.concatenate([y for _, y in got]), LABELS)


@pytest.mark.parametrize("source", ["dataset", "PyDataset", "generator"])
def test_only_the_first_batch_is_judged(source):
    scaled = PIXELS / 255
    for first, second, expected in ((scaled, PIXELS, 1), (PIXELS, scaled, 0)):
        images = np.concatenate([first[:16], second[16:]])
        assert len(fit(network("pixels"), source, images, shuffle=False)) == expected


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
    assert messages(network("pixels").predict, images) == []


def test_sixteen_grey_levels_are_no_pixels():
    """scikit-learn's digits are 0 to 16: too little for a network that expects 0 to 255."""
    digits = kp.preprocessing.PREPROCESSING["digits"]
    expected = kp.preprocessing.InputRange(digits.mean, digits.std)
    images = np.random.default_rng(0).integers(0, 17, (8, 8, 8, 1))
    assert "from 0 to 16" in expected.problem(images)
    assert expected.problem(images * 255 / 16) is None


@pytest.mark.parametrize(
    ("mean", "std", "bounds"),
    [
        (0, 1, (-2, 2)),
        (CIFAR.mean, CIFAR.std, (0, 255)),
        (127.5, 127.5, (0, 255)),
        (0, 255, (0, 255)),
        (0.5, 0.5, (0, 1)),
        (5.0, 6.0, (-7, 17)),
        (30_000, 10_000, (10_000, 50_000)),
    ],
)
def test_bounds(mean, std, bounds):
    assert kp.preprocessing.InputRange(mean, std).bounds == bounds


def test_expected_input_of_any_model():
    """Rescaling and Normalization are composed, with the channels in any place."""
    layers = keras.layers
    mean, std = np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.0, 2.0])
    for axis, shape in ((-1, (8, 8, 3)), (1, (3, 8, 8))):
        model = keras.Sequential(
            [
                keras.Input(shape),
                layers.Rescaling(1 / 10, offset=-1.0),
                layers.Normalization(axis=axis, mean=mean, variance=std**2),
                layers.Flatten(),
                layers.Dense(2),
            ]
        )
        found = kp.models.expected_input(model)
        np.testing.assert_allclose(found.mean, 10 * (1 + mean), rtol=1e-6)
        np.testing.assert_allclose(found.std, 10 * std, rtol=1e-6)
        assert shape[found.axis - (found.axis > 0)] == 3


CROSSENTROPY = {
    "sparse name": "sparse_categorical_crossentropy",
    "name": "categorical_crossentropy",
    "function": keras.losses.sparse_categorical_crossentropy,
    "object": keras.losses.SparseCategoricalCrossentropy(),
    "list": [keras.losses.CategoricalCrossentropy()],
    "focal": keras.losses.CategoricalFocalCrossentropy(),
    "own": kp.losses.SparseCategoricalCrossentropy(from_logits=False),
}


@pytest.mark.parametrize("loss", CROSSENTROPY.values(), ids=CROSSENTROPY)
def test_a_loss_on_probabilities_warns_on_logits(loss):
    model = kp.models.resnet_cifar(8, input_shape=(8, 8, 3))
    with pytest.warns(UserWarning, match=r"returns logits.*\(from_logits=True\)"):
        model.compile("sgd", loss)
    softmax = kp.models.resnet_cifar(8, input_shape=(8, 8, 3), classifier_activation="softmax")
    softmax.compile("sgd", loss)


def test_a_loss_on_logits_warns_on_probabilities():
    softmax = kp.models.resnet_cifar(8, input_shape=(8, 8, 3), classifier_activation="softmax")
    with pytest.warns(UserWarning, match="returns probabilities"):
        softmax.compile("sgd", LOGITS)
    model = kp.models.resnet_cifar(8, input_shape=(8, 8, 3))
    for loss in (LOGITS, "mse", kp.losses.SparseCategoricalCrossentropy(), lambda y, p: p):
        model.compile("sgd", loss)
    kp.models.resnet_cifar(8, input_shape=(8, 8, 3), include_top=False).compile("sgd", "mse")


def test_a_compiled_network_is_saved_compiled(tmp_path):
    model = kp.models.resnet_cifar(8, input_shape=(8, 8, 3))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOGITS, metrics=["accuracy"])
    model.fit(PIXELS / 255, LABELS, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.loss.from_logits
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (a, b)))
    assert loaded.evaluate(PIXELS / 255, LABELS, verbose=0) == pytest.approx(
        model.evaluate(PIXELS / 255, LABELS, verbose=0)
    )


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (LABELS + 1, "labels from 1 to 10"),
        (LABELS - 1, "labels from -1 to 8"),
        (np.eye(10)[LABELS], "one-hot"),
    ],
)
def test_labels_that_no_class_has(labels, words):
    for deed in (network("plain").fit, network("plain").evaluate):
        with pytest.raises(ValueError, match=words):
            deed(PIXELS / 255, labels, verbose=0)


def test_ignored_labels_are_accepted():
    model = kp.models.resnet_cifar(8, input_shape=(8, 8, 3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255)
    model.compile("sgd", loss)
    assert fit(model, "arrays", PIXELS / 255) == []
    model.evaluate(PIXELS / 255, np.where(LABELS == 3, 255, LABELS), verbose=0)
