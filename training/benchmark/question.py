"""What the questions about networks have in common: their options, and what each of them
must say.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from .report import Column

if TYPE_CHECKING:
    from .subjects import Subject

Variant = Literal["default", "stacked", "unrolled", "loop"]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A question about networks, with the options that all questions share."""

    models: tuple[str, ...] = ("cifar_resnet164_preact",)
    """Networks: NAME or NAME:option=value,... with options of the builder."""
    backends: tuple[Literal["tensorflow", "jax", "torch"], ...] = ("tensorflow",)
    """Keras backends. A network runs on each that supports it."""
    variants: tuple[Variant, ...] = ("default",)
    """Registered models as stacks, single units, stacks in a Python loop, or default."""
    baseline: str | None = None
    """Divide by this candidate: BACKEND/NAME, or NAME on each backend. Default: the first one."""
    rounds: int = 3
    """Number of rounds. Every candidate is measured once per round."""
    steps: int = 10
    """Timed steps per round."""
    warmup: int = 3
    """Steps before the timed ones. The first compiles. Not for compile and memory."""
    batch: int = 16
    """Images per step."""
    image_size: int | None = None
    """Height and width of the images. If not given: the network's own."""
    dtype: Literal["float32", "mixed_bfloat16"] = "float32"
    """Keras dtype policy, if a network's option dtype is not given. Torch modules: autocast."""
    jit_compile: Literal["auto", "on", "off"] = "auto"
    """Compile the step. auto: as Keras, but not TensorFlow's on a CPU, nor torch modules."""
    limit: float = 300
    """Stop a measurement after this many seconds and drop its candidate."""
    output: Path | None = None
    """Write settings, versions and every figure to this JSON file."""

    #: Name of the command.
    command: ClassVar[str]
    #: What the figures are, for the head of the table.
    about: ClassVar[str]
    #: The first column is the one whose ratio to the baseline is shown.
    columns: ClassVar[Sequence[Column]]

    def measure(self, subject: "Subject") -> dict:
        """Return figures of one network, in the process of a child: numbers, and lists
        of those that they come from.
        """
        raise NotImplementedError

    def variants_options(self) -> list[dict]:
        from . import candidates

        return [dict(candidates.VARIANTS[name]) for name in self.variants]
