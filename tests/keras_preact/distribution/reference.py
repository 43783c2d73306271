"""A small network with batch normalisation, and SGD, in NumPy: every device's part of a
batch normalised by itself.
"""

import numpy as np

EPSILON, MOMENTUM = 1e-5, 0.9


class Normalized:
    """A 1x1 convolution, batch normalisation, a square, the mean over the image, a
    classifier.

    Args:
        weights: Kernel `(1, 1, channels in, channels)`, gamma, beta, moving mean and
            variance, classifier's kernel.
        groups: Parts of the batch that have batch statistics each.
    """

    def __init__(self, weights, groups: int):
        kernel, self.gamma, self.beta, self.mean, self.variance, self.head = (
            np.array(w, "float64") for w in weights
        )
        self.kernel = kernel[0, 0]
        self.groups = groups

    @property
    def weights(self):
        return [self.kernel[None, None], self.gamma, self.beta, self.mean, self.variance, self.head]

    def step(self, images, labels, rate: float) -> float:
        """Make a step of SGD and return the loss before it."""
        x = images.astype("float64")
        h = x @ self.kernel
        parts = h.reshape(self.groups, -1, h.shape[-1])
        mean, variance = parts.mean(1, keepdims=True), parts.var(1, keepdims=True)
        deviation = np.sqrt(variance + EPSILON)
        normal = (parts - mean) / deviation
        y = (self.gamma * normal + self.beta).reshape(h.shape)
        pooled = (y**2).mean((1, 2))
        logits = pooled @ self.head
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        loss = -np.log(shares[np.arange(len(x)), labels]).mean()

        on_logits = shares
        on_logits[np.arange(len(x)), labels] -= 1
        on_logits /= len(x)
        on_y = 2 * y * (on_logits @ self.head.T)[:, None, None] / (x.shape[1] * x.shape[2])
        on_y = on_y.reshape(parts.shape)
        on_normal = on_y * self.gamma
        centred = (
            on_normal
            - on_normal.mean(1, keepdims=True)
            - normal * (on_normal * normal).mean(1, keepdims=True)
        )
        on_h = (centred / deviation).reshape(h.shape)

        self.head -= rate * pooled.T @ on_logits
        self.gamma -= rate * (on_y * normal).sum((0, 1))
        self.beta -= rate * on_y.sum((0, 1))
        self.kernel -= rate * np.einsum("bhwi,bhwo->io", x, on_h)
        self.mean = MOMENTUM * self.mean + (1 - MOMENTUM) * mean.mean(0)[0]
        self.variance = MOMENTUM * self.variance + (1 - MOMENTUM) * variance.mean(0)[0]
        return loss
