"""Several residual streams: a tensor that holds n of them, one after the other along the
channels, and the coefficients that mix them.
"""

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_preact import _checks
from keras_preact.layers import chains, spatial

#: Rounds of `sinkhorn` (arXiv 2512.24880, Table 5).
ROUNDS = 20
#: Start of the three scalars that multiply the linear maps (the same table).
SCALE = 0.01
#: Logit of every path between two streams at the start, where a stream's path to itself has 0. The
#: papers give none. The product of 54 such matrices, as in ResNet-110, has 0.95 on its diagonal.
CLOSED = -8.0
#: Smallest mean square of a pixel, and smallest sum of a column.
EPSILON, TINY = 1e-6, 1e-15


def mixed(coefficients: Sequence, streams: Sequence):
    """Return the sum of the streams times their coefficients, in the streams' dtype. It is
    computed in the coefficients' dtype, because in bfloat16 they would not sum to 1.
    """
    products = [
        coefficient * ops.cast(stream, coefficient.dtype)
        for coefficient, stream in zip(coefficients, streams, strict=True)
    ]
    return ops.cast(functools.reduce(ops.add, products), streams[0].dtype)


def run_chain(chain: list[keras.Layer], x, training, streams: int, axis: int):
    """Apply layers to every stream by itself: the streams of an example are examples."""
    if streams == 1 or not chain:
        return chains.run_chain(chain, x, training)
    x = ops.stack(ops.split(x, streams, axis), 1)
    y = chains.run_chain(chain, ops.reshape(x, (-1, *ops.shape(x)[2:])), training)
    y = ops.reshape(y, (-1, streams, *ops.shape(y)[1:]))
    return ops.concatenate(ops.unstack(y, streams, 1), axis)


class _Ends(keras.Layer):
    def __init__(self, streams: int, data_format: str | None = None, **kwargs):
        super().__init__(**kwargs)
        _checks.positive_int(streams, "streams")
        self.streams = _checks.plain(streams)
        self.data_format = spatial.data_format_of(data_format)

    def _axis(self, shape) -> int:
        return spatial.channel_axis(self.data_format, len(shape))

    def get_config(self):
        return super().get_config() | {"streams": self.streams, "data_format": self.data_format}


@keras.saving.register_keras_serializable("keras_preact")
class CopyStreams(_Ends):
    """Copies x into streams, which is the input of the first unit with several streams.

    Args:
        streams: Number of streams.
        data_format: Order of the axes of images; other inputs have the channels last.

    Source: Sec. 2.1 of arXiv 2409.19606.
    """

    def call(self, x):
        return ops.concatenate([x] * self.streams, self._axis(x.shape))

    def compute_output_shape(self, input_shape):
        channels = input_shape[self._axis(input_shape)] * self.streams
        return spatial.strided_shape(input_shape, 1, self.data_format, channels)


@keras.saving.register_keras_serializable("keras_preact")
class MeanOfStreams(_Ends):
    """Returns the mean of the streams, which is what follows the last unit.

    The paper sums them. With the mean, outputs and gradients of a network start as
    those of the network with one stream, also if no normalisation follows.

    Args:
        streams, data_format: See `CopyStreams`.

    Source: Sec. 2.1 of arXiv 2409.19606.
    """

    def call(self, x):
        share = ops.cast(1 / self.streams, keras.backend.result_type(x.dtype, "float32"))
        return mixed([share] * self.streams, ops.split(x, self.streams, self._axis(x.shape)))

    def compute_output_shape(self, input_shape):
        channels = input_shape[self._axis(input_shape)] // self.streams
        return spatial.strided_shape(input_shape, 1, self.data_format, channels)


def sinkhorn(logits, streams: int):
    """Make each matrix doubly stochastic: `exp`, then columns and rows divided by their
    sums in turn.

    The rounds compute the factors of rows and columns alone, which takes half the time.
    Rows come last, so only columns have an error.

    Source: Eq. 9 of arXiv 2512.24880.
    """
    shape = ops.shape(logits)
    matrix = ops.reshape(logits, (*shape[:-1], streams, streams))
    largest = ops.stop_gradient(ops.max(matrix, -1, keepdims=True))
    entries = ops.exp(matrix - largest)  # the largest of each row is 1: no row is all zeros
    rows = ops.exp(largest - ops.max(largest, -2, keepdims=True))
    for _ in range(ROUNDS):
        columns = 1 / (ops.sum(rows * entries, -2, keepdims=True) + TINY)
        rows = 1 / ops.sum(entries * columns, -1, keepdims=True)
    return ops.reshape(rows * entries * columns, shape)


def permutations(logits, streams: int):
    """Return means of the `n!` permutation matrices, of which the identity is the first,
    weighted by softmax.

    Source: arXiv 2601.05732.
    """
    matrices = [np.eye(streams)[list(order)] for order in itertools.permutations(range(streams))]
    flat = ops.convert_to_tensor(np.reshape(matrices, (len(matrices), -1)), logits.dtype)
    return ops.matmul(ops.softmax(logits), flat)


class Constraint(NamedTuple):
    """What the matrices H_res can be.

    Args:
        of: Function from logits and the number of streams to the matrices, flat.
        start: Function from the number of streams to the logits of about the identity.
        is_bounded: Whether the product of any number of them stays bounded, as that of
            doubly stochastic matrices does.
    """

    of: Callable
    start: Callable[[int], np.ndarray]
    is_bounded: bool = True


#: Constraint of H_res by name.
CONSTRAINTS: Mapping[str, Constraint] = MappingProxyType(
    {
        "none": Constraint(lambda logits, n: logits, lambda n: np.eye(n).ravel(), is_bounded=False),
        "sinkhorn": Constraint(sinkhorn, lambda n: CLOSED * (1 - np.eye(n)).ravel()),
        "permutations": Constraint(
            permutations,
            lambda n: CLOSED * (np.arange(len([*itertools.permutations(range(n))])) > 0),
        ),
    }
)


class _Start(keras.initializers.Initializer):
    """The biases with which a unit computes what it computes with one stream: h_pre sums to
    1, h_post is 1, and H_res is about the identity.

    The shares in h_pre halve from stream to stream, starting at one that the seed picks.
    No two streams have the same share, otherwise they would stay equal in training.
    """

    def __init__(self, streams: int, constraint: str, seed: int | None = None):
        self.streams, self.constraint, self.seed = streams, constraint, seed

    def __call__(self, shape, dtype=None):
        first = random.randrange(self.streams) if self.seed is None else self.seed
        shares = np.roll(0.5 ** np.arange(self.streams), first)
        shares /= shares.sum()
        pre = np.log(shares / (1 - shares))  # the sigmoid's inverse
        values = [pre, np.zeros(self.streams), CONSTRAINTS[self.constraint].start(self.streams)]
        return ops.convert_to_tensor(np.concatenate(values), dtype)

    def get_config(self):
        return {"streams": self.streams, "constraint": self.constraint, "seed": self.seed}


class Coefficients(keras.Layer):
    """Computes the coefficients of hyper-connections from the streams, for each pixel or
    token.

    Args:
        streams: Number of streams, n.
        constraint: Name from `CONSTRAINTS`.
        per: `"pixel"`, or `"map"` for the same coefficients at all pixels of a map, from
            its mean.
        strides: Strides of the unit: h_post and H_res are computed at every
            `strides`-th pixel.
        data_format: `"channels_last"` or `"channels_first"`.
        kernel_regularizer: Regulariser of the linear map.
        seed: Seed of the start.

    Output: h_pre and h_post, lists of n tensors with one channel, and H_res, a list of n
        rows of n such tensors. They have at least 32 bits.
    """

    def __init__(
        self,
        streams: int,
        constraint: str,
        per: str,
        strides: int,
        data_format: str,
        kernel_regularizer: Any,
        seed: int | None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.streams, self.per, self.strides = streams, per, strides
        self.constraint, self.data_format = constraint, data_format
        self.kernel_regularizer, self.seed = kernel_regularizer, seed

    def build(self, input_shape):
        start = _Start(self.streams, self.constraint, self.seed)
        numbers = 2 * self.streams + len(CONSTRAINTS[self.constraint].start(self.streams))
        channels = input_shape[spatial.channel_axis(self.data_format, len(input_shape))]
        self.kernel = self.add_weight(
            shape=(channels, numbers),
            initializer="zeros",
            regularizer=self.kernel_regularizer,
            autocast=False,
            name="kernel",
        )
        self.bias = self.add_weight(
            shape=(numbers,), initializer=start, autocast=False, name="bias"
        )
        self.scale = self.add_weight(
            shape=(3,), initializer=keras.initializers.Constant(SCALE), autocast=False, name="scale"
        )

    def call(self, x):
        n = self.streams
        axis = spatial.channel_axis(self.data_format, x.ndim)
        x = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))
        kernel, bias, scale = (ops.cast(v, x.dtype) for v in (self.kernel, self.bias, self.scale))
        x = ops.moveaxis(x, axis, -1)
        if self.per == "map":
            x = ops.mean(x, (1, 2), keepdims=True)
        # the RMS norm divides the product, which is smaller (arXiv 2512.24880, Eq. 14 to 16)
        norm = ops.sqrt(ops.mean(ops.square(x), -1, keepdims=True) + EPSILON)
        product = ops.matmul(x, kernel) / norm
        pre, post, res = (
            scale[i] * product[..., place] + bias[place]
            for i, place in enumerate((slice(n), slice(n, 2 * n), slice(2 * n, None)))
        )
        post, res = (spatial.sampled(each, self.strides, "channels_last") for each in (post, res))
        res = CONSTRAINTS[self.constraint].of(res, n)

        def parts(coefficients, number: int) -> list:
            return ops.split(ops.moveaxis(coefficients, -1, axis), number, axis)

        entries = parts(res, n * n)
        rows = [entries[i : i + n] for i in range(0, n * n, n)]
        return parts(ops.sigmoid(pre), n), parts(2 * ops.sigmoid(post), n), rows
