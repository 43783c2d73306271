"""How a unit with strides shrinks the map: only by strided convolutions, or with a
pooling that reads every pixel.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import keras

from keras_preact import _checks
from keras_preact._objects import Specification, from_table, name_or_config
from keras_preact.layers.spatial import BinomialPooling2D, PaddedMaxPooling2D

#: Name to a function that makes a pooling.
POOLINGS: Mapping[str, Callable[..., keras.Layer]] = MappingProxyType(
    {
        "average": functools.partial(BinomialPooling2D, 2),
        "blur": functools.partial(BinomialPooling2D, 3),
        "max": functools.partial(PaddedMaxPooling2D, 2),
    }
)


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True)
class Downsampling(Specification):
    """The poolings that replace the stride of a weight: names from `POOLINGS`, or None.

    Args:
        projection: Pooling before the projection of the shortcut.
        weight: Pooling right after the weight with the stride.
        branch: Pooling after that weight and the activation that follows it.
        stem: Pooling after the max pooling of the stem.
    """

    projection: str | None = None
    weight: str | None = None
    branch: str | None = None
    stem: str | None = None

    def __post_init__(self) -> None:
        for place, name in self.get_config().items():
            if name is not None:
                _checks.lookup(POOLINGS, name, place)

    def pooling(
        self, place: str, strides: int, data_format: str, dtype, *, dilation: int | None = None
    ) -> list[keras.Layer]:
        """Return a list with the pooling for a place, a field of this class; an empty
        list if there is none.

        Args:
            place: The field.
            strides: Strides of the pooling.
            data_format, dtype: Arguments of the pooling.
            dilation: Dilation rate of an average, where dilation takes the place of
                strides. None: it does not.
        """
        name = getattr(self, place)
        if name is None or (strides == 1 and dilation is None):
            return []
        settings: dict = {"data_format": data_format, "dtype": dtype}
        if dilation is not None:
            settings["dilation"] = dilation
        return [POOLINGS[name](strides=strides, name=f"{place}_downsampling", **settings)]


#: Name to `Downsampling`. average: ResNet-D, arXiv 1812.01187, Fig. 2c; otherwise a 1x1 convolution
#: at stride 2 reads only a quarter of the map. blur: arXiv 1904.11486, with a binomial window of 3.
#: max: the convolution runs at every pixel, as in networks for short training (arXiv 2404.00498).
DOWNSAMPLINGS: Mapping[str, Downsampling] = MappingProxyType(
    {
        "strided": Downsampling(),
        "average": Downsampling(projection="average"),
        "blur": Downsampling(projection="blur", branch="blur", stem="blur"),
        "max": Downsampling(projection="max", weight="max"),
    }
)


def get(downsampling: str | dict | Downsampling) -> Downsampling:
    """Return the downsampling of that name, or `downsampling` itself if it is one
    already.

    Raises:
        ValueError: for an unknown name; the message holds the nearest ones.
    """
    return from_table(downsampling, Downsampling, DOWNSAMPLINGS, "downsampling")


def serialize(downsampling: Downsampling) -> str | dict:
    """Return what a config holds: the name if it is in the table, else its fields."""
    return name_or_config(downsampling, DOWNSAMPLINGS)
