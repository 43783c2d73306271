"""Factors on the rate that fall towards the stem."""

import keras
import pytest

import keras_preact as kp
from keras_preact import transfer
from tests.keras_preact import harness


def network(units=(1, 2, 2), **options):
    """Of dense layers: an optimizer sees no more of a network than its weights and
    their paths.
    """
    stages = [(4, each, 1) for each in units]
    options |= {"block": "dense", "input_shape": (5,), "classes": 4}
    model = kp.models.ResidualNetwork(stages, stem="dense", stem_filters=4, **options)
    harness.randomize(model)
    return model


def test_a_file_holds_the_factors(tmp_path):
    """Those of a stack are those of its stage."""
    model = network((1, 4, 1), stacked=True)
    assert harness.longest_stack(model) == 3
    factors = transfer.rate_factors(model, decay=0.5)
    expected = {"stem": 0.0625, "stage1": 0.125, "stage2": 0.25, "stage3": 0.5, "head": 1.0}
    assert factors == expected
    optimizer = kp.optimizers.CoupledSGD(rate_factors=factors)
    harness.compiled(model, optimizer)
    optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert loaded.get_config() == optimizer.get_config()
    assert loaded.rate_factors == expected


@pytest.mark.parametrize("decay", [0, 1.5, True, "0.5", float("nan")])
def test_a_decay_out_of_range(decay):
    message = harness.error_of(lambda: transfer.rate_factors(network(), decay))
    assert "`decay`" in message
