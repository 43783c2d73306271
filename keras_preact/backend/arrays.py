"""Tensors of any backend as NumPy arrays."""

import numpy as np
from keras import ops

from keras_preact.preprocessing import readable


def as_numpy(value) -> np.ndarray:
    """Return a tensor or an array as an array with a dtype that NumPy knows."""
    return readable(ops.convert_to_numpy(value) if ops.is_tensor(value) else value)
