"""What to begin with at a given depth, as tables with their sources: rates, warm-up,
normalisation, initialiser, dropout.

The tables are those of `GUIDE`, rules of thumb, Sec. 8.2 to 8.7. Where the paper says
otherwise of networks that it trained, or this package measured otherwise, that wins and
stands in the reason. `kp.recommend` reads them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import keras

from keras_preact import initializers

PAPER = "arXiv 1603.05027"
#: What the sources call the guide.
GUIDE = "Identity Mappings in Deep Residual Networks: A Comprehensive Guide"


@dataclasses.dataclass(frozen=True)
class DepthRow:
    """Advice for networks from `start` weight layers on, until the next row.

    Args:
        start: Weight layers.
        learning_rate: Lowest and highest, of SGD with momentum, at a batch of 256.
        decay: `"steps"` or `"cosine"`.
        warmup_epochs: Least and most.
        initializer: Key of `INITIALIZERS`; None for the task's.
        clip_norm: What the norm of the gradient is clipped to; None for no clipping.
        arrangement_reason, initializer_reason: Why, in a sentence each.
    """

    start: int
    learning_rate: tuple[float, float]
    decay: str
    warmup_epochs: tuple[float, float]
    initializer: str | None
    clip_norm: float | None
    arrangement_reason: str
    initializer_reason: str


#: Guide, Sec. 8.4, 8.5 and 8.7; the limit of the norm is the upper end of its healthy range, Sec.
#: 8.8.
DEPTHS: Sequence[DepthRow] = (
    DepthRow(
        start=1,
        learning_rate=(0.1, 0.1),
        decay="steps",
        warmup_epochs=(0, 0),
        initializer=None,
        clip_norm=None,
        arrangement_reason="Post-activation works as well below 50 layers; pre-activation is the one that can grow deeper.",
        initializer_reason="Standard initialisation is enough below 50 layers.",
    ),
    DepthRow(
        start=50,
        learning_rate=(0.1, 0.1),
        decay="cosine",
        warmup_epochs=(5, 10),
        initializer=None,
        clip_norm=None,
        arrangement_reason="Pre-activation is recommended from 50 layers on; watch the gradient norms.",
        initializer_reason="He's values keep the signal's size from layer to layer; from 50 layers on it matters.",
    ),
    DepthRow(
        start=200,
        learning_rate=(0.01, 0.05),
        decay="cosine",
        warmup_epochs=(10, 20),
        initializer="delta_orthogonal",
        clip_norm=None,
        arrangement_reason="Pre-activation is essential from 200 layers on, where post-activation ends in practice.",
        initializer_reason="Orthogonal weights help from 200 layers on; the paper's own networks there began with He's.",
    ),
    DepthRow(
        start=1000,
        learning_rate=(0.001, 0.001),
        decay="cosine",
        warmup_epochs=(20, 50),
        initializer="depth_scaled_he",
        clip_norm=10.0,
        arrangement_reason="Pre-activation is mandatory from 1000 layers on.",
        initializer_reason=(
            "The guide requires orthogonal weights from 1000 layers on; this package's 10,001 "
            "layers with batch normalisation trained with DepthScaledHe, which keeps the "
            "gradients of both ends alike "
            "(training/benchmark/measured/very_deep_preact_jax.json), and the paper's 1001 with "
            "plain He."
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class Task:
    """Advice for a kind of network.

    Args:
        normalization: And the one for small batches.
        activation: Of the units; `"swiglu"` is the MLP of a transformer.
        arrangement: Of the units.
        initializer: Key of `INITIALIZERS`, where the depth asks for no other.
        transformer: Whether it is for `kp.models.pre_ln_transformer`; else for the
            residual networks.
        normalization_reason, activation_reason: Why, in a sentence each.
    """

    normalization: str
    small_batch_normalization: str
    activation: str
    arrangement: str
    initializer: str
    transformer: bool
    normalization_reason: str
    activation_reason: str


_BATCH_NORM = "Batch normalisation is proven for images, and its batch statistics are useful."
_VISION = Task(
    normalization="batch",
    small_batch_normalization="layer",
    activation="gelu",
    arrangement="full_preactivation",
    initializer="he",
    transformer=False,
    normalization_reason=_BATCH_NORM,
    activation_reason="GELU is the smooth one for general purposes; ReLU, the paper's, is the simple and proven one.",
)
_OF_THE_PAPER = dataclasses.replace(
    _VISION, activation="relu", activation_reason="ReLU is the paper's."
)

#: Name to `Task`: guide, Sec. 8.2 and 8.3. `"cifar"` and `"imagenet"` are the paper's networks.
TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "vision": _VISION,
        "mobile": dataclasses.replace(
            _VISION,
            activation="hard_silu",
            activation_reason="Hard swish is a fast approximation, for small devices.",
        ),
        "language": Task(
            normalization="rms",
            small_batch_normalization="rms",
            activation="swiglu",
            arrangement="pre_norm",
            initializer="glorot",
            transformer=True,
            normalization_reason="RMS normalisation needs no mean and no batch, and large language models use it.",
            activation_reason="SwiGLU is the gated activation of large language models.",
        ),
        "cifar": _OF_THE_PAPER,
        "imagenet": _OF_THE_PAPER,
    }
)

#: Smallest batch at which batch statistics are good enough: arXiv 1803.08494, Fig. 1, where errors
#: rise below 16 images.
SMALLEST_BATCH_FOR_STATISTICS = 16


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the paper trained its networks for a data set.

    Args:
        deepest: Weight layers of the deepest one.
        batch_sizes: At which the rate is `learning_rate`; it is scaled from the last of
            them.
        learning_rate: Of SGD with momentum 0.9, divided by 10 at the drops.
        drops: As shares of the training.
        warmup_iterations: With a tenth of the rate.
        source: Where it stands.
    """

    deepest: int
    batch_sizes: tuple[int, ...]
    learning_rate: float
    drops: tuple[float, float]
    warmup_iterations: int
    source: str


#: Name of a task to the paper's `Recipe` for it.
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "cifar": Recipe(
            1202,
            (64, 128),
            0.1,
            (1 / 2, 3 / 4),
            400,
            f"appendix of {PAPER}; Sec. 4.2 of arXiv 1512.03385",
        ),
        "imagenet": Recipe(200, (256,), 0.1, (1 / 3, 2 / 3), 0, f"appendix of {PAPER}"),
    }
)

#: Name to the factor on the rate for a batch so many times as large: guide, Sec. 8.7; arXiv
#: 1706.02677.
SCALINGS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {"sqrt": lambda n: n**0.5, "linear": lambda n: n}
)
BASE_BATCH_SIZE = 256

#: Name to a function that makes the initialiser.
INITIALIZERS: Mapping[str, Callable[[], keras.initializers.Initializer]] = MappingProxyType(
    {
        "he": initializers.released_he,
        "glorot": keras.initializers.GlorotNormal,
        "delta_orthogonal": initializers.DeltaOrthogonal,
        "depth_scaled_he": initializers.DepthScaledHe,
    }
)


@dataclasses.dataclass(frozen=True)
class DropoutRow:
    """Advice for networks from `start` parameters on: lowest and highest rate, and what
    else there is.
    """

    start: int
    rate: tuple[float, float]
    alternative: str


#: Guide, Sec. 8.6.
DROPOUTS: Sequence[DropoutRow] = (
    DropoutRow(1, (0.1, 0.2), "dropout is fine for small networks"),
    DropoutRow(100_000_000, (0.0, 0.1), "let it fall to 0 early"),
    DropoutRow(1_000_000_000, (0.0, 0.0), "augmentation and more data serve large networks better"),
)
