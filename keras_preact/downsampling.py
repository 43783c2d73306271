"""How a unit with strides shrinks the map: only by strided convolutions, or with a
pooling that reads every pixel.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import keras

from keras_preact.layers.spatial import PaddedMaxPooling2D, WindowPooling2D


@dataclasses.dataclass(frozen=True)
class Downsampling:
    """The places where a pooling takes over the stride of a weight. Each has the weights of
    its window along a side; `"max"` takes the largest value of 2 x 2 pixels.

    Args:
        projection: Before the projection of the shortcut.
        weight: Right after the weight with the stride.
        branch: After that weight and the activation that follows it.
        stem: After the max pooling of the stem.
    """

    projection: tuple[int, ...] | str | None = None
    weight: tuple[int, ...] | str | None = None
    branch: tuple[int, ...] | None = None
    stem: tuple[int, ...] | None = None

    def pooling(self, place: str, strides: int, data_format: str, dtype) -> list[keras.Layer]:
        """Return a list with the pooling that has the strides at a place, if there is
        one.
        """
        window = getattr(self, place)
        if strides == 1 or window is None:
            return []
        settings: dict = {
            "data_format": data_format,
            "name": f"{place}_downsampling",
            "dtype": dtype,
        }
        if window == "max":
            return [PaddedMaxPooling2D(2, strides, **settings)]
        return [WindowPooling2D(window, strides, **settings)]


#: Name to `Downsampling`. average: ResNet-D, arXiv 1812.01187, Fig. 2c; a 1x1 convolution at stride
#: 2 reads a quarter of the map otherwise. blur: arXiv 1904.11486, the binomial window of 3. max:
#: the convolution at every pixel, as networks for short training do (arXiv 2404.00498).
DOWNSAMPLINGS: Mapping[str, Downsampling] = MappingProxyType(
    {
        "strided": Downsampling(),
        "average": Downsampling(projection=(1, 1)),
        "blur": Downsampling(projection=(1, 2, 1), branch=(1, 2, 1), stem=(1, 2, 1)),
        "max": Downsampling(projection="max", weight="max"),
    }
)
