"""Feature extractors: what they return is what the network computes, for single and
stacked units.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import transfer
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


def network(**options) -> kp.models.ResidualNetwork:
    model = kp.models.resnet_cifar(20, width_factor=0.25, input_shape=(12, 12, 3), **options)
    harness.randomize(model)
    return model


def values(tensors: dict) -> dict:
    return {name: keras.ops.convert_to_numpy(tensor) for name, tensor in tensors.items()}


def by_hand(model, x) -> dict:
    """Compute every place with one unit after the other."""
    single = kp.models.unstack(model)
    before = True
    found = {}
    for layer in single.layers[1:]:
        if before and layer.name == "stage1_unit1":
            found["stem"], before = x, False
        if layer.name == "head_norm":
            found |= {f"stage{s}": found[f"stage{s}_unit3"] for s in (1, 2, 3)}
        x = layer(x, training=False)
        found[layer.name] = x
    return values(found | {"head": found["head_activation"], "pool": found["head_pool"]})


EVERYTHING = [
    "stem",
    "stage2",
    "stage1_unit1",
    "stage1_unit2",
    "stage1_unit3",
    "stage3_unit2",
    "stage1",
    "stage3",
    "head",
    "pool",
]


@pytest.mark.parametrize("stacked", [False, True])
def test_every_place(stacked):
    model = network(stacked=stacked)
    x = harness.images(2, 12, 12, 3)
    expected = by_hand(model, x)
    for asked in (EVERYTHING, ["stage3", "stem", "pool"], ["pool"], ["stage2_unit2", "head"]):
        extractor = transfer.feature_extractor(model, asked)
        found = (
            values(extractor(x, training=False))
            if len(asked) > 1
            else extractor.predict(x, verbose=0)
        )
        assert found.keys() == set(asked)
        for name in asked:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-4, atol=1e-4, err_msg=f"{name} of {asked}"
            )


def test_all_stages_unless_told_otherwise_and_numbers_count_them():
    model = network()
    assert list(transfer.feature_extractor(model).output) == ["stage1", "stage2", "stage3"]
    assert list(transfer.feature_extractor(model, [-1, 0, 1]).output) == [
        "stage3",
        "stem",
        "stage1",
    ]


def test_raw_and_activated():
    """x_L is raw, with both signs; the head's map is not; an original network's x_l are
    activated.
    """
    x = harness.images(2, 12, 12, 3)
    found = values(transfer.feature_extractor(network(), ["stage3", "head"])(x))
    assert found["stage3"].min() < 0 <= found["head"].min()
    assert (
        values(transfer.feature_extractor(network(arrangement="original"), ["stage3"])(x))[
            "stage3"
        ].min()
        >= 0
    )


def test_layers_are_shared():
    model = network()
    extractor = transfer.feature_extractor(model, ["stage1"])
    assert {id(weight) for weight in extractor.weights} < {id(weight) for weight in model.weights}
    assert not any("stage2" in weight.path for weight in extractor.weights)


def test_a_transformer_and_vectors():
    model = kp.models.pre_ln_transformer(2, width=8, input_shape=(8, 8, 1))
    assert list(transfer.feature_extractor(model).output) == ["layer1", "layer2"]
    assert transfer.feature_extractor(model, ["layer2_attention"]).output[
        "layer2_attention"
    ].shape == (None, 4, 8)
    dense = kp.models.dense_resnet(4, width=8, input_shape=(8,), classes=3)
    assert (
        "pool"
        not in harness.error_of(lambda: transfer.feature_extractor(dense, ["pool"]))
        .split("Available")[1]
        .split(".")[0]
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["stage4"], "Did you mean 'stage3'"),
        (["stage3_unit9"], "Did you mean 'stage3_unit"),
        ([4], "it must be from -4 to 3. Received: 4"),
        ([True], "Received: outputs=True"),
        ([], "at least one place"),
    ],
)
def test_unknown_places(asked, message):
    assert message in harness.error_of(lambda: transfer.feature_extractor(network(), asked))


def test_other_models():
    assert "network of residual units" in harness.error_of(
        lambda: transfer.feature_extractor(keras.Sequential())
    )
