"""The learning rate of the paper's CIFAR recipes, at every iteration of the whole run."""

import keras
import numpy as np
import pytest

from tests.training.reproduce.rates import paper_rates
from training import plans
from training.recipes import RECIPES


@pytest.mark.skipif(
    keras.backend.backend() == "torch",
    reason="there, Keras' schedule takes one iteration at a time",
)
@pytest.mark.parametrize(
    ("recipe", "iterations"), [("cifar10", 64_000), ("cifar10_batch64", 156_200)]
)
def test_rate_of_every_iteration(recipe, iterations):
    config = RECIPES[recipe]()
    plan = plans.plan(config, 50_000)
    assert plan.iterations == iterations
    got = keras.ops.convert_to_numpy(
        plans.learning_rate(config, plan)(keras.ops.arange(iterations))
    )
    np.testing.assert_allclose(got, paper_rates(recipe), rtol=1e-6)  # float32
