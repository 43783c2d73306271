"""How a unit with strides shrinks the map: by strided convolutions alone, or with a
pooling that looks at every pixel.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import keras

from keras_preact._spatial import WindowPooling2D


@dataclasses.dataclass(frozen=True)
class Downsampling:
    """Where a pooling takes the stride from a weight.

    Args:
        window: Weights of the pooling along a side.
        places: `"projection"`, in front of the shortcut's; `"branch"`, behind the
            activation of the weight that has the stride; `"stem"`, behind the stem's
            max pooling.
    """

    window: tuple[int, ...] = ()
    places: tuple[str, ...] = ()

    def pooling(self, place: str, strides: int, data_format: str, dtype) -> list[keras.Layer]:
        """Return the pooling for a place, which then has the strides: a list of one
        layer, or of none.
        """
        if strides == 1 or place not in self.places:
            return []
        return [
            WindowPooling2D(
                self.window, strides, data_format, name=f"{place}_downsampling", dtype=dtype
            )
        ]


#: Name to `Downsampling`. average: ResNet-D, arXiv 1812.01187, Fig. 2c; a 1x1 convolution at stride
#: 2 reads a quarter of the map otherwise. blur: arXiv 1904.11486, the binomial window of 3.
DOWNSAMPLINGS: Mapping[str, Downsampling] = MappingProxyType(
    {
        "strided": Downsampling(),
        "average": Downsampling((1, 1), ("projection",)),
        "blur": Downsampling((1, 2, 1), ("projection", "branch", "stem")),
    }
)
