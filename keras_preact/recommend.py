"""kp.recommend: settings to start with for a network of a given depth, with reasons.

What the paper says about its own networks comes first, then what this package measured, then
other papers. A reason without a source is a rule of thumb.
"""

import dataclasses
import textwrap
from typing import Any, NamedTuple

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_preact import _checks, initializers, schedules

#: Depth of the paper's deepest network.
DEEPEST = 1202
#: Learning rate of the paper, for SGD with momentum at every depth, and its other options.
RATE = 0.1
_OPTIMIZER = {"momentum": 0.9, "coupled_weight_decay": 1e-4}


class _Training(NamedTuple):
    """How a network is trained.

    `batch_sizes` are the batch sizes for the rate `RATE`. For other sizes it is scaled from
    the last one. `drops` are the shares of the training after which the rate is divided by
    10; without them it falls along half a cosine, after a warm-up of `warmup_epochs`.
    """

    source: str
    batch_sizes: tuple[int, ...] = (256,)
    drops: tuple[float, ...] = ()
    warmup_iterations: int = 0
    warmup_epochs: float = 0


_PAPER = "appendix of arXiv 1603.05027"
_STEPS = _Training(_PAPER, drops=(1 / 2, 3 / 4))
#: From `_DEEP` weight layers on.
_COSINE = _Training(
    "warm-up: Sec. 2.2 of arXiv 1706.02677, cosine: Eq. 5 of arXiv 1608.03983", warmup_epochs=5
)
_DEEP = 50
#: Task to the depth of the paper's deepest network for it, and how the paper trained them all.
_RECIPES = {
    "cifar": (DEEPEST, _STEPS._replace(batch_sizes=(64, 128), warmup_iterations=400)),
    "imagenet": (200, _STEPS._replace(drops=(1 / 3, 2 / 3))),
}
#: First depth to the reason for full pre-activation.
_ARRANGEMENT_REASONS = {
    1: "At 20 and 32 layers the original units were as good here (results/README.md); the paper "
    "compares deeper networks.",
    110: "The best arrangement of the paper (Table 2). The gain over the original units grows with "
    "the depth: from 6.61 to 6.37 % error at 110 layers, from 7.61 to 4.92 % at 1,001 (Table 3).",
}
_PRE_NORM_REASON = "It trains without a long warm-up; post-norm needs one (arXiv 2002.04745)."
_RATE_REASON = (
    "The paper trains every depth at this rate, up to 1,202 layers. Of eight rates on digits, 0.2 "
    "was the best at 20 and 218 layers here, and 0.1 at 56, 110 and 506 (results/README.md). Rules "
    "of thumb start deep networks lower, at 0.01 to 0.05 from 200 layers on and at 0.001 from "
    "1,000 on: try that if the loss rises."
)
_HE_REASON = "The paper's networks of every depth start with He's values (appendix)."
_GLOROT_REASON = "The values of the transformers in arXiv 2002.04745."
_SCALED_REASON = (
    "No paper has residual networks of this depth. Here, 10,001 layers trained with these values, "
    "which keep gradients at both ends alike (results/README.md)."
)
_NORMALIZATION_REASONS = {
    "batch": "The paper's.",
    "layer": "Batches below 16 give poor statistics (Fig. 1 of arXiv 1803.08494). Compare with "
    "batch normalisation: on digits, it had lower errors here with batches of 4 "
    "(results/README.md).",
    "rms": "It needs no mean and no batch (arXiv 1910.07467).",
}
_RELU = "relu", "The paper's."
#: Task to the activation of its units and the reason; `"swiglu"` is the MLP of a transformer.
_ACTIVATIONS = {
    "vision": _RELU,
    "mobile": ("hard_silu", "A fast approximation, for small devices (arXiv 1905.02244)."),
    "language": ("swiglu", "Better than other activations in language models (arXiv 2002.05202)."),
    "cifar": _RELU,
    "imagenet": _RELU,
}
#: Smallest number of parameters, range of the dropout and the reason.
_DROPOUTS = (
    (0, (0.0, 0.0), "the paper's recipes have none; elsewhere, give `parameters`"),
    (1, (0.1, 0.2), "a rule of thumb for small networks"),
    (100_000_000, (0.0, 0.1), "a rule of thumb: reduce it to 0 early"),
    (1_000_000_000, (0.0, 0.0), "a rule of thumb: large networks need more data instead"),
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
        model_options: Arguments for a builder: for `kp.models.transformer` if
            the task is language, else for the residual networks.
        optimizer_options: Arguments for `kp.optimizers.CoupledSGD`, without the learning
            rate.
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
        return "\n".join(lines)


def recommend(
    *, depth: int, task: str = "vision", batch_size: int = 256, parameters: int | None = None
) -> Recommendation:
    """Return settings to start with for a network of this depth, with reasons.

    Args:
        depth: Number of weight layers. A layer of a transformer has four.
        task: `"vision"`, `"mobile"`, `"language"` (a transformer), or `"cifar"` and
            `"imagenet"` for the paper's networks and training.
        batch_size: Number of examples per step. The learning rate grows with its square
            root (Sec. 5 of arXiv 1404.5997).
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
    (0.2, 5, 'batch')
    >>> model = kp.models.resnet_cifar(164, **setup.model_options, input_shape=(8, 8, 1))
    >>> schedule = setup.schedule(steps_per_epoch=49, epochs=100)
    >>> optimizer = kp.optimizers.CoupledSGD(schedule, **setup.optimizer_options)
    >>> print(kp.recommend(depth=1001).reasons["kernel_initializer"])
    The paper's networks of every depth start with He's values (appendix).

    Source: Tables 2 and 3 and the appendix of arXiv 1603.05027; others are in the reasons.
    """
    _checks.positive_int(depth, "depth")
    _checks.positive_int(batch_size, "batch_size")
    if parameters is not None:
        _checks.positive_int(parameters, "parameters")
    activation, activation_reason = _checks.lookup(_ACTIVATIONS, task, "task")
    is_transformer = task == "language"
    deepest, recipe = _RECIPES.get(task, (0, _STEPS))
    is_papers = depth <= deepest
    training = recipe if is_papers else _STEPS if depth < _DEEP else _COSINE
    known = training.batch_sizes
    factor = 1.0 if batch_size in known else (batch_size / known[-1]) ** 0.5
    normalization = "rms" if is_transformer else "layer" if batch_size < 16 else "batch"
    initializer, initializer_reason = _initializer(depth, is_transformer)
    count = 0 if is_papers else (parameters or 0)
    _, dropouts, dropout_reason = [row for row in _DROPOUTS if row[0] <= count][-1]
    model = {
        "arrangement": "pre_norm" if is_transformer else "full_preactivation",
        "normalization": normalization,
        "mlp" if is_transformer else "activation": activation,
        "kernel_initializer": initializer,
        "dropout": dropouts[0],
    }
    if not is_transformer:
        model["dropout_at"] = "between_weights"
    arrangement_reason = [
        _ARRANGEMENT_REASONS[row] for row in _ARRANGEMENT_REASONS if row <= depth
    ][-1]
    return Recommendation(
        learning_rate=RATE * factor,
        drops=training.drops,
        warmup_epochs=training.warmup_epochs,
        warmup_iterations=training.warmup_iterations,
        model_options=model,
        optimizer_options=dict(_OPTIMIZER),
        reasons=_training_reasons(training, factor)
        | {
            "arrangement": _PRE_NORM_REASON if is_transformer else arrangement_reason,
            "normalization": _NORMALIZATION_REASONS[normalization],
            "mlp" if is_transformer else "activation": activation_reason,
            "kernel_initializer": initializer_reason,
            "dropout": f"{_range(*dropouts)}: {dropout_reason}.",
        }
        | dict.fromkeys(_OPTIMIZER, f"The paper's ({_PAPER})."),
    )


def _initializer(depth: int, is_transformer: bool) -> tuple[keras.initializers.Initializer, str]:
    """Return an initialiser of the kernels, and the reason."""
    if depth > DEEPEST:
        return initializers.DepthScaledHe(), _SCALED_REASON
    if is_transformer:
        return keras.initializers.GlorotNormal(), _GLOROT_REASON
    return initializers.released_he(), _HE_REASON


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _training_reasons(training: _Training, factor: float) -> dict[str, str]:
    source = f"({training.source})"
    sizes = " and ".join(map(str, training.batch_sizes))
    rate = f"{RATE:g} for batches of {sizes}, times {factor:g} for this size ({_PAPER}). "
    rate += f"{_RATE_REASON} It is for SGD with momentum: adaptive optimisers need much less."
    if not training.drops:
        warmup = f"{training.warmup_epochs:g} epochs, then half a cosine {source}."
        return {"learning_rate": rate, "warmup_epochs": warmup}
    drops = f"After these shares of the training the rate is divided by 10 {source}."
    warmup = f"The first iterations have a tenth of the rate {source}."
    return {"learning_rate": rate, "drops": drops, "warmup_iterations": warmup}
