"""The exported models in the repository: what an earlier version wrote still serves, and
is still the network of its card.
"""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp

pytestmark = pytest.mark.backend

SAVED_MODELS = Path(__file__).parents[1] / "saved_models"
#: Name of the export to recipe and network.
MODELS = {
    "cifar10_resnet20": ("cifar10_short", "cifar_resnet20_preact"),
    "cifar10_fast": ("cifar10_fast", "cifar_fast_resnet8"),
}


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def served(name):
    tf = pytest.importorskip("tensorflow")
    return tf.saved_model.load(str(SAVED_MODELS / name / "1"))


@pytest.fixture(scope="module")
def card(name):
    return json.loads((SAVED_MODELS / name / "model_card.json").read_text())


def test_is_the_network_of_its_card(served, card):
    """Guards the numerics: today's network, with the weights of the file, gives what
    the graph of then gives.
    """
    network = kp.models.ResidualNetwork.from_config(card["model"]["config"])
    values = {weight.name.removesuffix(":0"): weight.numpy() for weight in served.weights}
    network.set_weights([values.pop(weight.path) for weight in network.weights])
    assert not values
    images = np.random.default_rng(0).uniform(0, 255, (3, 32, 32, 3)).astype("float32")
    outputs = served.signatures["serving_default"](images=images)
    logits = keras.ops.convert_to_numpy(network(images, training=False))
    np.testing.assert_allclose(outputs["logits"].numpy(), logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(outputs["probabilities"].numpy().sum(axis=1), 1, rtol=1e-5)


def test_card_says_where_its_figures_come_from(name, card):
    assert (card["run"]["recipe"], card["run"]["config"]["model"]["name"]) == MODELS[name]
    matrix = np.array(card["metrics"]["confusion_matrix"])
    assert matrix.sum() == card["metrics"]["images"] == 10_000
    assert card["metrics"]["accuracy"] == pytest.approx(np.trace(matrix) / 10_000)


@pytest.mark.soak
def test_accuracy_on_the_real_test_images(served, card):
    from training.config import Data
    from training.data import evaluation_batches, load

    tfds = pytest.importorskip("tensorflow_datasets")
    if not tfds.builder("cifar10").is_prepared():
        pytest.skip("CIFAR-10 is not prepared in TensorFlow Datasets' data dir (TFDS_DATA_DIR)")
    data = load(Data("cifar10"))
    right = 0
    for images, labels in evaluation_batches(data, data.test, 500, None).as_numpy_iterator():
        logits = served.signatures["serving_default"](images=images.astype("float32"))[
            "logits"
        ].numpy()
        right += int((logits.argmax(axis=1) == labels).sum())
    assert (
        abs(right / 10_000 - card["metrics"]["accuracy"]) <= 0.0005
    )  # another CPU may turn a close call
