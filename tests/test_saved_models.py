"""The exported models in the repository: models of an earlier version still serve and
take image files, and today's code still builds the same networks from their cards.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact.export.image_files import encode, noise

SAVED_MODELS = Path(__file__).parents[1] / "saved_models"


@pytest.mark.parametrize(
    ("name", "recipe", "network_name"),
    [
        ("cifar10_resnet20", "cifar10", "cifar_resnet20_preact"),
        ("cifar10_fast", "cifar10/fast_resnet8", "cifar_fast_resnet8"),
    ],
)
def test_is_the_network_of_its_card(name, recipe, network_name):
    """Guards the numerics: today's network with the file's weights gives the output of
    the exported graph.
    """
    import tensorflow as tf

    card = json.loads((SAVED_MODELS / name / "model_card.json").read_text())
    assert (card["run"]["recipe"], card["run"]["config"]["model"]["name"]) == (recipe, network_name)
    matrix = np.array(card["metrics"]["confusion_matrix"])
    assert matrix.sum() == card["metrics"]["images"] == 10_000
    assert card["metrics"]["accuracy"] == pytest.approx(np.trace(matrix) / 10_000)
    served = tf.saved_model.load(str(SAVED_MODELS / name / str(card["version"])))
    network = kp.models.ResidualNetwork.from_config(card["model"]["config"])
    values = {weight.name.removesuffix(":0"): weight.numpy() for weight in served.weights}
    network.set_weights([values.pop(weight.path) for weight in network.weights])
    assert not values
    images = np.random.default_rng(0).uniform(0, 255, (3, 32, 32, 3)).astype("float32")
    outputs = served.signatures["serving_default"](images=images)
    logits = network(images, training=False).numpy()
    np.testing.assert_allclose(outputs["logits"].numpy(), logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(outputs["probabilities"].numpy().sum(axis=1), 1, rtol=1e-5)
    files = [encode(noise(32, 32)), encode(noise(32, 32), "WEBP", lossless=True)]
    png, webp = served.signatures["predict_bytes"](image_bytes=files)["scores"].numpy()
    np.testing.assert_allclose(webp, png, rtol=1e-5)
