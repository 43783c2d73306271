"""The learning rate of the paper's CIFAR recipes at every iteration, in closed form."""

import numpy as np

EPOCH = 50_000 // 64

#: Iterations in all, and those from which on the rate is a tenth.
RUNS = {
    "cifar10": (64_000, (32_000, 48_000)),
    "cifar10_batch64": (200 * EPOCH, (81 * EPOCH, 122 * EPOCH)),
}


def paper_rates(recipe):
    """0.01 for 400 iterations, 0.1, and a tenth of it from each drop on."""
    length, (first, second) = RUNS[recipe]
    step = np.arange(length)
    return np.where(step < 400, 0.01, 0.1 / 10.0 ** ((step >= first) * 1 + (step >= second)))
