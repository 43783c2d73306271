"""kp.recommend: settings to start with for a network of a given depth, with reasons.

The tables hold the rules of thumb in `GUIDE`. What the paper says about its own networks,
and what this package measured, comes first; the reason then says so.
"""

import dataclasses
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_preact import _checks, initializers, schedules

#: Title of the guide that the reasons refer to.
GUIDE = "Identity Mappings in Deep Residual Networks: A Comprehensive Guide"


class _Training(NamedTuple):
    """Advice for networks of at least `start` weight layers.

    Rates are for SGD with momentum and these batch sizes. For other sizes they are
    scaled from the last one. `drops` are the shares of the training after which the
    rate is divided by 10; without them it falls along half a cosine.
    """

    start: int
    rates: tuple[float, float]
    warmup_epochs: tuple[int, int]
    initializer: Callable[[], keras.initializers.Initializer]
    batch_sizes: tuple[int, ...] = (256,)
    drops: tuple[float, ...] = ()
    warmup_iterations: int = 0
    source: str = "guide, Sec. 8.7"


_GUIDE = (
    _Training(1, (0.1, 0.1), (0, 0), initializers.released_he, drops=(1 / 2, 3 / 4)),
    _Training(50, (0.1, 0.1), (5, 10), initializers.released_he),
    _Training(200, (0.01, 0.05), (10, 20), initializers.DeltaOrthogonal),
    _Training(1000, (0.001, 0.001), (20, 50), initializers.DepthScaledHe),
)
_PAPERS = _GUIDE[0]._replace(start=0, source="appendix of arXiv 1603.05027")
#: Task to the depth of the paper's deepest network for it, and how the paper trained them all.
_RECIPES = {
    "cifar": (1202, _PAPERS._replace(batch_sizes=(64, 128), warmup_iterations=400)),
    "imagenet": (200, _PAPERS._replace(drops=(1 / 3, 2 / 3))),
}
#: Guide, Sec. 8.1 and 8.4.
_ARRANGEMENT_REASONS = {
    1: "Post-activation works as well below 50 layers; only pre-activation can grow deeper.",
    50: "Pre-activation is recommended from 50 layers on; watch the gradient norms.",
    200: "Pre-activation is essential from 200 layers on; post-activation hardly trains there.",
    1000: "Pre-activation is mandatory from 1000 layers on.",
}
#: Guide, Sec. 8.4 and 8.5.
_INITIALIZER_REASONS = {
    0: "The paper's networks of every depth start with He's values.",
    1: "Standard initialisation is enough below 50 layers.",
    50: "It keeps the size of the signal, which matters from 50 layers on.",
    200: "Orthogonal weights help from 200 layers on; the paper's networks of that depth started "
    "with He's values.",
    1000: "The guide requires orthogonal weights from 1000 layers on. Here, 10,001 layers trained "
    "with DepthScaledHe, which keeps gradients at both ends alike; the paper trained 1001 layers "
    "with He's values, at a rate of 0.1 (task='cifar').",
}
_NORMALIZATION_REASONS = {
    "batch": "Proven for images, and its batch statistics are useful (guide, Sec. 8.2).",
    "layer": "Batches below 16 give poor statistics (guide, Sec. 8.2; Fig. 1 of arXiv 1803.08494).",
    "rms": "Needs no mean and no batch; large language models use it (guide, Sec. 8.2).",
}
_RELU = "relu", "Simple, proven and the paper's; the guide prefers GELU (Sec. 8.3)."
#: Task to the activation of its units and the reason; `"swiglu"` is the MLP of a transformer.
_ACTIVATIONS = {
    "vision": _RELU,
    "mobile": ("hard_silu", "A fast approximation, for small devices (guide, Sec. 8.3)."),
    "language": ("swiglu", "The gated activation of large language models (guide, Sec. 8.3)."),
    "cifar": _RELU,
    "imagenet": _RELU,
}
#: Smallest number of parameters, range of the dropout and the reason.
_DROPOUTS = (
    (0, (0.0, 0.0), "the paper's recipes have none; elsewhere, give `parameters`"),
    (1, (0.1, 0.2), "dropout is fine for small networks (guide, Sec. 8.6)"),
    (100_000_000, (0.0, 0.1), "reduce it to 0 early (guide, Sec. 8.6)"),
    (1_000_000_000, (0.0, 0.0), "large networks need more data instead (guide, Sec. 8.6)"),
)


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """Settings to start with. `str()` returns them with their reasons.

    Args:
        learning_rate: Rate after the warm-up, for SGD with momentum.
        drops: Shares of the training after which the rate is divided by 10; if there are
            none, it falls along half a cosine.
        warmup_epochs: Length of the warm-up before a cosine.
        warmup_iterations: Number of first iterations with a tenth of the rate, as in
            the paper.
        model_options: Arguments for a builder: for `kp.models.pre_ln_transformer` if
            the task is language, else for the residual networks.
        optimizer_options: Arguments for `kp.optimizers.CoupledSGD` or any Keras
            optimiser, without the learning rate.
        reasons: Name of a setting to the reason for it, with its source.
    """

    learning_rate: float
    drops: tuple[float, ...]
    warmup_epochs: float
    warmup_iterations: int
    model_options: dict[str, Any]
    optimizer_options: dict[str, Any]
    reasons: dict[str, str]

    def schedule(self, steps_per_epoch: int, epochs: int) -> LearningRateSchedule:
        """Return the learning-rate schedule for a training of this length.

        Raises:
            ValueError: for a training that is not longer than the warm-up.
        """
        steps, rate = steps_per_epoch * epochs, self.learning_rate
        if not self.drops:
            warmup = round(self.warmup_epochs * steps_per_epoch)
            return schedules.cosine_schedule(rate, steps, warmup_steps=warmup)
        drops = [round(share * steps) for share in self.drops]
        # A short training has no room for all of the paper's 400 iterations.
        warmup = min(self.warmup_iterations, drops[0] // 2)
        return schedules.step_schedule(
            rate, drops, warmup_steps=warmup, warmup_learning_rate=rate / 10
        )

    def __str__(self) -> str:
        values = vars(self) | self.model_options | self.optimizer_options
        lines = []
        for name, reason in self.reasons.items():
            value = values[name]
            is_object = isinstance(value, keras.initializers.Initializer)
            lines.append(f"{name}: {type(value).__name__ if is_object else value}")
            lines.append(textwrap.indent(textwrap.fill(reason, 96), "    "))
        return "\n".join([*lines, f"The guide is {GUIDE!r}: rules of thumb."])


def recommend(
    *, depth: int, task: str = "vision", batch_size: int = 256, parameters: int | None = None
) -> Recommendation:
    """Return settings to start with for a network of this depth, with reasons.

    Args:
        depth: Number of weight layers. A layer of a transformer has four.
        task: `"vision"`, `"mobile"`, `"language"` (a transformer), or `"cifar"` and
            `"imagenet"` for the paper's networks and training.
        batch_size: Number of examples per step. The learning rate grows with its square
            root, as in the guide.
        parameters: Number of the network's parameters, which decides the dropout. None:
            no dropout.

    Returns:
        A `Recommendation`. Pass its `model_options`, `optimizer_options` and
        `schedule(...)` to the builder and the optimiser.

    Raises:
        ValueError: for numbers below 1, and for an unknown task.

    Example:

    >>> import keras_preact as kp
    >>> setup = kp.recommend(depth=164, batch_size=1024)
    >>> setup.learning_rate, setup.warmup_epochs, setup.model_options["normalization"]
    (0.2, 7.5, 'batch')
    >>> model = kp.models.resnet_cifar(164, **setup.model_options, input_shape=(8, 8, 1))
    >>> schedule = setup.schedule(steps_per_epoch=49, epochs=100)
    >>> optimizer = kp.optimizers.CoupledSGD(schedule, **setup.optimizer_options)
    >>> print(kp.recommend(depth=1001, task="cifar").reasons["kernel_initializer"])
    The paper's networks of every depth start with He's values.

    Source: the guide, `keras_preact.recommend.GUIDE`, Sec. 8.2 to 8.8; appendix of arXiv
        1603.05027.
    """
    _checks.positive_int(depth, "depth")
    _checks.positive_int(batch_size, "batch_size")
    if parameters is not None:
        _checks.positive_int(parameters, "parameters")
    activation, activation_reason = _checks.lookup(_ACTIVATIONS, task, "task")
    is_transformer = task == "language"
    row = [row for row in _GUIDE if row.start <= depth][-1]
    deepest, recipe = _RECIPES.get(task, (0, row))
    training = recipe if depth <= deepest else row
    known = training.batch_sizes
    factor = 1.0 if batch_size in known else (batch_size / known[-1]) ** 0.5
    normalization = "rms" if is_transformer else "layer" if batch_size < 16 else "batch"
    uses_glorot = is_transformer and row.start < 200
    initializer = keras.initializers.GlorotNormal if uses_glorot else training.initializer
    count = (parameters or 0) if training is row else 0
    _, dropouts, dropout_reason = [row for row in _DROPOUTS if row[0] <= count][-1]
    model = {
        "arrangement": "pre_norm" if is_transformer else "full_preactivation",
        "normalization": normalization,
        "mlp" if is_transformer else "activation": activation,
        "kernel_initializer": initializer(),
        "dropout": dropouts[0],
    }
    if not is_transformer:
        model["dropout_at"] = "between_weights"
    # The largest healthy norm: guide, Sec. 8.8.
    optimizer = {"global_clipnorm": 10.0} if training.start == 1000 else {}
    return Recommendation(
        learning_rate=sum(training.rates) / 2 * factor,
        drops=training.drops,
        warmup_epochs=sum(training.warmup_epochs) / 2,
        warmup_iterations=training.warmup_iterations,
        model_options=model,
        optimizer_options=optimizer,
        reasons=_training_reasons(training, factor)
        | {
            "arrangement": _ARRANGEMENT_REASONS[row.start],
            "normalization": _NORMALIZATION_REASONS[normalization],
            "mlp" if is_transformer else "activation": activation_reason,
            "kernel_initializer": _INITIALIZER_REASONS[training.start],
            "dropout": f"{_range(*dropouts)}: {dropout_reason}.",
        }
        | dict.fromkeys(optimizer, "Extreme depth needs it (guide, Sec. 8.4 and 8.8)."),
    )


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _training_reasons(training: _Training, factor: float) -> dict[str, str]:
    source = f"({training.source})"
    sizes = " and ".join(map(str, training.batch_sizes))
    rate = f"{_range(*training.rates)} for batches of {sizes}, times {factor:g} for this size"
    rate += f" {source}. For SGD with momentum: adaptive optimisers need much less."
    if not training.drops:
        warmup = f"{_range(*training.warmup_epochs)} epochs, then half a cosine {source}."
        return {"learning_rate": rate, "warmup_epochs": warmup}
    drops = f"After these shares of the training the rate is divided by 10 {source}."
    warmup = f"The first iterations have a tenth of the rate {source}."
    return {"learning_rate": rate, "drops": drops, "warmup_iterations": warmup}
