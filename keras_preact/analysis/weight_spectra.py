"""Singular values of the weight matrices of a model, and their product over all layers."""

import dataclasses
import math

import keras
import numpy as np
from keras import ops

from keras_preact.backend import keras_private
from keras_preact.backend.arrays import as_numpy
from keras_preact.health.weights import Places
from keras_preact.layers import spatial
from keras_preact.stacks import LayerStack

_DEPTHWISE = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
_MEASURED = (
    *(keras.layers.Dense, keras.layers.EinsumDense),
    *(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D, *_DEPTHWISE),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
    *(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D),
)


@dataclasses.dataclass(frozen=True, eq=False)
class WeightSpectra:
    """Singular values of W weight matrices, from the first layer to the last.

    Attributes:
        names: Path of each kernel; in a stack, the path in the unit:
            `stage1_unit3/branch/conv_1/kernel`.
        groups: Path of the unit of each kernel, or of its layer if it is in no unit.
        shapes: Shape of each matrix, `(inputs, outputs)`.
        sigma_max: Largest singular value, the spectral norm, `(W,)`, float64.
        sigma_min: Smallest of the `min(inputs, outputs)` singular values, `(W,)`.
        frobenius: Frobenius norm, `(W,)`.
        left_out: Names of other weights with two or more axes, except biases.
    """

    names: tuple[str, ...]
    groups: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    sigma_max: np.ndarray
    sigma_min: np.ndarray
    frobenius: np.ndarray
    left_out: tuple[str, ...]

    @property
    def stable_rank(self) -> np.ndarray:
        """Squared Frobenius norm over the squared spectral norm, `(W,)`: 1 for a matrix of
        rank 1, the rank if all singular values are equal; 0 for zeros.
        """
        largest = np.where(self.sigma_max > 0, self.sigma_max, 1.0)
        return (self.frobenius / largest) ** 2

    @property
    def condition_number(self) -> np.ndarray:
        """`sigma_max / sigma_min`, `(W,)`; infinite if `sigma_min` is 0, up to rounding."""
        zero = np.max(self.shapes, axis=1) * np.finfo("float64").eps * self.sigma_max
        is_regular = self.sigma_min > zero
        return np.where(
            is_regular, self.sigma_max / np.where(is_regular, self.sigma_min, 1), np.inf
        )

    @property
    def log_product(self) -> float:
        """Natural logarithm of the product of all `sigma_max^2`; minus infinity if a kernel
        is 0.

        Norm-based generalisation bounds have this product as a factor. They are for chains
        of layers: shortcuts and normalisations are not in it. With batch normalisation, the
        size of a kernel changes the product, but not what the network computes.

        Source: arXiv 1706.08498 and 1707.09564.
        """
        with np.errstate(divide="ignore"):
            return float(2 * np.sum(np.log(self.sigma_max)))


def weight_spectra(model: keras.Model) -> WeightSpectra:
    """Measure the singular values of the kernels of a model, without changing it. Frozen
    layers count too; a layer that is used several times counts once.

    Which matrix a kernel is:

    - dense: the kernel, `(inputs, outputs)`;
    - `EinsumDense`, also in `MultiHeadAttention`: the axes that the equation sums over are
      the rows, the new axes are the columns;
    - convolution: `(height * width * channels in, channels out)`; transposed convolution:
      `(height * width * channels out, channels in)`;
    - convolution in groups, depthwise convolution, and an `EinsumDense` with axes that
      input, kernel and output share: one matrix with a block per group, channel or place
      on these axes, and zeros elsewhere.

    Embeddings, recurrent kernels, weights of your own layers and integers of quantized
    layers are not measured, but listed in `left_out`. Every unit of a stack has its own
    matrices. Kernels with weight standardisation or LoRA are measured as the layer uses
    them.

    The matrix of a convolution maps one patch to one pixel. The norm of the convolution as
    a map between images is another one (arXiv 1805.10408): from `sigma_max` to
    `sqrt(height * width) * sigma_max`, for zero padding and images larger than the kernel.

    Args:
        model: Any built Keras model.

    Raises:
        ValueError: if no kernel can be measured, or if one is not finite.

    Example:

    >>> import keras_preact as kp
    >>> orthogonal = keras.initializers.Orthogonal(gain=1.5, seed=0)
    >>> model = kp.models.dense_resnet(
    ...     8, width=16, input_shape=(16,), kernel_initializer=orthogonal
    ... )
    >>> spectra = kp.analysis.weight_spectra(model)
    >>> spectra.names[1], spectra.shapes[1], spectra.stable_rank[1].round(3).item()
    ('stage1_unit1/branch/dense_1/kernel', (16, 16), 16.0)
    >>> spectra.sigma_max[1].round(3).item(), spectra.sigma_min[1].round(3).item()
    (1.5, 1.5)
    """
    find = Places(model)
    layers = list(keras_private.layers(model))
    stacks = [layer for layer in layers if isinstance(layer, LayerStack)]
    # a stacked weight has the layer of the template's weight
    pairs = [(pair, stack) for stack in stacks for pair in stack.stacked_variables]
    own_of = {id(stacked): (own, stack) for (own, stacked), stack in pairs}
    known = [layer for layer in layers if isinstance(layer, _MEASURED)]
    owners = {id(variable): layer for layer in known for variable in layer.variables}
    measured, left_out = [], []
    starts: dict[int, int] = {}
    for position, variable in enumerate(model.weights):
        own, stack = own_of.get(id(variable), (variable, None))
        if len(own.shape) < 2 or own.name == "bias" or own.name.startswith("lora_"):
            continue
        dtype = keras.backend.standardize_dtype(variable.dtype)
        layer = owners.get(id(own)) if keras.backend.is_float_dtype(dtype) else None
        value = variable
        if layer is not None and own.name == "kernel" and getattr(layer, "lora_enabled", False):
            value = layer.kernel
        kernels = as_numpy(ops.convert_to_tensor(value))
        # the weights of a unit follow each other, in a stack as in separate units
        start = starts.setdefault(id(stack), position) if stack else position
        for i, place in enumerate(find.of(variable)):
            blocks = _blocks(layer, own.name, kernels[i] if stack else kernels)
            if blocks is None:
                left_out.append(place.name)
            else:
                measured.append(((start, i, position), place, blocks))
    if not measured:
        raise ValueError(
            "The model has no kernel of a dense or convolutional layer to measure. Build it first, "
            f"or take a model with such layers. Received: {model.name!r}, left out: "
            f"{', '.join(left_out) or 'nothing'}"
        )
    measured.sort(key=lambda row: row[0])
    places = [place for _, place, _ in measured]
    every = [blocks for *_, blocks in measured]
    sigmas = [_singular_values(place.name, blocks) for _, place, blocks in measured]
    return WeightSpectra(
        tuple(place.name for place in places),
        tuple(place.group for place in places),
        tuple((len(blocks) * blocks.shape[1], len(blocks) * blocks.shape[2]) for blocks in every),
        np.array([sigma.max() for sigma in sigmas]),
        np.array([sigma.min() for sigma in sigmas]),
        np.array([np.linalg.norm(sigma) for sigma in sigmas]),
        tuple(left_out),
    )


def _blocks(layer: keras.Layer | None, name: str, kernel: np.ndarray) -> np.ndarray | None:
    """Return the blocks of the matrix of a kernel, `(blocks, inputs, outputs)`; None for
    another weight.
    """
    if layer is None or name not in ("kernel", "depthwise_kernel", "pointwise_kernel"):
        return None
    if isinstance(layer, keras.layers.EinsumDense):
        return _einsum_blocks(layer.equation, kernel)
    if isinstance(layer, _DEPTHWISE) or name == "depthwise_kernel":
        channels, multiplier = kernel.shape[-2:]
        return np.moveaxis(kernel, -2, 0).reshape(channels, -1, multiplier)
    if isinstance(layer, spatial.PaddedConv2D) and layer.standardize:
        tensor = ops.convert_to_tensor(kernel, "float32")
        kernel = as_numpy(spatial.standardized(tensor, layer.EPSILON, "float32"))
    groups = getattr(layer, "groups", 1)
    blocks = kernel.reshape(-1, groups, kernel.shape[-1] // groups)
    return np.moveaxis(blocks, 1, 0)


def _einsum_blocks(equation: str, kernel: np.ndarray) -> np.ndarray | None:
    """Return the blocks of a kernel of an equation such as `abc,cde->abde`; None if the
    kernel has an axis that neither the input nor the output has.
    """
    inputs, own, outputs = equation.replace("->", ",").split(",")
    shared = [axis for axis in own if axis in inputs and axis in outputs]
    summed = [axis for axis in own if axis in inputs and axis not in outputs]
    new = [axis for axis in own if axis not in inputs and axis in outputs]
    order = [own.index(axis) for axis in (*shared, *summed, *new)]
    if len(order) < len(own):
        return None
    sizes = [math.prod(kernel.shape[own.index(axis)] for axis in axes) for axes in (shared, summed)]
    return kernel.transpose(order).reshape(*sizes, -1)


def _singular_values(name: str, blocks: np.ndarray) -> np.ndarray:
    if not np.isfinite(blocks).all():
        raise ValueError(
            "Weights must be finite: load a checkpoint from before the training diverged. "
            f"Received: NaN or infinite values in {name}"
        )
    return np.linalg.svd(blocks.astype("float64"), compute_uv=False).ravel()
