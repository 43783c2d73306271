"""Weights of Torch's networks for CIFAR that are cut short or of another network."""

import math

import pytest

import keras_preact as kp
from keras_preact import weights
from tests.keras_preact import harness
from tests.keras_preact.weights.torch_nets import (
    CIFAR,
    check_same,
    preact_resnet,
    randomized,
    torch,
)


@pytest.mark.parametrize("last_norm", [False, True])
def test_a_checkpoint_of_pytorch_cifar(tmp_path, last_norm):
    """Its training script saves `net` from DataParallel, with the accuracy beside it."""
    net = randomized(preact_resnet((1, 1, 1, 1), last_norm=last_norm))
    checkpoint = {"net": torch.nn.DataParallel(net).state_dict(), "acc": 95.1, "epoch": 199}
    torch.save(checkpoint, tmp_path / "ckpt.pth")
    for source in (tmp_path / "ckpt.pth", checkpoint, checkpoint["net"]):
        model = weights.from_torch_cifar(source, output_stride=None)
        check_same(net, model, (32, 32))
    head = [layer.name for layer in model.head]
    assert ("head_norm" in head) == last_norm
    report = kp.analysis.audit(model, harness.images(4, 32, 32, 3))
    assert (report["final activation"].status == "FAIL") != last_norm


#: Depth to block, units of the stages, and number of parameters, counted by hand.
PREACT_RESNETS = {
    18: ("basic", (2, 2, 2, 2), 11_171_146),
    34: ("basic", (3, 4, 6, 3), 21_279_306),
    50: ("bottleneck", (3, 4, 6, 3), 23_509_066),
    101: ("bottleneck", (3, 4, 23, 3), 42_501_194),
    152: ("bottleneck", (3, 8, 36, 3), 58_144_842),
}


@pytest.mark.parametrize(
    "depth",
    [pytest.param(depth, marks=pytest.mark.soak if depth > 50 else []) for depth in PREACT_RESNETS],
)
def test_the_builder_makes_pytorch_cifars_networks(depth):
    """All names and shapes are theirs."""
    block, units, parameters = PREACT_RESNETS[depth]
    with torch.device("meta"):
        net = preact_resnet(units, bottleneck=block == "bottleneck", width=64)
    wanted = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    model = kp.models.resnet_imagenet(
        depth,
        stem="3x3",
        arrangement="full_preactivation_raw_ends",
        classes=10,
        input_shape=(32, 32, 3),
        kernel_initializer="zeros",
        stacked=True,
    )
    state = weights.to_torch_cifar(model)
    assert {name: array.shape for name, array in state.items()} == wanted
    trained = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    assert trained == parameters == sum(tensor.numel() for tensor in net.parameters())


def test_the_original_order_of_pytorch_cifar():
    state = preact_resnet((1, 1, 1, 1)).state_dict() | {"bn1.weight": torch.ones(8)}
    with pytest.raises(ValueError, match=r"with bn1\.weight are those of a ResNet in the original"):
        weights.from_torch_cifar(state)


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
