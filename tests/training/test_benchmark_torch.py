"""How the benchmark runs torch's own modules: layout, torch.compile and autocast change
the speed, not the network. The plain PyTorch networks compute what the library's do.
"""

import copy
import math

import keras
import numpy as np
import pytest

import keras_preact as kp
from training.benchmark import candidates, subjects
from training.benchmark.step_time import Step

if keras.backend.backend() != "torch":
    pytest.skip("is about torch's modules", allow_module_level=True)

import torch

# torch.compile imports parts of torch that use what torch deprecates
pytestmark = [
    pytest.mark.backend,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

OPTIONS = (
    {},
    {"channels_last": True},
    {"compile": True},
    {"channels_last": True, "compile": True},
)


@pytest.fixture(autouse=True)
def without_a_compiler():
    """What torch.compile has wrapped runs as it is."""
    benchmark = torch.backends.cudnn.benchmark
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3, bias=False),
        torch.nn.BatchNorm2d(6),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(6, 1000),
    )


def subject_of(network, options, dtype="float32", jit_compile="auto") -> subjects.TorchSubject:
    settings = Step(batch=4, dtype=dtype, jit_compile=jit_compile)
    return subjects.TorchSubject(copy.deepcopy(network), options, settings, size=8, classes=1000)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_leave_the_results_alone(network, options):
    """The loss of every step, and so gradients and updates, are those of a plain loop."""
    subject = subject_of(network, options)
    plain = copy.deepcopy(network).to(subject.device).train()
    images, labels = subject.images.contiguous(), subject.labels
    velocity = [torch.zeros_like(weight) for weight in plain.parameters()]
    expected = []
    for _ in range(3):
        plain.zero_grad()
        loss = torch.nn.functional.cross_entropy(plain(images), labels)
        loss.backward()
        with torch.no_grad():
            for weight, v in zip(plain.parameters(), velocity, strict=True):
                v.mul_(0.9).add_(weight.grad + 1e-4 * weight)
                weight.sub_(0.1 * v)
        expected.append(loss.item())
    np.testing.assert_allclose([subject.train_step() for _ in range(3)], expected, rtol=1e-5)
    assert expected[0] != pytest.approx(expected[2], rel=1e-4)
    with torch.no_grad():
        np.testing.assert_allclose(
            subject.inference_step(), plain.eval()(images).cpu(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("channels_last", [True, False])
def test_layout(network, channels_last):
    subject = subject_of(network, {"channels_last": channels_last})
    for tensor in (subject.images, subject.module[0].weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == channels_last
        assert tensor.is_contiguous() != channels_last


@pytest.mark.parametrize(
    ("options", "jit_compile", "expected"),
    [
        ({}, "auto", False),
        ({}, "on", True),
        ({"compile": True}, "off", True),
        ({"compile": False}, "on", False),
    ],
)
def test_compiled(network, options, jit_compile, expected):
    subject = subject_of(network, options, jit_compile=jit_compile)
    assert subject.jit_compile == expected
    assert isinstance(subject.run, torch._dynamo.OptimizedModule) == expected


def test_autocast(network):
    """The convolution computes in bfloat16, the weights stay as they are."""
    subject = subject_of(network, {"channels_last": True}, dtype="mixed_bfloat16")
    seen = []
    subject.module[0].register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    subject.train_step()
    assert seen == [torch.bfloat16]
    assert {weight.dtype for weight in subject.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("depth", [20, 110])
def test_plain_network_is_the_papers(depth):
    """With the same weights and moving statistics, logits are the same at inference and
    in training, and so are the gradients.
    """
    ours = kp.models.resnet_cifar(depth, stacked=False)
    plain = candidates.build(f"torch_resnet_cifar{depth}", {}, None)
    states = {k: v for k, v in plain.state_dict().items() if not k.endswith("num_batches_tracked")}
    random = np.random.default_rng(0)
    for variable, state in zip(ours.weights, states.values(), strict=True):
        if "norm" in variable.path:
            variable.assign(random.uniform(0.5, 1.5, variable.shape))
        state.copy_(_turned(variable.value))
    assert sum(weight.numel() for weight in plain.parameters()) == sum(
        math.prod(weight.shape) for weight in ours.trainable_weights
    )
    images = torch.from_numpy(random.normal(size=(4, 32, 32, 3)).astype("float32"))
    for training in (False, True):
        expected = ours(images, training=training)
        found = plain.train(training)(images.permute(0, 3, 1, 2))
        size = float(expected.detach().abs().max())
        np.testing.assert_allclose(found.detach(), expected.detach(), atol=1e-5 * size)
    own = torch.autograd.grad(expected.square().sum(), [w.value for w in ours.trainable_weights])
    theirs = torch.autograd.grad(found.square().sum(), list(plain.parameters()))
    for one, other in zip(own, theirs, strict=True):
        assert torch.linalg.norm(_turned(one) - other) < 1e-3 * torch.linalg.norm(other)


def _turned(array):
    """A kernel or its gradient in torch's order of axes."""
    axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim, (0,))
    return array.detach().permute(axes)
