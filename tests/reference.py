"""Residual units and networks in NumPy, float64: the reference for the library.

It is written from the paper's figures and tables and does not import the library. Images
are `(batch, height, width, channels)`. Weights are a dict from path to array; a path is
`branch/conv_1/kernel`, for example.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import numpy as np

#: Fig. 4 for one, two and three weights: W weight, N normalisation, A activation, `+` the addition.
#: If there is a `|`, both paths of a unit that changes the shape start at it. The sixth row is
#: not the paper's.
FIG_4 = {
    "original": {
        1: "W1 N1 + A",
        2: "W1 N1 A W2 N2 + A",
        3: "W1 N1 A W2 N2 A W3 N3 + A",
    },
    "bn_after_addition": {
        1: "W1 + N A",
        2: "W1 N1 A W2 + N A",
        3: "W1 N1 A W2 N2 A W3 + N A",
    },
    "relu_before_addition": {
        1: "W1 N1 A +",
        2: "W1 N1 A W2 N2 A +",
        3: "W1 N1 A W2 N2 A W3 N3 A +",
    },
    "relu_only_preactivation": {
        1: "A | W1 N1 +",
        2: "A | W1 N1 A W2 N2 +",
        3: "A | W1 N1 A W2 N2 A W3 N3 +",
    },
    "full_preactivation": {
        1: "N0 A | W1 +",
        2: "N0 A | W1 N1 A W2 +",
        3: "N0 A | W1 N1 A W2 N2 A W3 +",
    },
    "bn_only_preactivation": {
        1: "N0 | W1 + A",
        2: "N0 | W1 A N1 W2 + A",
        3: "N0 | W1 A N1 W2 A N2 W3 + A",
    },
}

#: Between conv1 and the first unit; between the last unit and the pooling. If units start with
#: an activation, the stem has the first of them, and the head has the one that would follow the
#: last unit's output (appendix).
STEM = dict.fromkeys(FIG_4, "N A") | {"bn_only_preactivation": "A N"}
HEAD = dict.fromkeys(FIG_4, "") | {
    "relu_only_preactivation": "A",
    "full_preactivation": "N A",
    "bn_only_preactivation": "N",
}

#: Arrangements whose branch has a norm after its last weight have one after the projection too.
NORM_AFTER_PROJECTION = ("original", "relu_before_addition", "relu_only_preactivation")

#: Block: kernel size of each weight (None: dense), channels out for each `filters`.
KERNELS = {"basic": (3, 3), "bottleneck": (1, 3, 1), "dense": (None, None), "single": (3,)}
EXPANSION = {"basic": 1, "bottleneck": 4, "dense": 1, "single": 1}

erf = np.vectorize(math.erf, otypes=[float])
ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "hard_silu": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "tanh": np.tanh,
}


def pad(x, size, value=0.0):
    """Pad height and width by `size` on every side."""
    return np.pad(x, ((0, 0), (size, size), (size, size), (0, 0)), constant_values=value)


def window(x, row, column, kernel, stride):
    """The values of the padded `x` that meet the kernel's element at `row`, `column` as
    the kernel moves by `stride`.
    """
    height, width = ((size - kernel) // stride + 1 for size in x.shape[1:3])
    return x[:, row : row + stride * height : stride, column : column + stride * width : stride][
        :, :height, :width
    ]


def dilated(kernel, dilation):
    """The kernel with zeros between its elements."""
    size = (kernel.shape[0] - 1) * dilation + 1
    wide = np.zeros((size, size, *kernel.shape[2:]))
    wide[::dilation, ::dilation] = kernel
    return wide


def standardized(kernel, epsilon=1e-8):
    """Subtract each filter's mean, and divide by its standard deviation."""
    filters = [kernel[..., i] for i in range(kernel.shape[-1])]
    return np.stack([(one - one.mean()) / np.sqrt(one.var() + epsilon) for one in filters], axis=-1)


def blur(x, stride):
    """The binomial window of 3, at a stride; the map is mirrored around its outermost
    pixels.
    """
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    weights = np.outer([1, 2, 1], [1, 2, 1]) / 16
    return sum(
        weights[row, column] * window(x, row, column, 3, stride)
        for row in range(3)
        for column in range(3)
    )


def average(x, stride):
    """The mean of 2 x 2 pixels; at the border, of the pixels that exist."""
    return _of_pairs(x, stride, np.mean)


def max_of_pairs(x, stride):
    """The largest of 2 x 2 pixels; at the border, of the pixels that exist."""
    return _of_pairs(x, stride, np.max)


def _of_pairs(x, stride, function):
    height, width = x.shape[1:3]
    rows = [
        [function(x[:, i : i + 2, j : j + 2], axis=(1, 2)) for j in range(0, width, stride)]
        for i in range(0, height, stride)
    ]
    return np.stack([np.stack(row, axis=1) for row in rows], axis=1)


def squeeze_excitation(x, weights):
    """Multiply the channels by factors that two dense layers compute from their means."""
    hidden = np.maximum(x.mean((1, 2)) @ weights["reduce/kernel"] + weights["reduce/bias"], 0)
    gate = 1 / (1 + np.exp(-(hidden @ weights["expand/kernel"] + weights["expand/bias"])))
    return x * gate[:, None, None]


def conv(x, kernel, bias=None, stride=1, groups=1):
    """Convolve with `(size - 1) / 2` zeros on every side; the channels of one group see
    only that group's inputs.
    """
    size = kernel.shape[0]
    x = pad(x, size // 2)
    outputs = []
    for inputs, weights in zip(
        np.split(x, groups, axis=-1), np.split(kernel, groups, axis=-1), strict=True
    ):
        total = 0.0
        for row in range(size):
            for column in range(size):
                total = total + np.einsum(
                    "bhwi,io->bhwo", window(inputs, row, column, size, stride), weights[row, column]
                )
        outputs.append(total)
    y = np.concatenate(outputs, axis=-1)
    return y if bias is None else y + bias


def max_pool(x, size, stride):
    """Max pooling padded with minus infinity."""
    x = pad(x, size // 2, -np.inf)
    return np.max(
        [window(x, row, column, size, stride) for row in range(size) for column in range(size)],
        axis=0,
    )


def dense(x, kernel, bias=None):
    return x @ kernel if bias is None else x @ kernel + bias


def batch_norm(x, p, *, training, updates=None, place="", momentum=0.9, epsilon=1e-5):
    """`p` holds gamma, beta, moving_mean, moving_variance; in training `updates` gets
    the new moving statistics.
    """
    mean, variance = p["moving_mean"], p["moving_variance"]
    if training:
        axes = tuple(range(x.ndim - 1))
        batch = {"moving_mean": x.mean(axes), "moving_variance": x.var(axes)}
        for name, value in batch.items():
            if updates is not None:
                updates[f"{place}/{name}"] = momentum * p[name] + (1 - momentum) * value
        mean, variance = batch.values()
    return (x - mean) / np.sqrt(variance + epsilon) * p["gamma"] + p["beta"]


def layer_norm(x, p, epsilon=1e-5):
    """Normalise the channels at each position."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + epsilon) * p["gamma"] + p["beta"]


def group_norm(x, p, epsilon=1e-5):
    """Normalise each group of neighbouring channels over all positions of one example:
    32 groups, or the largest smaller power of 2 that divides the channels.
    """
    channels = x.shape[-1]
    groups = max(n for n in (1, 2, 4, 8, 16, 32) if channels % n == 0)
    grouped = x.reshape(len(x), -1, groups, channels // groups)
    centred = grouped - grouped.mean((1, 3), keepdims=True)
    normal = centred / np.sqrt(grouped.var((1, 3), keepdims=True) + epsilon)
    return normal.reshape(x.shape) * p["gamma"] + p["beta"]


def rms_norm(x, p, epsilon=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * p["scale"]


NORMS = {"layer": layer_norm, "group": group_norm, "rms": rms_norm, "none": lambda x, p: x}


def below(weights: Mapping, place: str) -> dict:
    """The weights with paths that start with `place/`, which the keys leave out."""
    return {
        path[len(place) + 1 :]: value
        for path, value in weights.items()
        if path.startswith(place + "/")
    }


def sinkhorn(logits):
    """Positive matrices whose columns and rows are divided by their sums, 20 times each."""
    matrix = np.exp(logits)
    for _ in range(20):
        matrix = matrix / matrix.sum(-2, keepdims=True)
        matrix = matrix / matrix.sum(-1, keepdims=True)
    return matrix


def hyper_connections(x, p, streams, constraint="sinkhorn", per="pixel"):
    """h_pre, h_post and H_res of hyper-connections, from a state of all streams (arXiv
    2512.24880, Eq. 7 to 9; arXiv 2601.05732 for the means of permutations).
    """
    n = streams
    x = x.mean((1, 2), keepdims=True) if per == "map" else x
    normal = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    numbers = (normal @ p["kernel"])[..., None, :]
    scales = np.repeat(p["scale"], [n, n, len(p["bias"]) - 2 * n])
    numbers = (numbers * scales + p["bias"])[..., 0, :]
    pre, post, res = np.split(numbers, [n, 2 * n], axis=-1)
    if constraint == "permutations":
        res = np.exp(res) / np.exp(res).sum(-1, keepdims=True)
        matrix = np.zeros((*res.shape[:-1], n, n))
        for k, order in enumerate(itertools.permutations(range(n))):
            for row, column in enumerate(order):
                matrix[..., row, column] += res[..., k]
    else:
        matrix = res.reshape(*res.shape[:-1], n, n)
    if constraint == "sinkhorn":
        matrix = sinkhorn(matrix)
    return 1 / (1 + np.exp(-pre)), 2 / (1 + np.exp(-post)), matrix


@dataclasses.dataclass
class Unit:
    """A unit's options and weights (float64); `unit(x)` returns x_{l+1}.

    In training `updates` collects the new moving statistics. `factors` are the factors of
    constant scaling on x and on F(x). `hyper` are the options of hyper-connections: their
    number of streams, constraint, and what they are computed for.
    """

    weights: Mapping
    filters: int
    block: str = "basic"
    strides: int = 1
    arrangement: str = "full_preactivation"
    shortcut: str = "identity"
    over: str = "channels"
    shape_shortcut: str = "auto"
    activate_shape_shortcut: bool = True
    stride_on: str = "first"
    normalization: str = "batch"
    activation: str = "relu"
    groups: int = 1
    dilation: int = 1
    dilated_strides: int = 1
    downsampling: str = "strided"
    squeeze_excitation: int | None = None
    standardize_weights: bool = False
    factors: tuple = (0.5, 0.5)
    hyper: tuple = (4, "sinkhorn", "pixel")
    training: bool = False
    activated_input: bool = (
        False  # the first unit of a network: its first activation is in the stem
    )
    updates: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.weights = {path: np.asarray(value, "float64") for path, value in self.weights.items()}

    def norm(self, x, place):
        p = below(self.weights, place)
        if self.normalization == "batch":
            return batch_norm(x, p, training=self.training, updates=self.updates, place=place)
        return NORMS[self.normalization](x, p)

    def weight(self, x, place, stride=1, groups=1, dilation=1):
        """Apply the weight at `place`: there is a `conv` for images, a `dense` for
        vectors.
        """
        p = below(self.weights, place)
        if self.block == "dense":
            return dense(x, p["kernel"], p.get("bias"))
        of_shortcut = place.startswith(("gate/", "shortcut/"))
        kernel = (
            standardized(p["kernel"])
            if self.standardize_weights and not of_shortcut
            else p["kernel"]
        )
        return conv(x, dilated(kernel, dilation), p.get("bias"), stride, groups)

    def run(self, symbols, x, norm_place):
        """Apply symbols of `FIG_4` in turn; `norm_place` is a pattern for the paths of
        the norms.
        """
        kernels = KERNELS[self.block]
        strided = kernels.index(3) if self.stride_on == "3x3" and 3 in kernels else 0
        blurs = self.downsampling == "blur" and self.strides > 1
        takes_maxima = self.downsampling == "max" and self.strides > 1
        unblurred = False
        for symbol in [*symbols.split(), "end"]:
            kind, number = symbol[0], symbol[1:]
            if unblurred and kind in (
                "W",
                "e",
            ):  # it comes after the strided weight, its normalisation and its activation
                x, unblurred = blur(x, self.strides), False
            if kind == "e":
                break
            if kind == "A":
                x = ACTIVATIONS[self.activation](x)
            elif kind == "N":
                x = self.norm(x, norm_place.format(number))
            else:
                i = int(number) - 1
                unblurred = blurs and i == strided
                x = self.weight(
                    x,
                    f"branch/{'conv' if kernels[i] else 'dense'}_{number}",
                    self.strides if i == strided and not (blurs or takes_maxima) else 1,
                    self.groups if kernels[i] == 3 else 1,
                    self.dilation * (self.dilated_strides if i > strided else 1),
                )
                if takes_maxima and i == strided:
                    x = max_of_pairs(x, self.strides)
        return x

    def __call__(self, x):
        x, residual = self.paths(x)
        after = FIG_4[self.arrangement][len(KERNELS[self.block])].split("+")[1]
        return self.per_stream(
            lambda x: self.run(after, x, "after_addition/norm"), self.add(x, residual)
        )

    @property
    def streams(self):
        return self.hyper[0] if self.shortcut == "hyper_connections" else 1

    def per_stream(self, function, x):
        """Apply a function to each stream. The streams are examples of one batch."""
        y = function(np.concatenate(np.split(x, self.streams, axis=-1)))
        return np.concatenate(np.split(y, self.streams), axis=-1)

    def read(self, x):
        """What the branch reads: x, or a mix of its streams."""
        if self.streams == 1:
            return x
        p = below(self.weights, "shortcut/coefficients")
        self.coefficients = pre, *_ = hyper_connections(x, p, *self.hyper)
        return np.einsum("...s,...sc->...c", pre, x.reshape(*x.shape[:-1], self.streams, -1))

    def paths(self, x):
        """The two inputs of the addition: x with the output's shape, before h; and F(x)."""
        whole = np.asarray(x, "float64")
        x = self.read(whole)
        before = FIG_4[self.arrangement][len(KERNELS[self.block])].split("+")[0]
        first, branch = before.split("|") if "|" in before else ("", before)
        activated = x if self.activated_input else self.run(first, x, "branch/norm_{}")
        residual = self.run(branch, activated, "branch/norm_{}")
        if self.squeeze_excitation:
            residual = squeeze_excitation(
                residual, below(self.weights, "branch/squeeze_excitation")
            )
        if self.streams > 1:
            return self.per_stream(lambda x: self.shortcut_input(x, x), whole), residual
        return self.shortcut_input(x, activated), residual

    def shortcut_input(self, x, activated):
        """x if the unit keeps the shape; else the raw or the activated input, downsampled
        and widened as the options say.
        """
        channels = self.filters * EXPANSION[self.block]
        if self.strides * self.dilated_strides == 1 and x.shape[-1] == channels:
            return x
        start = activated if self.activate_shape_shortcut else x
        stride = self.strides
        if self.downsampling != "strided" and stride > 1:
            pool = {"blur": blur, "max": max_of_pairs}.get(self.downsampling, average)
            start, stride = pool(start, stride), 1
        if self.shortcut == "none" or (
            self.shortcut == "conv1x1" and self.shape_shortcut != "zero_pad"
        ):
            return start  # none reads no input, conv1x1 is its own projection
        if self.shape_shortcut == "zero_pad":
            sampled = start if self.block == "dense" else start[:, ::stride, ::stride]
            missing = np.zeros((*sampled.shape[:-1], channels - x.shape[-1]))
            return np.concatenate([sampled, missing], axis=-1)
        y = self.weight(start, f"projection/{self.weight_name}", stride)
        return self.norm(y, "projection/norm") if self.arrangement in NORM_AFTER_PROJECTION else y

    @property
    def weight_name(self):
        return "dense" if self.block == "dense" else "conv"

    def add(self, x, residual):
        """Table 1: h(x) + F(x), with dropout as at inference; and the later shortcuts.
        `over` says what a vector is: a pixel's channels, or a whole map.
        """
        if self.shortcut in ("identity", "dropout"):
            assert self.shortcut == "identity" or not self.training, "dropout is random"
            return x + residual
        if self.shortcut == "none":
            return residual
        if self.shortcut == "constant_scaling":
            return self.factors[0] * x + self.factors[1] * residual
        if self.shortcut == "conv1x1":
            stride = self.strides if x.shape[:-1] != residual.shape[:-1] else 1
            return self.weight(x, f"shortcut/{self.weight_name}", stride) + residual
        if self.shortcut == "decayed_identity":
            return self.factors[0] * x + residual
        if self.shortcut == "depth_scaling":
            return x + self.factors[1] * residual
        if self.shortcut == "scaled_residual":
            return x + self.weights["shortcut/scale/factor"] * residual
        if self.shortcut == "orthogonal":
            axes = -1 if self.over == "channels" else tuple(range(1, x.ndim))
            product, squares = ((x * other).sum(axes, keepdims=True) for other in (residual, x))
            return x + residual - product / (squares + 1e-6) * x
        if self.shortcut == "hyper_connections":
            _, post, matrix = self.coefficients
            if x.ndim == 4:
                at = (slice(None), *[slice(None, None, self.strides)] * 2)
                post, matrix = post[at], matrix[at]
            state = x.reshape(*x.shape[:-1], self.streams, -1)
            placed = post[..., :, None] * residual[..., None, :]
            return (np.einsum("...ij,...jc->...ic", matrix, state) + placed).reshape(x.shape)
        g = 1 / (1 + np.exp(-self.weight(x, f"gate/{self.weight_name}")))
        return (1 - g) * x + (g if self.shortcut == "exclusive_gating" else 1) * residual


@dataclasses.dataclass
class Network:
    """A whole net at inference: `net(x)` returns logits; `outputs` then holds x_1 ...
    x_L, `first_input` what unit 1 read.

    `stages` lists `(filters, units, strides)`; `options` are those of `Unit`. `stem` is
    "3x3", "7x7", "deep" or "dense".
    """

    weights: Mapping
    stages: list
    stem: str
    block: str
    options: dict = dataclasses.field(default_factory=dict)

    def __call__(self, x):
        arrangement = self.options.get("arrangement", "full_preactivation")
        around = Unit(
            self.weights, 1, block=self.block, **self.options
        )  # knows the norm and the activation
        x = np.asarray(x, "float64")
        if self.stem == "dense":
            x = around.weight(x, "stem_dense")
        else:
            x = around.weight(x, "stem_conv", 1 if self.stem == "3x3" else 2)
        if self.stem == "deep":
            for i in (1, 2):
                x = around.run("N A", x, f"stem_norm_{i}")
                x = around.weight(x, f"stem_conv_{i + 1}")
        x = around.run(STEM[arrangement], x, "stem_norm")
        if self.stem in ("7x7", "deep"):
            x = max_pool(x, 3, 2)
        x = np.concatenate([x] * around.streams, axis=-1)
        self.first_input = x
        self.outputs = []
        total = sum(units for _, units, _ in self.stages)
        for s, (filters, units, strides) in enumerate(self.stages, 1):
            for u in range(1, units + 1):
                name = f"stage{s}_unit{u}"
                own = dict(self.options)
                if own.get("shortcut") == "decayed_identity":
                    own["factors"] = (1 - 0.4 * (len(self.outputs) + 1) / total, 1)  # down to 0.6
                if own.get("shortcut") == "depth_scaling":
                    own["factors"] = (1, 9 / total)
                unit = Unit(
                    below(self.weights, name),
                    filters,
                    block=self.block,
                    strides=strides if u == 1 else 1,
                    activated_input=not self.outputs,
                    **own,
                )
                x = unit(x)
                self.outputs.append(x)
        x = np.mean(np.split(x, around.streams, axis=-1), axis=0)
        x = around.run(HEAD[arrangement], x, "head_norm")
        if x.ndim == 4:
            x = x.mean((1, 2))
        head = {
            path: np.asarray(value, "float64")
            for path, value in below(self.weights, "head_classifier").items()
        }
        return dense(x, head["kernel"], head["bias"])


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def projected(x, weights, place):
    """A dense layer with the weights at `place`."""
    p = below(weights, place)
    return dense(x, p["kernel"], p.get("bias"))


def attention(x, weights, *, heads, causal=False):
    """`softmax(Q K^T / sqrt(size)) V` for each head, its columns side by side; x is
    `(batch, tokens, features)`.
    """
    query, key, value = (
        projected(x, weights, f"attention_1/{name}") for name in ("query", "key", "value")
    )
    size = query.shape[-1] // heads
    outputs = []
    for head in range(heads):
        q, k, v = (tensor[..., head * size : (head + 1) * size] for tensor in (query, key, value))
        scores = q @ k.swapaxes(1, 2) / math.sqrt(size)
        if causal:
            scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
        outputs.append(softmax(scores) @ v)
    return projected(np.concatenate(outputs, axis=-1), weights, "attention_1/output")


def mlp(x, weights, *, kind):
    """`(silu(x W_1) * x W_2) W_3` for `"swiglu"`, else `activation(x W_1) W_2`."""
    if kind == "swiglu":
        gated = ACTIVATIONS["silu"](projected(x, weights, "gated_1/dense_1")) * projected(
            x, weights, "gated_1/gate_1"
        )
        return projected(gated, weights, "dense_2")
    return projected(ACTIVATIONS[kind](projected(x, weights, "dense_1")), weights, "dense_2")


@dataclasses.dataclass
class TransformerUnit:
    """Attention and MLP with their weights (float64); `unit(x)` returns the outputs of
    both.
    """

    attention_weights: Mapping
    mlp_weights: Mapping
    heads: int
    arrangement: str = "pre_norm"
    normalization: str = "layer"
    mlp: str = "gelu"
    causal: bool = False
    shortcut: str = "identity"
    factors: tuple = (0.5, 0.5)

    def __call__(self, x):
        y = self.residual(
            x,
            self.attention_weights,
            lambda x, w: attention(x, w, heads=self.heads, causal=self.causal),
        )
        return y, self.residual(y, self.mlp_weights, lambda x, w: mlp(x, w, kind=self.mlp))

    def residual(self, x, weights, branch):
        """`h(x) + F(LN(x))`, `LN(h(x) + F(x))`, or `h(x) + LN(F(LN(x)))`."""
        weights = {path: np.asarray(value, "float64") for path, value in weights.items()}
        norm = NORMS[self.normalization]
        h = Unit(weights, x.shape[-1], block="dense", shortcut=self.shortcut, factors=self.factors)
        read = h.read(x)
        if self.arrangement == "post_norm":
            total = h.add(x, branch(read, below(weights, "branch")))
            f = below(weights, "after_addition/norm")
            return h.per_stream(lambda total: norm(total, f), total)
        residual = branch(norm(read, below(weights, "branch/norm_0")), below(weights, "branch"))
        if self.arrangement == "peri_norm":  # attention is one weight, an MLP two
            of_mlp = below(weights, "branch/norm_2")
            residual = norm(residual, of_mlp or below(weights, "branch/norm_1"))
        return h.add(x, residual)


def patches(x, size):
    """Tokens of an image, row by row, each with its pixels row by row."""
    squares = [
        x[:, row : row + size, column : column + size].reshape(len(x), -1)
        for row in range(0, x.shape[1], size)
        for column in range(0, x.shape[2], size)
    ]
    return np.stack(squares, axis=1)


@dataclasses.dataclass
class Transformer:
    """A whole transformer: `net(x)` returns logits; `outputs` then holds x_1 ... x_L.
    `options` are those of the units.
    """

    weights: Mapping
    depth: int
    patch_size: int | None
    options: dict

    def __call__(self, x):
        weights = {path: np.asarray(value, "float64") for path, value in self.weights.items()}
        x = np.asarray(x, "float64")
        if self.patch_size:
            x = patches(x, self.patch_size)
        x = projected(x, weights, "stem_dense") + weights["stem_positions/positions"]
        self.outputs = []
        for layer in range(1, self.depth + 1):
            own = (below(weights, f"layer{layer}_{name}") for name in ("attention", "mlp"))
            self.outputs += TransformerUnit(*own, **self.options)(x)
            x = self.outputs[-1]
        if self.options.get("arrangement", "pre_norm") != "post_norm":
            x = NORMS[self.options.get("normalization", "layer")](x, below(weights, "head_norm"))
        return projected(x.mean(1), weights, "head_classifier")
