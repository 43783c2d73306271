"""Weights of Torch's networks for CIFAR that are cut short or of another network."""

import pytest

from keras_preact import weights
from tests.keras_preact.weights.torch_nets import CIFAR, torch


def test_a_stage_cut_short_is_told():
    state = CIFAR["bottleneck"]().state_dict()
    told = r"\(2, 2, 1\) units.*ResNet-20, has \(2, 2, 2\)"
    with pytest.warns(UserWarning, match=told) as caught:
        weights.from_torch_cifar({n: t for n, t in state.items() if not n.startswith("3.1.")})
    assert caught[0].filename == __file__


def test_other_weights():
    ports, released = CIFAR["attributes, basic"]().state_dict(), CIFAR["bottleneck"]().state_dict()
    for state, message in (
        # torchvision's have bn1 there
        ({name: t for name, t in ports.items() if not name.startswith("bn.")}, "are: conv1.weight"),
        (ports | {"layer4.0.conv1.weight": torch.zeros(4, 4, 3, 3)}, "3 stages.*weights of 4"),
        # an early preresnet.lua had projections with a normalisation: another function
        (released | {"2.0.2.1.1.weight": torch.ones(32)}, "1 left over: 2.0.2.1.1.weight"),
    ):
        with pytest.raises(ValueError, match=message):
            weights.from_torch_cifar(state)
