"""What a signature takes and gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Work on fewer bytes takes less time than handing it to a thread and waiting for that thread's
#: turn.
INLINE_BYTES = 32 * 1024


def highest(probabilities: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which classes have the highest probabilities, int32 `(n, k)`, and these;
    of equal ones, the first class first.
    """
    indices = np.argsort(-probabilities, axis=-1, kind="stable")[:, :k].astype(np.int32)
    return indices, np.take_along_axis(probabilities, indices, axis=-1)


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a signature.

    Args:
        name: Its name.
        dtype: `"float32"`, `"string"`, `"int32"`, ...: TensorFlow's names.
        shape: Its axes; `None` is one of any length.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Signature:
    """A function of a served model: named tensors to named tensors."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def from_card(
        cls, name: str, card: Mapping[str, Mapping[str, Mapping[str, Any]]]
    ) -> "Signature":
        """Return the signature that a model card describes under `signatures[name]`."""
        inputs, outputs = (
            tuple(
                TensorSpec(key, spec["dtype"], tuple(spec["shape"]))
                for key, spec in card[side].items()
            )
            for side in ("inputs", "outputs")
        )
        return cls(name, inputs, outputs)
