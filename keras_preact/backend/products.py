"""Convolutions as matrix products. They are faster for 1x1 kernels, and for all kernels
inside a loop on a CPU.

For a CPU, XLA compiles the gradients of a convolution inside a loop to code that is
several times slower than outside a loop.
"""

from keras import ops


def convolve(images, kernel, groups: int = 1, dilation: int = 1):
    """Convolve at stride 1 with zero padding: shift the images for every element of the
    kernel, multiply them by its matrix, and sum the products.

    Args:
        images: `(batch, height, width, channels)`.
        kernel: `(height, width, channels // groups, filters)` of odd sizes.
        groups: Groups of channels that are convolved separately.
        dilation: Pixels from one element of the kernel to the next.

    Returns:
        `(batch, height, width, filters)`.
    """
    rows, columns = kernel.shape[:2]
    height, width = images.shape[1:3]
    down, right = rows // 2 * dilation, columns // 2 * dilation
    sides = [(0, 0), (down, down), (right, right), (0, 0)]
    padded = ops.pad(images, sides) if down or right else images
    total = None
    for row in range(rows):
        for column in range(columns):
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
    if groups == 1:  # in two dimensions; otherwise TensorFlow multiplies image by image
        rows = ops.reshape(images, (-1, images.shape[-1]))
        return ops.reshape(ops.matmul(rows, matrix), (*shape, matrix.shape[1]))
    grouped = ops.reshape(images, (*shape, groups, matrix.shape[0]))
    y = ops.einsum("bhwgi,igo->bhwgo", grouped, ops.reshape(matrix, (matrix.shape[0], groups, -1)))
    return ops.reshape(y, (*shape, matrix.shape[1]))
