"""The paper's CIFAR networks and steps of their training in PyTorch, written from the
papers: nothing here is from the library.

Modules have the names of the Keras network's weights, so that paths can map weights from
one to the other.
"""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional

relu = functional.relu

#: Block to the sizes of its kernels, and its output channels over its width.
BLOCKS = {"basic": ((3, 3), 1), "bottleneck": ((1, 3, 1), 4)}


def conv(channels, filters, size, stride=1):
    return nn.Conv2d(channels, filters, size, stride, padding=size // 2, bias=False)


def norm(channels):
    """Torch's default: epsilon 1e-5, a share of 0.1 for the new batch."""
    return nn.BatchNorm2d(channels, eps=1e-5, momentum=0.1)


class OptionA(nn.Module):
    """Takes every second pixel, and adds channels of zeros."""

    def __init__(self, channels, filters, stride):
        super().__init__()
        self.missing, self.stride = filters - channels, stride

    def forward(self, x):
        return functional.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing)
        )


class Unit(nn.Module):
    """Has the weights and the change of shape: a projection in bottlenecks, else option A.
    The first weight has the stride.
    """

    normalized_projection = False

    def __init__(self, block, channels, width, stride, first):
        super().__init__()
        sizes, expansion = BLOCKS[block]
        self.first, self.weights, self.filters = first, len(sizes), expansion * width
        widths = [channels, *[width] * (len(sizes) - 1), self.filters]
        self.branch = nn.ModuleDict()
        for i, size in enumerate(sizes, 1):
            self.branch[f"conv_{i}"] = conv(widths[i - 1], widths[i], size, stride if i == 1 else 1)
        self.add_norms(widths)
        self.changes = stride > 1 or channels != self.filters
        self.projection = nn.ModuleDict()
        if self.changes and block == "basic":
            self.projection["pad"] = OptionA(channels, self.filters, stride)
        elif self.changes:
            self.projection["conv"] = conv(channels, self.filters, 1, stride)
            if self.normalized_projection:
                self.projection["norm"] = norm(self.filters)

    def shortcut(self, x):
        for module in self.projection.values():
            x = module(x)
        return x


class PreActivation(Unit):
    """Fig. 1 (b): BN and ReLU before every weight, nothing after the addition."""

    def add_norms(self, widths):
        for i, channels in enumerate(widths[:-1]):
            if i or not self.first:
                self.branch[f"norm_{i}"] = norm(channels)

    def forward(self, x):
        # the stem has the first unit's activation; both paths of a unit that changes the shape read
        # the activated x
        activated = x if self.first else relu(self.branch["norm_0"](x))
        f = self.branch["conv_1"](activated)
        for i in range(1, self.weights):
            f = self.branch[f"conv_{i + 1}"](relu(self.branch[f"norm_{i}"](f)))
        return self.shortcut(activated if self.changes else x) + f


class Original(Unit):
    """Fig. 1 (a): BN after every weight, ReLU between them and after the addition."""

    normalized_projection = True

    def add_norms(self, widths):
        for i, channels in enumerate(widths[1:], 1):
            self.branch[f"norm_{i}"] = norm(channels)

    def forward(self, x):
        f = x
        for i in range(1, self.weights + 1):
            f = self.branch[f"norm_{i}"](self.branch[f"conv_{i}"](relu(f) if i > 1 else f))
        return relu(self.shortcut(x) + f)


class ResNet(nn.Module):
    """A 3x3 convolution, three stages of `units` units at the full, a half and a quarter
    of the size, the mean, and a classifier.
    """

    def __init__(self, arrangement, block, units, width, classes=10):
        super().__init__()
        self.preactivation = arrangement == "full_preactivation"
        kind = PreActivation if self.preactivation else Original
        self.stem_conv, self.stem_norm = conv(3, width, 3), norm(width)
        channels, self.units = width, []
        for stage in range(3):
            for u in range(units):
                unit = kind(
                    block,
                    channels,
                    width * 2**stage,
                    2 if stage and not u else 1,
                    first=not self.units,
                )
                self.add_module(f"stage{stage + 1}_unit{u + 1}", unit)
                self.units.append(unit)
                channels = unit.filters
        if self.preactivation:
            self.head_norm = norm(channels)
        self.head_classifier = nn.Linear(channels, classes)

    def forward(self, x):
        x = relu(self.stem_norm(self.stem_conv(x)))
        for unit in self.units:
            x = unit(x)
        if self.preactivation:
            x = relu(self.head_norm(x))
        return self.head_classifier(x.mean((2, 3)))


LEAVES = {
    "kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


def torch_name(path):
    *modules, leaf = path.split("/")
    return ".".join([*modules, LEAVES[leaf]])


def to_torch(array):
    """A weight in Torch's order: outputs, inputs, height, width."""
    return torch.tensor(
        np.ascontiguousarray(array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T)
    )


def from_torch(tensor):
    array = tensor.detach().numpy()
    return (array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T).copy()


def with_weights(net, weights):
    """Load weights by path. All must match: none may be missing or left over."""
    state = {torch_name(path): to_torch(value) for path, value in weights.items()}
    state |= {
        name: value
        for name, value in net.state_dict().items()
        if name.endswith("num_batches_tracked")
    }
    net.to(next(iter(state.values())).dtype).load_state_dict(state, strict=True)
    return net


def batch(images, mean, std, top, left, flip):
    """Pad by 4, crop, flip half of the images, normalise. The padding has the mean colour,
    rounded to whole numbers as in an 8-bit image.
    """
    mean, std = (torch.tensor(each, dtype=torch.float64).view(3, 1, 1) for each in (mean, std))
    pixels = torch.tensor(images).permute(0, 3, 1, 2).double()
    padded = functional.pad(pixels - mean.round(), (4, 4, 4, 4)) + mean.round()
    return crop_and_flip((padded - mean) / std, top, left, flip)


def crop_and_flip(padded, top, left, flip):
    """Cut the images out of images with a padding of 4, and flip some of them."""
    height, width = padded.shape[2] - 8, padded.shape[3] - 8
    crops = [
        image[:, t : t + height, s : s + width]
        for image, t, s in zip(padded, top, left, strict=True)
    ]
    return torch.stack(
        [crop.flip(2) if flipped else crop for crop, flipped in zip(crops, flip, strict=True)]
    )


@dataclasses.dataclass
class State:
    """State of the training: the loss of the last batch, and weights and velocities by
    Keras' paths and in Keras' layout.
    """

    loss: float
    weights: dict
    velocities: dict


def train(net, paths, batches, rates, *, nesterov):
    """Train one step with each of the batches and rates. Return the state after every
    step, and the first gradient.

    Args:
        paths: Paths of the Keras network's weights.
        nesterov: Whether the momentum is Nesterov's.
    """
    optimizer = torch.optim.SGD(
        net.parameters(), rates[0], momentum=0.9, weight_decay=1e-4, nesterov=nesterov
    )
    parameters = dict(net.named_parameters())
    norms = {
        name: module for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)
    }
    counts = {}
    for name, module in norms.items():
        module.register_forward_hook(
            lambda _, inputs, __, name=name: counts.update({name: inputs[0][:, 0].numel()})
        )
    starts = {name: module.running_var.clone() for name, module in norms.items()}
    states, gradients = [], {}
    net.train()
    for step, ((x, labels), rate) in enumerate(zip(batches, rates, strict=True), 1):
        if step > 1:
            # `v = 0.9 v - rate g`, as in Keras and in Caffe, with which the paper's runs were made.
            # Torch keeps `v / rate`, so that a change of the rate would also scale the old part.
            for state in optimizer.state.values():
                state["momentum_buffer"] *= rates[step - 2] / rate
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x.to(net.stem_conv.weight.dtype)), torch.tensor(labels))
        loss.backward()
        if step == 1:
            gradients = {
                path: from_torch(parameters[torch_name(path)].grad)
                for path in paths
                if "moving" not in path
            }
        optimizer.step()
        tensors = net.state_dict()
        # Keras' running variances are means over n, Torch's over n - 1. The part that is not from
        # the batches is start * 0.9^step
        for name, n in counts.items():
            kept = starts[name] * 0.9**step
            tensors[f"{name}.running_var"] = (
                kept + (tensors[f"{name}.running_var"] - kept) * (n - 1) / n
            )
        states.append(
            State(
                loss.item(),
                {path: from_torch(tensors[torch_name(path)]) for path in paths},
                {
                    path: -rate
                    * from_torch(optimizer.state[parameters[torch_name(path)]]["momentum_buffer"])
                    for path in gradients
                },
            )
        )
    return states, gradients


#: Iterations of a recipe, and the iterations after which the rate is divided by 10.
RUNS = {
    "cifar10": (64_000, (32_000, 48_000)),
    "cifar10_batch64": (200 * 781, (81 * 781, 122 * 781)),
}


def paper_rates(recipe):
    """Return the rate of each iteration: 0.01 for 400 iterations, then 0.1, divided by 10
    at each drop.
    """
    length, (first, second) = RUNS[recipe]
    step = np.arange(length)
    return np.where(step < 400, 0.01, 0.1 / 10.0 ** ((step >= first) * 1 + (step >= second)))
