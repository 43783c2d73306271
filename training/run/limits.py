"""The numbers that options of a run take, as a table. They are checked before anything is
opened or written.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UserError


@dataclasses.dataclass(frozen=True)
class Limit:
    """The values that an option takes.

    Args:
        words: The values in words, after "must be".
        holds: Whether a value is one of them. It is false for NaN.
    """

    words: str
    holds: Callable[[Any], bool]


def _finite(low: float) -> Callable[[float], bool]:
    return lambda value: low <= value < math.inf


NUMBER = Limit("a finite number", math.isfinite)
POSITIVE = Limit("positive", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Limit("0 or more", _finite(0))
AT_LEAST_1 = Limit("at least 1", _finite(1))
SHARE = Limit("a share: 0 or more, and below 1", lambda value: 0 <= value < 1)
PIXELS = Limit("numbers from 0 to 255", lambda values: all(0 <= each <= 255 for each in values))
POSITIVES = Limit("positive numbers", lambda values: all(0 < each < math.inf for each in values))

#: Values by the option's name, without its dashes. Options that are not given are not checked.
LIMITS: Mapping[str, Limit] = {
    "model.mean": PIXELS,
    "model.std": POSITIVES,
    "model.scales": Limit("finite numbers", lambda values: all(map(math.isfinite, values))),
    "model.gate-bias": NUMBER,
    "model.width-factor": POSITIVE,
    "model.dropout": SHARE,
    "model.stochastic-depth": SHARE,
    "model.squeeze-excitation": AT_LEAST_1,
    "model.remat": AT_LEAST_1,
    "data.size": AT_LEAST_1,
    "data.border": AT_LEAST_1,
    "data.rand-augment": Limit(
        "a number of operations, at least 1, and a magnitude from 0 to 30",
        lambda pair: pair[0] >= 1 and 0 <= pair[1] <= 30,
    ),
    "data.mixup": Limit("the alpha of a Beta distribution, positive, or 0 for none", _finite(0)),
    "data.cutmix": Limit("the alpha of a Beta distribution, positive, or 0 for none", _finite(0)),
    "data.holdout": Limit(
        "0, a share below 1, or a whole number of images",
        lambda value: 0 <= value < 1 or (1 <= value < math.inf and value == int(value)),
    ),
    "data.test": SHARE,
    "optimizer.learning-rate": POSITIVE,
    "optimizer.momentum": SHARE,
    "optimizer.weight-decay": NOT_NEGATIVE,
    "optimizer.adam-ratio": POSITIVE,
    "optimizer.reference-batch-size": AT_LEAST_1,
    "optimizer.layer-decay": Limit("above 0, and at most 1", lambda value: 0 < value <= 1),
    "optimizer.clip-norm": POSITIVE,
    "optimizer.ema": SHARE,
    "optimizer.label-smoothing": SHARE,
    "schedule.drops": Limit(
        "positive numbers that rise",
        lambda values: (
            POSITIVES.holds(values)
            and all(early < late for early, late in itertools.pairwise(values))
        ),
    ),
    "schedule.factor": POSITIVE,
    "schedule.warmup": NOT_NEGATIVE,
    "schedule.stable": NOT_NEGATIVE,
    "schedule.cycles": AT_LEAST_1,
    "schedule.warmup-learning-rate": NOT_NEGATIVE,
    "schedule.length": POSITIVE,
    "checkpoint.minutes": Limit("0 or more", lambda value: value >= 0),
    "checkpoint.every": Limit("0, to save by time, or more", _finite(0)),
    "checkpoint.keep": Limit("at least 1, to resume from", _finite(1)),
    "batch-size": AT_LEAST_1,
    "steps-per-epoch": NOT_NEGATIVE,
    "accumulate": AT_LEAST_1,
    "seed": Limit("from 0 to 4294967295", lambda value: 0 <= value < 2**32),
    "steps-per-execution": AT_LEAST_1,
    "health": NOT_NEGATIVE,
    "profile": Limit(
        "two iterations in order, counted from 1", lambda pair: 1 <= pair[0] <= pair[1]
    ),
}


def check(config: Any, prefix: str = "") -> None:
    """Check the numbers of a configuration in the order of its fields.

    Raises:
        UserError: for the first one that is out of its limits.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            check(value, f"{name}.")
        elif name in LIMITS and value is not None:
            check_one(name, value)


def check_one(name: str, value: Any) -> None:
    """Check the value of the option `name`, without its dashes.

    Raises:
        UserError: for a value that is out of its limits.
    """
    if not LIMITS[name].holds(value):
        received = " ".join(map(str, value)) if isinstance(value, tuple) else value
        raise UserError(f"--{name} must be {LIMITS[name].words}. Received: {received}")
