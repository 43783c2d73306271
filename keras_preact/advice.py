"""Settings to start with at a given depth, as tables with their sources. `kp.recommend`
reads them.

The tables hold the rules of thumb in `GUIDE`, Sec. 8.2 to 8.7. What the paper says about
its own networks, and what this package measured, comes first; the reason then says so.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import keras

from keras_preact import initializers

PAPER = "arXiv 1603.05027"
#: What the sources call the guide.
GUIDE = "Identity Mappings in Deep Residual Networks: A Comprehensive Guide"


@dataclasses.dataclass(frozen=True)
class DepthRow:
    """Advice for networks of at least `start` weight layers, until the next row.

    Args:
        start: Number of weight layers.
        learning_rate: Lowest and highest rate, for SGD with momentum and batches of 256.
        decay: `"steps"` or `"cosine"`.
        warmup_epochs: Shortest and longest warm-up.
        initializer: Key of `INITIALIZERS`; None for the task's.
        clip_norm: Largest norm of the gradient; None for no clipping.
        arrangement_reason, initializer_reason: Reasons, a sentence each.
    """

    start: int
    learning_rate: tuple[float, float]
    decay: str
    warmup_epochs: tuple[float, float]
    initializer: str | None
    clip_norm: float | None
    arrangement_reason: str
    initializer_reason: str


#: Guide, Sec. 8.4, 8.5 and 8.7; `clip_norm` is the upper end of the healthy range, Sec. 8.8.
DEPTHS: tuple[DepthRow, ...] = (
    DepthRow(
        start=1,
        learning_rate=(0.1, 0.1),
        decay="steps",
        warmup_epochs=(0, 0),
        initializer=None,
        clip_norm=None,
        arrangement_reason=(
            "Post-activation works as well below 50 layers; only pre-activation can grow deeper."
        ),
        initializer_reason="Standard initialisation is enough below 50 layers.",
    ),
    DepthRow(
        start=50,
        learning_rate=(0.1, 0.1),
        decay="cosine",
        warmup_epochs=(5, 10),
        initializer=None,
        clip_norm=None,
        arrangement_reason=(
            "Pre-activation is recommended from 50 layers on; watch the gradient norms."
        ),
        initializer_reason=(
            "He's values keep the size of the signal from layer to layer, which matters from 50 "
            "layers on."
        ),
    ),
    DepthRow(
        start=200,
        learning_rate=(0.01, 0.05),
        decay="cosine",
        warmup_epochs=(10, 20),
        initializer="delta_orthogonal",
        clip_norm=None,
        arrangement_reason=(
            "Pre-activation is essential from 200 layers on, where post-activation hardly trains."
        ),
        initializer_reason=(
            "Orthogonal weights help from 200 layers on; the paper's own networks of that depth "
            "started with He's values."
        ),
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
            "The guide requires orthogonal weights from 1000 layers on. Here, 10,001 layers with "
            "batch normalisation trained with DepthScaledHe, which keeps gradients at both ends "
            "alike (training/benchmark/measured/very_deep_preact_jax.json); the paper trained "
            "1001 layers with plain He."
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class Task:
    """Advice for a kind of network.

    Args:
        normalization, small_batch_normalization: Normalisation of the units, and that
            for small batches.
        activation: Activation of the units; `"swiglu"` is the MLP of a transformer.
        arrangement: Arrangement of the units.
        initializer: Key of `INITIALIZERS`, unless the depth needs another one.
        transformer: Whether it is for `kp.models.pre_ln_transformer`; else it is for
            residual networks.
        normalization_reason, activation_reason: Reasons, a sentence each.
    """

    normalization: str
    small_batch_normalization: str
    activation: str
    arrangement: str
    initializer: str
    transformer: bool
    normalization_reason: str
    activation_reason: str


_VISION = Task(
    normalization="batch",
    small_batch_normalization="layer",
    activation="relu",
    arrangement="full_preactivation",
    initializer="he",
    transformer=False,
    normalization_reason=(
        "Batch normalisation is proven for images, and its batch statistics are useful."
    ),
    activation_reason=(
        "ReLU, the paper's, is simple and proven. The guide prefers GELU, which is smooth: "
        "activation='gelu'."
    ),
)
_OF_THE_PAPER = dataclasses.replace(_VISION, activation_reason="ReLU is the paper's.")

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
            normalization_reason=(
                "RMS normalisation needs no mean and no batch; large language models use it."
            ),
            activation_reason="SwiGLU is the gated activation of large language models.",
        ),
        "cifar": _OF_THE_PAPER,
        "imagenet": _OF_THE_PAPER,
    }
)

#: Smallest batch with good batch statistics: in Fig. 1 of arXiv 1803.08494, errors rise below it.
SMALLEST_BATCH_FOR_STATISTICS = 16


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the paper trained its networks for a data set.

    Args:
        deepest: Number of weight layers of the deepest network.
        batch_sizes: Batch sizes for `learning_rate`; for others it is scaled from the
            last one.
        learning_rate: Rate of SGD with momentum 0.9, divided by 10 at the drops.
        drops: Times of the drops, as shares of the training.
        warmup_iterations: Number of first iterations, with a tenth of the rate.
        source: Paper and section.
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

#: Name to the factor on the rate for an n times larger batch: guide, Sec. 8.7; arXiv 1706.02677.
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
    """Advice for networks of at least `start` parameters: lowest and highest rate, and
    a remark.
    """

    start: int
    rate: tuple[float, float]
    remark: str


#: Guide, Sec. 8.6.
DROPOUTS: tuple[DropoutRow, ...] = (
    DropoutRow(1, (0.1, 0.2), "dropout is fine for small networks"),
    DropoutRow(100_000_000, (0.0, 0.1), "reduce it to 0 early"),
    DropoutRow(1_000_000_000, (0.0, 0.0), "augmentation and more data serve large networks better"),
)
