"""What was measured for a claim, and the verdict that follows."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

#: not clear: measured, but with too few runs to decide. unmeasured: not measured here.
Verdict = Literal["true", "true if", "false", "not clear", "unmeasured"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of a measurement.

    Args:
        verdict: The verdict.
        text: The measured numbers in a sentence or two.
        condition: For `"true if"`: the rest of the sentence "This is true if ...".
        numbers: The numbers by name.
    """

    verdict: Verdict
    text: str
    condition: str = ""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Unmeasured(LookupError):
    """A measurement that a claim needs is missing. The message is the text of the finding."""


def decided(holds: bool, text: str, **numbers: Any) -> Finding:
    """Return the finding of a claim that holds or does not hold."""
    return Finding("true" if holds else "false", text, numbers=numbers)


def conditional(
    condition: str, holds_there: bool, holds_elsewhere: bool, text: str, **numbers: Any
) -> Finding:
    """Return the finding of a claim that was measured with and without a condition."""
    if holds_there and not holds_elsewhere:
        return Finding("true if", text, condition, numbers)
    return decided(holds_there, text, **numbers)
