"""How a unit with strides shrinks the map: only by strided convolutions, or with a
pooling that reads every pixel.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import keras

from keras_preact.layers.spatial import BinomialPooling2D, PaddedMaxPooling2D

#: Name to a pooling of given strides.
POOLINGS: Mapping[str, Callable[..., keras.Layer]] = MappingProxyType(
    {
        "average": functools.partial(BinomialPooling2D, 2),
        "blur": functools.partial(BinomialPooling2D, 3),
        "max": functools.partial(PaddedMaxPooling2D, 2),
    }
)


@dataclasses.dataclass(frozen=True)
class Downsampling:
    """The places where a pooling, a name from `POOLINGS`, takes over the stride of a
    weight.

    Args:
        projection: Before the projection of the shortcut.
        weight: Right after the weight with the stride.
        branch: After that weight and the activation that follows it.
        stem: After the max pooling of the stem.
    """

    projection: str | None = None
    weight: str | None = None
    branch: str | None = None
    stem: str | None = None

    def pooling(self, place: str, strides: int, data_format: str, dtype) -> list[keras.Layer]:
        """Return a list with the pooling that has the strides at a place, if there is
        one.
        """
        name = getattr(self, place)
        if strides == 1 or name is None:
            return []
        return [
            POOLINGS[name](
                strides=strides, data_format=data_format, name=f"{place}_downsampling", dtype=dtype
            )
        ]


#: Name to `Downsampling`. average: ResNet-D, arXiv 1812.01187, Fig. 2c; a 1x1 convolution at stride
#: 2 reads a quarter of the map otherwise. blur: arXiv 1904.11486, the binomial window of 3. max:
#: the convolution at every pixel, as networks for short training do (arXiv 2404.00498).
DOWNSAMPLINGS: Mapping[str, Downsampling] = MappingProxyType(
    {
        "strided": Downsampling(),
        "average": Downsampling(projection="average"),
        "blur": Downsampling(projection="blur", branch="blur", stem="blur"),
        "max": Downsampling(projection="max", weight="max"),
    }
)
