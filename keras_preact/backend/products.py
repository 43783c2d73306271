"""Convolutions as matrix products, where those are faster: 1x1 kernels, and any inside
a loop on a CPU.

XLA compiles the gradients of a convolution inside a loop for a CPU to code that is
several times slower than outside of one.
"""

from keras import ops


def convolve(images, kernel, groups: int = 1, dilation: int = 1):
    """Convolve at stride 1 with zeros around: for every element of the kernel, the
    images moved by it times its matrix.

    Args:
        images: `(batch, height, width, channels)`.
        kernel: `(size, size, channels // groups, filters)` with an odd size.
        groups: Groups of channels that are convolved separately.
        dilation: Pixels from one element of the kernel to the next.

    Returns:
        `(batch, height, width, filters)`.
    """
    size = kernel.shape[0]
    height, width = images.shape[1:3]
    pad = size // 2 * dilation
    padded = ops.pad(images, [(0, 0), (pad, pad), (pad, pad), (0, 0)]) if pad else images
    total = None
    for row in range(size):
        for column in range(size):
            top, left = row * dilation, column * dilation
            product = multiply(
                padded[:, top : top + height, left : left + width], kernel[row, column], groups
            )
            total = product if total is None else total + product
    return total


def multiply(images, matrix, groups: int = 1):
    """Multiply the channels of `(batch, height, width, channels)` by `(channels //
    groups, filters)`.
    """
    shape = (-1, *ops.shape(images)[1:-1])
    if groups == 1:  # of two dimensions: TensorFlow would multiply image by image
        rows = ops.reshape(images, (-1, images.shape[-1]))
        return ops.reshape(ops.matmul(rows, matrix), (*shape, matrix.shape[1]))
    grouped = ops.reshape(images, (*shape, groups, matrix.shape[0]))
    y = ops.einsum("bhwgi,igo->bhwgo", grouped, ops.reshape(matrix, (matrix.shape[0], groups, -1)))
    return ops.reshape(y, (*shape, matrix.shape[1]))
