"""kp.recommend: what to begin with for a network of a given depth, and why."""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import keras

from keras_preact import _checks, advice, schedules
from keras_preact.advice import PAPER


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a field has its value, in a sentence, and where that stands."""

    field: str
    sentence: str
    source: str


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to begin with. `str()` of it is a page to read.

    Args:
        depth, task, batch_size, parameters: What was asked for.
        learning_rate: Behind the warm-up, for SGD with momentum, at this batch size.
        learning_rate_range: Lowest and highest that the source names, at this batch
            size.
        decay: `"steps"` or `"cosine"`.
        drops: Shares of the training at which steps divide the rate by 10.
        warmup_epochs: The middle of the range.
        warmup_epochs_range: Least and most.
        warmup_iterations: With a tenth of the rate, in place of epochs: the paper's.
        arrangement, normalization, activation: Of the units; `"swiglu"` is an MLP's.
        initializer: Key of `kp.advice.INITIALIZERS`.
        dropout: Rate of the dropout on the branches.
        dropout_range: Lowest and highest.
        dropout_at: Where it stands, see `ResidualUnit`.
        clip_norm: What the norm of all gradients is clipped to, None for no clipping.
        reasons: Why, field by field.
    """

    depth: int
    task: str
    batch_size: int
    parameters: int | None
    learning_rate: float
    learning_rate_range: tuple[float, float]
    decay: str
    drops: tuple[float, float]
    warmup_epochs: float
    warmup_epochs_range: tuple[float, float]
    warmup_iterations: int
    arrangement: str
    normalization: str
    activation: str
    initializer: str
    dropout: float
    dropout_range: tuple[float, float]
    dropout_at: str
    clip_norm: float | None
    reasons: tuple[Reason, ...]

    def model_options(self) -> dict[str, Any]:
        """Return arguments of a builder: of `kp.models.pre_ln_transformer` for
        language, else of the residual networks'.
        """
        options: dict[str, Any] = {
            "arrangement": self.arrangement,
            "normalization": self.normalization,
            "kernel_initializer": advice.INITIALIZERS[self.initializer](),
            "dropout": self.dropout,
        }
        if advice.TASKS[self.task].transformer:
            return options | {"mlp": self.activation}
        return options | {"activation": self.activation, "dropout_at": self.dropout_at}

    def optimizer_options(self) -> dict[str, Any]:
        """Return arguments of `kp.optimizers.CoupledSGD`, or any Keras optimiser,
        beside the learning rate.
        """
        return {} if self.clip_norm is None else {"global_clipnorm": self.clip_norm}

    def schedule(
        self, steps_per_epoch: int, epochs: int
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """Return the learning rate over a training of so many epochs.

        Raises:
            ValueError: for fewer epochs than the warm-up takes.
        """
        _checks.positive_int(steps_per_epoch, "steps_per_epoch")
        _checks.positive_int(epochs, "epochs")
        if epochs <= self.warmup_epochs:
            raise ValueError(
                f"The warm-up takes {self.warmup_epochs:g} epochs: `epochs` must be more. "
                f"Received: epochs={epochs}"
            )
        return DECAYS[self.decay](self, steps_per_epoch, epochs)

    def __str__(self) -> str:
        size = "" if self.parameters is None else f", {self.parameters:,} parameters"
        lines = [f"{self.depth} layers, {self.task}, batches of {self.batch_size}{size}"]
        for reason in self.reasons:
            lines.append(f"  {reason.field}: {_shown(getattr(self, reason.field))}")
            lines += textwrap.wrap(
                f"{reason.sentence} ({reason.source})",
                100,
                initial_indent="    ",
                subsequent_indent="    ",
            )
        if any("guide" in reason.source for reason in self.reasons):
            lines.append(f"The guide is {advice.GUIDE!r}: rules of thumb.")
        return "\n".join(lines)


def _steps(recommendation: Recommendation, steps_per_epoch: int, epochs: int):
    drops = [round(share * steps_per_epoch * epochs) for share in recommendation.drops]
    rate = recommendation.learning_rate
    # a short training has no room for all of the paper's 400
    warmup = min(recommendation.warmup_iterations, drops[0] // 2)
    return schedules.step_schedule(rate, drops, warmup_steps=warmup, warmup_learning_rate=rate / 10)


def _cosine(recommendation: Recommendation, steps_per_epoch: int, epochs: int):
    warmup = round(recommendation.warmup_epochs * steps_per_epoch)
    return schedules.cosine_schedule(
        recommendation.learning_rate, steps_per_epoch * epochs, warmup_steps=warmup
    )


#: Name to a function of a recommendation, the iterations of an epoch and the epochs, which returns
#: a schedule.
DECAYS: Mapping[str, Callable] = MappingProxyType({"steps": _steps, "cosine": _cosine})


def recommend(
    *,
    depth: int,
    task: str = "vision",
    batch_size: int = 256,
    scaling: str = "sqrt",
    parameters: int | None = None,
) -> Recommendation:
    """Say what to begin with for a network of this depth.

    Args:
        depth: Weight layers. A transformer's layer has four behind one another.
        task: Key of `kp.advice.TASKS`: `"vision"`, `"mobile"`, `"language"` (a
            transformer), or `"cifar"` and `"imagenet"` for the paper's own networks and
            how it trained them.
        batch_size: Images in a step; the learning rate grows with it.
        scaling: How: `"sqrt"` (of the batch over 256), as the guide has it, or
            `"linear"`.
        parameters: Of the network; decides on the dropout. None: not known, and none.

    Returns:
        A `Recommendation`; its `model_options()`, `schedule()` and
        `optimizer_options()` go where they are used.

    Raises:
        ValueError: for numbers below 1, an unknown task or scaling (with the nearest
            ones).

    Example:

    >>> import keras_preact as kp
    >>> advice = kp.recommend(depth=164, batch_size=1024)
    >>> advice.learning_rate, advice.decay, advice.warmup_epochs_range
    (0.2, 'cosine', (5, 10))
    >>> model = kp.models.resnet_cifar(164, **advice.model_options(), input_shape=(8, 8, 1))
    >>> optimizer = kp.optimizers.CoupledSGD(advice.schedule(steps_per_epoch=49, epochs=100), **advice.optimizer_options())
    >>> print(kp.recommend(depth=20, task="cifar", batch_size=128).reasons[0].sentence)
    The paper's rate, at batches of 64 and 128.

    Source: `kp.advice.GUIDE`, Sec. 8.2 to 8.7; appendix of arXiv 1603.05027.
    """
    for value, argument in (
        (depth, "depth"),
        (batch_size, "batch_size"),
        (1 if parameters is None else parameters, "parameters"),
    ):
        _checks.positive_int(value, argument)
    kind = _checks.lookup(advice.TASKS, task, "task")
    scale = _checks.lookup(advice.SCALINGS, scaling, "scaling")
    row = _last(advice.DEPTHS, depth)
    recipe = advice.RECIPES.get(task)
    recipe = recipe if recipe and depth <= recipe.deepest else None
    chosen = [
        _training(row, kind, batch_size, scaling, scale)
        if recipe is None
        else _trained(recipe, batch_size, scaling, scale),
        _network(row, kind, batch_size, recipe),
        _dropout(kind, parameters, recipe),
    ]
    values = {key: value for part, _ in chosen for key, value in part.items()}
    reasons = tuple(reason for _, part in chosen for reason in part)
    return Recommendation(
        depth=depth,
        task=task,
        batch_size=batch_size,
        parameters=parameters,
        reasons=reasons,
        **values,
    )


class _Row(Protocol):
    @property
    def start(self) -> int: ...


R = TypeVar("R", bound=_Row)


def _last(rows: Sequence[R], value: float) -> R:
    """Return the row of the highest start that `value` reaches."""
    return [row for row in rows if row.start <= value][-1]


def _scaled(factor: float, batch_size: int, scaling: str) -> str:
    return "" if factor == 1 else f", times {factor:g} for batches of {batch_size} ({scaling})"


def _middle(bounds: tuple[float, float]) -> float:
    return (bounds[0] + bounds[1]) / 2


def _shown(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _training(
    row: advice.DepthRow, kind: advice.Task, batch_size: int, scaling: str, scale
) -> tuple[dict, list[Reason]]:
    """Return how to train by the guide, and why."""
    factor = scale(batch_size / advice.BASE_BATCH_SIZE)
    source = "guide, Sec. 8.7"
    low, high = row.learning_rate
    values = {
        "learning_rate": _middle(row.learning_rate) * factor,
        "learning_rate_range": (low * factor, high * factor),
        "decay": row.decay,
        "drops": advice.RECIPES["cifar"].drops,
        "warmup_epochs": _middle(row.warmup_epochs),
        "warmup_epochs_range": row.warmup_epochs,
        "warmup_iterations": 0,
        "clip_norm": row.clip_norm,
    }
    of_rate = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    rate = f"{of_rate} at this depth and batches of {advice.BASE_BATCH_SIZE}{_scaled(factor, batch_size, scaling)}"
    if row.start >= 1000 and not kind.transformer:
        rate += f"; the paper trained its 1001 layers for CIFAR at {advice.RECIPES['cifar'].learning_rate:g} (task='cifar')"
    if kind.transformer:
        rate += "; for SGD with momentum: adaptive optimisers want much less"
    low, high = row.warmup_epochs
    warmup = (
        f"{low:g} to {high:g} epochs at this depth" if high else "None is needed below 50 layers"
    )
    clip = "Only extreme depth asks for it."
    if row.clip_norm:
        clip = f"Extreme depth asks for it; {row.clip_norm:g} is the largest norm that counts as healthy."
    return values, [
        Reason("learning_rate", f"{rate}.", source),
        Reason(
            "decay",
            {"steps": "Steps below 50 layers.", "cosine": "A cosine from 50 layers on."}[row.decay],
            source,
        ),
        Reason("warmup_epochs", f"{warmup}.", source),
        Reason("clip_norm", clip, "guide, Sec. 8.4 and 8.8"),
    ]


def _trained(
    recipe: advice.Recipe, batch_size: int, scaling: str, scale
) -> tuple[dict, list[Reason]]:
    """Return how the paper trained, and why."""
    known = batch_size in recipe.batch_sizes
    base = recipe.batch_sizes[-1]
    factor = 1 if known else scale(batch_size / base)
    rate = recipe.learning_rate * factor
    sizes = " and ".join(map(str, recipe.batch_sizes))
    values = {
        "learning_rate": rate,
        "learning_rate_range": (rate, rate),
        "decay": "steps",
        "drops": recipe.drops,
        "warmup_epochs": 0.0,
        "warmup_epochs_range": (0.0, 0.0),
        "warmup_iterations": recipe.warmup_iterations,
        "clip_norm": None,
    }
    shares = " and ".join(f"{share:.0%}" for share in recipe.drops)
    warmup = (
        "The first 400 iterations at a tenth of the rate."
        if recipe.warmup_iterations
        else "The paper has none here."
    )
    return values, [
        Reason(
            "learning_rate",
            f"The paper's rate, at batches of {sizes}{_scaled(factor, batch_size, scaling)}.",
            recipe.source,
        ),
        Reason(
            "decay",
            f"Divided by 10 at {shares} of the training, as the paper did at every depth.",
            recipe.source,
        ),
        Reason("warmup_iterations", warmup, recipe.source),
        Reason("clip_norm", "The paper names none.", recipe.source),
    ]


def _network(
    row: advice.DepthRow, kind: advice.Task, batch_size: int, recipe: advice.Recipe | None
) -> tuple[dict, list[Reason]]:
    small = (
        batch_size < advice.SMALLEST_BATCH_FOR_STATISTICS
        and kind.small_batch_normalization != kind.normalization
    )
    normalization = kind.small_batch_normalization if small else kind.normalization
    initializer = kind.initializer if recipe else row.initializer or kind.initializer
    values = {
        "arrangement": kind.arrangement,
        "normalization": normalization,
        "activation": kind.activation,
        "initializer": initializer,
    }
    because = kind.normalization_reason
    if small:
        because = f"Batches below {advice.SMALLEST_BATCH_FOR_STATISTICS} give poor statistics; layer normalisation needs none."
    start = (
        "The paper's networks of every depth begin with He's values."
        if recipe
        else row.initializer_reason
    )
    return values, [
        Reason(
            "arrangement", row.arrangement_reason, f"guide, Sec. 8.1 and 8.4; Table 2 of {PAPER}"
        ),
        Reason(
            "normalization",
            because,
            "guide, Sec. 8.2; arXiv 1803.08494" if small else "guide, Sec. 8.2",
        ),
        Reason(
            "activation",
            kind.activation_reason,
            PAPER if recipe or kind.activation == "relu" else "guide, Sec. 8.3",
        ),
        Reason("initializer", start, recipe.source if recipe else "guide, Sec. 8.4 and 8.5"),
    ]


def _dropout(
    kind: advice.Task, parameters: int | None, recipe: advice.Recipe | None
) -> tuple[dict, list[Reason]]:
    place = "before_addition" if kind.transformer else "between_weights"
    bounds, source = (0.0, 0.0), "guide, Sec. 8.6"
    if recipe is not None:
        because, source = "The paper's recipe has none.", recipe.source
    elif parameters is None:
        because = "It depends on the number of parameters: give `parameters`."
    else:
        row = _last(advice.DROPOUTS, parameters)
        bounds = row.rate
        because = (
            f"{bounds[0]:g} to {bounds[1]:g} for {parameters:,} parameters; {row.alternative}."
        )
    values = {"dropout": bounds[0], "dropout_range": bounds, "dropout_at": place}
    return values, [
        Reason("dropout", because, source),
        Reason(
            "dropout_at",
            "On the branch, never on the shortcut or behind the addition.",
            "guide, Sec. 8.6",
        ),
    ]
