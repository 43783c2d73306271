"""kp.recommend: settings to start with for a network of a given depth, with reasons."""

import dataclasses
import re
import textwrap
from typing import Any

import keras

from keras_preact import _checks, advice, schedules

DEFAULT_TASK = "vision"

_ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")


@dataclasses.dataclass(frozen=True)
class Reason:
    """The reason for a field of a `Recommendation`, in a sentence, and its source."""

    field: str
    sentence: str
    source: str


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """Settings to start with. `str()` returns them with their reasons.

    Args:
        depth, task, batch_size, parameters: Arguments of `recommend`.
        learning_rate: Rate after the warm-up, for SGD with momentum, at this batch size.
        learning_rate_range: Lowest and highest rate of the source, at this batch size.
        decay: `"steps"` or `"cosine"`.
        drops: Shares of the training after which steps divide the rate by 10.
        warmup_epochs: Middle of the range.
        warmup_epochs_range: Shortest and longest warm-up.
        warmup_iterations: Number of first iterations with a tenth of the rate, as in
            the paper; 0 if the warm-up is in epochs.
        arrangement, normalization, activation: Options of the units; the activation
            `"swiglu"` is a transformer's MLP.
        initializer: Key of `kp.advice.INITIALIZERS`.
        dropout: Rate of the dropout on the branches.
        dropout_range: Lowest and highest rate.
        dropout_at: Place of the dropout, see `ResidualUnit`.
        clip_norm: Largest norm of all gradients together; None for no clipping.
        reasons: Reasons for the fields.
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
        """Return arguments for a builder: for `kp.models.pre_ln_transformer` if the task
        is language, else for the residual networks.
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
        """Return arguments for `kp.optimizers.CoupledSGD` or any Keras optimiser, without
        the learning rate.
        """
        return {} if self.clip_norm is None else {"global_clipnorm": self.clip_norm}

    def schedule(
        self, steps_per_epoch: int, epochs: int
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """Return the learning-rate schedule for a training of this length.

        Raises:
            ValueError: if the warm-up does not fit into the training.
        """
        _checks.positive_int(steps_per_epoch, "steps_per_epoch")
        _checks.positive_int(epochs, "epochs")
        if epochs <= self.warmup_epochs:
            raise ValueError(
                f"The warm-up takes {self.warmup_epochs:g} epochs: `epochs` must be more. "
                f"Received: epochs={epochs}"
            )
        steps, rate = steps_per_epoch * epochs, self.learning_rate
        if self.decay == "cosine":
            warmup = round(self.warmup_epochs * steps_per_epoch)
            return schedules.cosine_schedule(rate, steps, warmup_steps=warmup)
        drops = [round(share * steps) for share in self.drops]
        # A short training has no room for all of the paper's 400 iterations.
        warmup = min(self.warmup_iterations, drops[0] // 2)
        return schedules.step_schedule(
            rate, drops, warmup_steps=warmup, warmup_learning_rate=rate / 10
        )

    def __str__(self) -> str:
        size = "" if self.parameters is None else f", {self.parameters:,} parameters"
        lines = [f"{self.depth} layers, {self.task}, batches of {self.batch_size}{size}"]
        defaults = []
        if self.task == DEFAULT_TASK:
            defaults.append(f"task={self.task!r} ('cifar' and 'imagenet' are the paper's recipes)")
        if self.batch_size == advice.BASE_BATCH_SIZE:
            defaults.append(f"batch_size={self.batch_size}")
        if defaults:
            lines.append(f"  Defaults: {', '.join(defaults)}")
        for reason in self.reasons:
            value = getattr(self, reason.field)
            shown = f"{value:g}" if isinstance(value, float) else value
            lines.append(f"  {reason.field}: {shown}")
            text = f"{reason.sentence} ({reason.source})"
            lines += textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="    ")
        if any("guide" in reason.source for reason in self.reasons):
            lines.append(f"The guide is {advice.GUIDE!r}: rules of thumb.")
        sources = " ".join(reason.source for reason in self.reasons)
        lines += [f"https://arxiv.org/abs/{n}" for n in sorted(set(_ARXIV.findall(sources)))]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A value of a field with its reason."""

    value: Any
    sentence: str
    source: str


def recommend(
    *,
    depth: int,
    task: str = DEFAULT_TASK,
    batch_size: int = advice.BASE_BATCH_SIZE,
    scaling: str = "sqrt",
    parameters: int | None = None,
) -> Recommendation:
    """Return settings to start with for a network of this depth, with reasons.

    Args:
        depth: Number of weight layers. A layer of a transformer has four.
        task: Key of `kp.advice.TASKS`: `"vision"`, `"mobile"`, `"language"` (a
            transformer), or `"cifar"` and `"imagenet"` for the paper's networks and
            training.
        batch_size: Number of examples per step; the learning rate grows with it.
        scaling: Growth of the rate with the batch: `"sqrt"`, as in the guide, or
            `"linear"`.
        parameters: Number of the network's parameters, which decides the dropout. None:
            no dropout.

    Returns:
        A `Recommendation`. Pass its `model_options()`, `optimizer_options()` and
        `schedule(...)` to the builder and the optimiser.

    Raises:
        ValueError: for numbers below 1, and for an unknown task or scaling.

    Example:

    >>> import keras_preact as kp
    >>> found = kp.recommend(depth=164, batch_size=1024)
    >>> found.learning_rate, found.decay, found.warmup_epochs_range
    (0.2, 'cosine', (5, 10))
    >>> model = kp.models.resnet_cifar(164, **found.model_options(), input_shape=(8, 8, 1))
    >>> schedule = found.schedule(steps_per_epoch=49, epochs=100)
    >>> optimizer = kp.optimizers.CoupledSGD(schedule, **found.optimizer_options())
    >>> print(kp.recommend(depth=20, task="cifar", batch_size=128).reasons[0].sentence)
    The paper's rate, for batches of 64 and 128.

    Source: `kp.advice.GUIDE`, Sec. 8.2 to 8.7; appendix of arXiv 1603.05027.
    """
    _checks.positive_int(depth, "depth")
    _checks.positive_int(batch_size, "batch_size")
    if parameters is not None:
        _checks.positive_int(parameters, "parameters")
    kind = _checks.lookup(advice.TASKS, task, "task")
    scale = _checks.lookup(advice.SCALINGS, scaling, "scaling")
    row = [row for row in advice.DEPTHS if row.start <= depth][-1]
    recipe = advice.RECIPES.get(task)
    if recipe is not None and depth > recipe.deepest:
        recipe = None
    known = (advice.BASE_BATCH_SIZE,) if recipe is None else recipe.batch_sizes
    factor = 1 if batch_size in known else scale(batch_size / known[-1])
    scaled = f", times {factor:g} for batches of {batch_size} ({scaling})" if factor != 1 else ""
    choices = {
        **(
            _training_by_guide(row, kind, factor, scaled)
            if recipe is None
            else _training_by_paper(recipe, factor, scaled)
        ),
        **_network(row, kind, batch_size, recipe),
        **_dropout(kind, parameters, recipe),
    }
    values: dict[str, Any] = {}
    reasons = []
    for field, choice in choices.items():
        values[field] = choice
        if isinstance(choice, _Choice):
            values[field] = choice.value
            reasons.append(Reason(field, choice.sentence, choice.source))
    return Recommendation(
        depth=depth,
        task=task,
        batch_size=batch_size,
        parameters=parameters,
        **values,
        reasons=tuple(reasons),
    )


def _middle(bounds: tuple[float, float]) -> float:
    return sum(bounds) / 2


def _training_by_guide(
    row: advice.DepthRow, kind: advice.Task, factor: float, scaled: str
) -> dict[str, Any]:
    source = "guide, Sec. 8.7"
    low, high = row.learning_rate
    rate = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    rate += f" at this depth and batches of {advice.BASE_BATCH_SIZE}{scaled}"
    if row.start >= 1000 and not kind.transformer:
        paper = advice.RECIPES["cifar"].learning_rate
        rate += f"; the paper trained its 1001 layers for CIFAR at {paper:g} (task='cifar')"
    if kind.transformer:
        rate += "; for SGD with momentum: adaptive optimisers need much less"
    decay = {"steps": "Steps below 50 layers.", "cosine": "A cosine from 50 layers on."}[row.decay]
    least, most = row.warmup_epochs
    warmup = "None is needed below 50 layers."
    if most:
        warmup = f"{least:g} to {most:g} epochs at this depth."
    clip = "Only extreme depth needs it."
    if row.clip_norm:
        clip = f"Extreme depth needs it; {row.clip_norm:g} is the largest healthy norm."
    return {
        "learning_rate": _Choice(_middle(row.learning_rate) * factor, f"{rate}.", source),
        "learning_rate_range": (low * factor, high * factor),
        "decay": _Choice(row.decay, decay, source),
        "drops": advice.RECIPES["cifar"].drops,
        "warmup_epochs": _Choice(_middle(row.warmup_epochs), warmup, source),
        "warmup_epochs_range": row.warmup_epochs,
        "warmup_iterations": 0,
        "clip_norm": _Choice(row.clip_norm, clip, "guide, Sec. 8.4 and 8.8"),
    }


def _training_by_paper(recipe: advice.Recipe, factor: float, scaled: str) -> dict[str, Any]:
    rate = recipe.learning_rate * factor
    sizes = " and ".join(map(str, recipe.batch_sizes))
    shares = " and ".join(f"{share:.0%}" for share in recipe.drops)
    decay = f"Divided by 10 after {shares} of the training, as in the paper at every depth."
    warmup = "The paper has none here."
    if recipe.warmup_iterations:
        warmup = f"The first {recipe.warmup_iterations} iterations have a tenth of the rate."
    return {
        "learning_rate": _Choice(
            rate, f"The paper's rate, for batches of {sizes}{scaled}.", recipe.source
        ),
        "learning_rate_range": (rate, rate),
        "decay": _Choice("steps", decay, recipe.source),
        "drops": recipe.drops,
        "warmup_epochs": 0.0,
        "warmup_epochs_range": (0.0, 0.0),
        "warmup_iterations": _Choice(recipe.warmup_iterations, warmup, recipe.source),
        "clip_norm": _Choice(None, "The paper has none.", recipe.source),
    }


def _network(
    row: advice.DepthRow, kind: advice.Task, batch_size: int, recipe: advice.Recipe | None
) -> dict[str, Any]:
    normalization = _Choice(kind.normalization, kind.normalization_reason, "guide, Sec. 8.2")
    small = kind.small_batch_normalization
    if batch_size < advice.SMALLEST_BATCH_FOR_STATISTICS and small != kind.normalization:
        normalization = _Choice(
            small,
            f"Batches below {advice.SMALLEST_BATCH_FOR_STATISTICS} give poor statistics; {small} "
            "normalisation needs none.",
            "guide, Sec. 8.2; arXiv 1803.08494",
        )
    if recipe is not None:
        because = "The paper's networks of every depth start with He's values."
        initializer = _Choice(kind.initializer, because, recipe.source)
    else:
        name = row.initializer or kind.initializer
        initializer = _Choice(name, row.initializer_reason, "guide, Sec. 8.4 and 8.5")
    is_papers = recipe is not None or kind.activation == "relu"
    return {
        "arrangement": _Choice(
            kind.arrangement,
            row.arrangement_reason,
            f"guide, Sec. 8.1 and 8.4; Table 2 of {advice.PAPER}",
        ),
        "normalization": normalization,
        "activation": _Choice(
            kind.activation,
            kind.activation_reason,
            advice.PAPER if is_papers else "guide, Sec. 8.3",
        ),
        "initializer": initializer,
    }


def _dropout(
    kind: advice.Task, parameters: int | None, recipe: advice.Recipe | None
) -> dict[str, Any]:
    bounds, source = (0.0, 0.0), "guide, Sec. 8.6"
    if recipe is not None:
        because, source = "The paper's recipe has none.", recipe.source
    elif parameters is None:
        because = "It depends on the number of parameters: give `parameters`."
    else:
        row = [row for row in advice.DROPOUTS if row.start <= parameters][-1]
        bounds = row.rate
        because = f"{bounds[0]:g} to {bounds[1]:g} for {parameters:,} parameters; {row.remark}."
    return {
        "dropout": _Choice(bounds[0], because, source),
        "dropout_range": bounds,
        "dropout_at": _Choice(
            "before_addition" if kind.transformer else "between_weights",
            "On the branch, never on the shortcut or after the addition.",
            "guide, Sec. 8.6",
        ),
    }
