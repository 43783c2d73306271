"""A network as a backbone of keras-hub, with its feature pyramid and presets, and the
image classifier around it.
"""

import math
from collections.abc import Sequence
from typing import Any

import keras

from keras_preact._objects import Hidden
from keras_preact.models import named_weights
from keras_preact.models.network import ResidualNetwork
from keras_preact.models.segments import Stage
from keras_preact.models.stem import STEMS
from keras_preact.stacks import UnitStack
from keras_preact.weights.keras_hub import library

library()  # if it is not installed, the error says what to install
import keras_hub  # noqa: E402

#: Arguments of a network that a backbone sets itself, because it returns maps.
_OWN = (
    "name",
    "trainable",
    "dtype",
    "input_shape",
    "include_top",
    "pooling",
    "classes",
    "classifier_activation",
)


@keras.saving.register_keras_serializable("keras_preact")
class PreActResNetBackbone(keras_hub.models.FeaturePyramidBackbone):
    """A network of residual units without classifier, as a backbone of keras-hub.

    Args:
        stages: `Stage(filters, units, strides)`, in order.
        stem, stem_filters, block: Arguments of `ResidualNetwork`.
        image_shape: Shape of an image in the order of `data_format`; a size may be None.
        dtype: A dtype or a policy.
        **options: `name`, `trainable` and the options of `ResidualNetwork`:
            `stacked=True`, `normalization="group"`, `mean=127.5, std=127.5`, ...

    Attributes:
        network: The `ResidualNetwork` of the same layers: its stages, units, stacks.
        pyramid_outputs: Dictionary of Keras tensors: `P2` is the last map at 1/4 of the
            image's size, as it leaves a unit (raw); `P3`, `P4`, `P5` at 1/8, 1/16, 1/32.

    Output: the last activated maps.

    `from_preset` and `save_to_preset` are keras-hub's. After `import keras_preact.hub`,
    `keras_hub.models.Backbone.from_preset` finds this class too.
    `PreActResNetImageClassifier` adds a classifier.

    Raises:
        ValueError: for options that a network does not have, and for strides that are
            not powers of two.

    Example:

    >>> from keras_preact import hub
    >>> stages = [(64, 2, 1), (128, 2, 2)]
    >>> backbone = hub.PreActResNetBackbone(stages, block="basic", image_shape=(64, 64, 3))
    >>> {level: maps.shape for level, maps in backbone.pyramid_outputs.items()}
    {'P2': (None, 16, 16, 64), 'P3': (None, 8, 8, 128)}
    """

    def __init__(
        self,
        stages: Sequence[Stage | Sequence],
        *,
        stem: str = "7x7",
        stem_filters: int = 64,
        block: str = "bottleneck",
        image_shape: Sequence[int | None] = (None, None, 3),
        dtype: Any = None,
        name: str | None = None,
        trainable: bool = True,
        **options,
    ):
        if refused := sorted(options.keys() & set(_OWN)):
            raise ValueError(
                "A backbone returns maps, without pooling and classifier: leave their options out. "
                f"Received: {', '.join(refused)}"
            )
        network = ResidualNetwork.from_config(
            {
                **options,
                "stages": stages,
                "stem": stem,
                "stem_filters": stem_filters,
                "block": block,
                "input_shape": tuple(image_shape),
                "include_top": False,
                "classes": 1,
                "dtype": dtype,
                "name": name,
            }
        )
        super().__init__(
            inputs=network.inputs[0], outputs=network.outputs[0], dtype=dtype, name=name
        )
        self._network = Hidden(network)  # the backbone tracks its layers
        self.image_shape = tuple(image_shape)
        self.data_format = network.arguments["data_format"]
        self.pyramid_outputs = _pyramid(network)
        if not trainable:
            self.trainable = False

    @property
    def network(self) -> ResidualNetwork:
        return self._network.value

    @classmethod
    def from_network(cls, network: ResidualNetwork, **changes) -> "PreActResNetBackbone":
        """Return a backbone with copies of a network's weights, without its pooling and
        classifier.

        Args:
            network: A network, such as `kp.weights.from_keras_applications` or
                `kp.create_model` returns.
            **changes: Arguments of the backbone that differ, such as `image_shape`.

        Raises:
            WeightsMismatch: if the changes need other weights.

        Example:

        >>> import keras_preact as kp
        >>> from keras_preact import hub
        >>> options = {"width_factor": 0.25, "input_shape": (32, 32, 3), "classes": 5}
        >>> network = kp.models.resnet_imagenet((1, 1), **options)
        >>> hub.PreActResNetBackbone.from_network(network).output_shape
        (None, 4, 4, 128)
        """
        if not isinstance(network, ResidualNetwork):
            raise ValueError(f"`network` must be a ResidualNetwork. Received: network={network!r}")
        policy = keras.dtype_policies.get(network.arguments["dtype"])
        backbone = cls(**(_arguments(network) | {"name": network.name, "dtype": policy} | changes))
        state = {
            path: weight.value()
            for path, weight in named_weights.named(network).items()
            if not path.startswith(named_weights.CLASSIFIER)
        }
        named_weights.load(
            backbone.network, state, [named_weights.Entry(path, path) for path in state]
        )
        return backbone

    def get_config(self):
        return super().get_config() | _arguments(self.network)


@keras.saving.register_keras_serializable("keras_preact")
class PreActResNetImageClassifier(keras_hub.models.ImageClassifier):
    """keras-hub's image classifier around a `PreActResNetBackbone`.

    Arguments, input and output are as in `keras_hub.models.ImageClassifier`. Its
    `from_preset` finds this class. `ImageClassifier` itself takes the backbone too, but
    the presets that it saves cannot be read, because keras-hub looks for a classifier
    that names the backbone's class.

    Example:

    >>> from keras_preact import hub
    >>> backbone = hub.PreActResNetBackbone([(8, 2, 1)], block="basic", image_shape=(32, 32, 3))
    >>> hub.PreActResNetImageClassifier(backbone, num_classes=3).output_shape
    (None, 3)
    """

    backbone_cls = PreActResNetBackbone


def _arguments(network: ResidualNetwork) -> dict:
    config = network.get_config()
    return {key: value for key, value in config.items() if key not in _OWN} | {
        "image_shape": config["input_shape"]
    }


def _pyramid(network: ResidualNetwork) -> dict:
    """Return the last output of a segment at every size."""
    levels, stride = {}, STEMS[network.arguments["stem"]].total_stride
    for segment, output in zip(network.segments, network.segment_outputs, strict=True):
        stride *= 1 if isinstance(segment, UnitStack) else segment.strides
        if stride & (stride - 1):
            raise ValueError(
                "A feature pyramid halves its maps: strides must be powers of two. Received: "
                f"{segment.name} at {stride}"
            )
        levels[f"P{int(math.log2(stride))}"] = output
    return levels
