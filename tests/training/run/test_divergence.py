"""The message about a loss that is not finite: step, rate, and the layer that changed."""

from types import SimpleNamespace

import numpy as np

from training.run import divergence

PLACE = "iteration 43 (epoch 2)"


def message(updates=None, weights=(1.0, 1.0, 1.0)) -> str:
    """Return the message. `updates` and `weights` have the norms of the last measured
    update and of the weights.
    """
    history = []
    if updates is not None:
        norms = np.array(updates)
        ratios = np.divide(norms, weights, out=np.full(3, np.nan), where=np.array(weights) > 0)
        history = [SimpleNamespace(step=40, update_norms=norms, update_ratios=ratios)]
    names = ["stem/kernel", "stage1/kernel", "head/kernel"]
    health = SimpleNamespace(weights=names, history=history)
    return divergence.message("the loss is inf", PLACE, 0.5, health)


def test_rate_and_step():
    expected = f"Learning rate 0.5 is probably too high: the loss is inf in {PLACE}. "
    assert message().startswith(expected)
    assert message().endswith("With --health 1, the run names the layer that changes most.")
    assert divergence.message("the loss is inf", PLACE, 0.5) == message()


def test_the_layer_that_changed_most():
    """Changes are relative to the norm of a weight; a weight of zeros does not count."""
    found = message([9.0, 3.0, 2.0], weights=(0.0, 2.0, 2.0))
    words = "In update 40, the last one that was measured, stage1/kernel changed most: by 150 %"
    assert f". {words} of its size." in found


def test_the_last_layer_that_an_update_broke():
    """Of several such layers the last is named: gradients come from the end of the
    network.
    """
    found = message([np.nan, np.inf, 0.25])
    assert found.endswith(". After update 40, stage1/kernel is not finite.")
