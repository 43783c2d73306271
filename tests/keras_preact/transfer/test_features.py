"""Feature extractors: what they return is what the network computes, for single and
stacked units.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.transfer import feature_extractor
from tests.keras_preact import harness


def network(**options) -> kp.models.ResidualNetwork:
    model = kp.models.resnet_cifar(20, width_factor=0.25, input_shape=(12, 12, 3), **options)
    harness.randomize(model)
    return model


def by_hand(model, x) -> dict:
    """Compute every place with one unit after the other."""
    found = {}
    for layer in kp.models.unstack(model).layers[1:]:
        if layer.name == "stage1_unit1":
            found["stem"] = x
        x = layer(x, training=False)
        found[layer.name] = x
    found |= {f"stage{s}": found[f"stage{s}_unit3"] for s in (1, 2, 3)}
    return found | {"head": found["head_activation"], "pool": found["head_pool"]}


EVERYTHING = ["stem", *(f"stage{s}_unit{u}" for s in (1, 3) for u in (1, 2, 3))]
EVERYTHING += ["stage2", "stage1", "stage3", "head", "pool"]


@pytest.mark.backend
@pytest.mark.parametrize("stacked", [False, True])
def test_every_place(stacked):
    model = network(stacked=stacked)
    x = harness.images(2, 12, 12, 3)
    expected = by_hand(model, x)
    for asked in (EVERYTHING, ["stage3", "stem", "pool"], ["stage2_unit2", "head"]):
        found = feature_extractor(model, asked)(x, training=False)
        assert found.keys() == set(asked)
        for name in asked:
            harness.close(*map(harness.numpy, (found[name], expected[name])), 1e-4, name)


def test_all_stages_unless_told_otherwise_and_numbers_count_them():
    model = network()
    assert list(feature_extractor(model).output) == ["stage1", "stage2", "stage3"]
    assert list(feature_extractor(model, [-1, 0, 1]).output) == ["stage3", "stem", "stage1"]
    for one, name in (("stage2", "stage2"), (-1, "stage3"), (np.int64(0), "stem")):
        assert list(feature_extractor(model, one).output) == [name]
    extractor = feature_extractor(model, ["stage1"])  # shares layers, and has no other ones
    assert {id(weight) for weight in extractor.weights} < {id(weight) for weight in model.weights}
    assert not any("stage2" in weight.path for weight in extractor.weights)


def test_a_transformer_and_vectors():
    model = kp.models.transformer(2, width=8, input_shape=(8, 8, 1))
    assert list(feature_extractor(model).output) == ["layer1", "layer2"]
    [tensor] = feature_extractor(model, ["layer2_attention"]).output.values()
    assert tensor.shape == (None, 4, 8)
    dense = kp.models.dense_resnet(4, width=8, input_shape=(8,), classes=3)
    assert "Unknown outputs" in harness.error_of(lambda: feature_extractor(dense, ["pool"]))


def test_unknown_places():
    model = network()
    for asked, word in (
        (["stage4"], "Did you mean 'stage3'"),
        ([4], "from -4 to 3"),
        ([True], "outputs=True"),
        ([], "at least one place"),
    ):
        assert word in harness.error_of(lambda asked=asked: feature_extractor(model, asked))
    assert "residual" in harness.error_of(lambda: feature_extractor(keras.Sequential()))
