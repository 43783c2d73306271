"""How a unit with strides shrinks the map: only by strided convolutions, or with a
pooling that reads every pixel.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import keras

from keras_preact.layers.spatial import WindowPooling2D


@dataclasses.dataclass(frozen=True)
class Downsampling:
    """The places at which a pooling has the stride of a weight.

    Args:
        window: Weights of the pooling along a side.
        places: `"projection"`, before the projection of the shortcut; `"branch"`,
            after the activation before the weight with the stride; `"stem"`, after the
            max pooling of the stem.
    """

    window: tuple[int, ...] = ()
    places: tuple[str, ...] = ()

    def pooling(self, place: str, strides: int, data_format: str, dtype) -> list[keras.Layer]:
        """Return a list with the pooling that has the strides at a place, if there is
        one.
        """
        if strides == 1 or place not in self.places:
            return []
        name = f"{place}_downsampling"
        return [WindowPooling2D(self.window, strides, data_format, name=name, dtype=dtype)]


#: Name to `Downsampling`. average: ResNet-D, arXiv 1812.01187, Fig. 2c; a 1x1 convolution at stride
#: 2 reads a quarter of the map otherwise. blur: arXiv 1904.11486, the binomial window of 3.
DOWNSAMPLINGS: Mapping[str, Downsampling] = MappingProxyType(
    {
        "strided": Downsampling(),
        "average": Downsampling((1, 1), ("projection",)),
        "blur": Downsampling((1, 2, 1), ("projection", "branch", "stem")),
    }
)
