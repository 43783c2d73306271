"""What pixels go through before a network sees them, as data."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from keras_preact import _checks


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How images become the input of a network: resize, crop, then `(pixel - mean) / std`.

    Args:
        mean, std: One number a channel, in pixel values from 0 to 255.
        size: Height and width that the network was made for.
        resize: Length that the shorter side is brought to, before the crop. None: no such step.
        crop: `"center"` cuts `size` x `size` pixels from the middle. None: an image of another size is
            brought to `size` x `size` as a whole.
        interpolation: Of every change of size.

    Raises:
        ValueError: for a std that is not positive, means and stds that differ in number, a `resize` below `size` or
            without `crop`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> cifar = kp.preprocessing.PREPROCESSING["cifar10"]
    >>> cifar.normalize(np.zeros((1, 32, 32, 3), "uint8"))[0, 0, 0].astype(int).tolist()  # black
    [-1, -1, -1]
    >>> kp.preprocessing.Preprocessing(**cifar.to_dict()) == cifar
    True
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int
    resize: int | None = None
    crop: str | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for field in ("mean", "std"):
            object.__setattr__(self, field, tuple(map(float, getattr(self, field))))  # JSON brings lists
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(f"`mean` and `std` must hold one number a channel. Received: mean={self.mean}, std={self.std}")
        if min(self.std) <= 0:
            raise ValueError(f"`std` must be positive. Received: std={self.std}")
        _checks.positive_int(self.size, "size")
        _checks.one_of(self.crop, (None, "center"), "crop")
        if self.resize is None:
            return
        _checks.positive_int(self.resize, "resize")
        if self.crop is None or self.resize < self.size:
            raise ValueError(
                "`resize` brings the shorter side to a length from which crop='center' can cut `size`. "
                f"Received: resize={self.resize}, crop={self.crop!r}, size={self.size}"
            )

    def normalize(self, images: np.ndarray) -> np.ndarray:
        """Return `(images - mean) / std` as float32; `images` have values from 0 to 255 and the channels last."""
        return (np.asarray(images, "float32") - np.asarray(self.mean, "float32")) / np.asarray(self.std, "float32")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them; `Preprocessing(**fields)` is equal to this one."""
        return dataclasses.asdict(self) | {"mean": list(self.mean), "std": list(self.std)}


#: Data set to its preprocessing at evaluation.
#:
#: - cifar10, cifar100: mean and std of the training images, as in fb.resnet.torch (datasets/cifar10.lua, cifar100.lua).
#: - imagenet: mean and std as there (datasets/imagenet.lua), times 255; shorter side 256 and centre crop of 224, the usual
#:   single-crop test.
#: - digits: of scikit-learn's 1,797 digits as `round(pixel * 255 / 16)`.
PREPROCESSING: Mapping[str, Preprocessing] = MappingProxyType(
    {
        "cifar10": Preprocessing((125.3, 123.0, 113.9), (63.0, 62.1, 66.7), 32),
        "cifar100": Preprocessing((129.3, 124.1, 112.4), (68.2, 65.4, 70.4), 32),
        "imagenet": Preprocessing((123.675, 116.28, 103.53), (58.395, 57.12, 57.375), 224, resize=256, crop="center"),
        "digits": Preprocessing((77.853723,), (95.850908,), 8),
    }
)
