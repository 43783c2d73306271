"""Convolutions as sums of matrix products, for the one place where XLA's own
convolutions are slow: loops on a CPU.

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
        groups: As in `keras.layers.Conv2D`.
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
            product = _multiply(
                padded[:, top : top + height, left : left + width], kernel[row, column], groups
            )
            total = product if total is None else total + product
    return total


def _multiply(x, matrix, groups: int):
    if groups == 1:
        return ops.matmul(x, matrix)
    grouped = ops.reshape(x, (*ops.shape(x)[:-1], groups, -1))
    y = ops.einsum("bhwgi,igo->bhwgo", grouped, ops.reshape(matrix, (matrix.shape[0], groups, -1)))
    return ops.reshape(y, (*ops.shape(x)[:-1], matrix.shape[1]))
