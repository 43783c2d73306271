"""Options of the benchmarks that start a process for each candidate."""

import dataclasses
from pathlib import Path
from typing import Literal

from ..cli import UserError

Variant = Literal["default", "stacked", "unrolled", "loop"]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Options of every benchmark of networks."""

    models: tuple[str, ...] = ("cifar_resnet164_preact",)
    """Networks: NAME or NAME:option=value,... with options of the builder."""
    backends: tuple[Literal["tensorflow", "jax", "torch"], ...] = ("tensorflow",)
    """Keras backends. A network runs on each that supports it."""
    variants: tuple[Variant, ...] = ("default",)
    """Measure registered models as stacks, single units (unrolled), stacks in a Python loop, or as the library chooses."""
    baseline: str | None = None
    """Divide by this candidate: BACKEND/NAME, or NAME on each backend. If not given: the first one of each backend."""
    rounds: int = 3
    """Number of rounds. Every candidate is measured once per round."""
    steps: int = 10
    """Timed steps per round."""
    warmup: int = 3
    """Steps before the timed ones, including the first, which compiles. Not for compile and memory."""
    batch: int = 16
    """Images per step."""
    image_size: int | None = None
    """Height and width of the images. If not given: the network's own."""
    dtype: Literal["float32", "mixed_bfloat16"] = "float32"
    """Keras dtype policy. timm's networks use torch's autocast."""
    jit_compile: Literal["auto", "on", "off"] = "auto"
    """Compile the step. auto: Keras' choice, but no XLA for TensorFlow on a CPU and no torch.compile for timm."""
    limit: float = 300
    """Stop a measurement after this many seconds and leave its candidate out of later rounds."""
    output: Path | None = None
    """Write settings, versions and every figure to this JSON file."""

    def variants_options(self) -> list[dict]:
        from .candidates import VARIANTS

        return [dict(VARIANTS[name]) for name in self.variants]


@dataclasses.dataclass(frozen=True)
class Compile(Benchmark):
    """Time to build a network, to its first train step, and to compile it."""

    batch: int = 2
    """Images per step. Few, because a first step also does more than compile, and that grows with the batch."""
    variants: tuple[Variant, ...] = ("stacked", "unrolled")
    """Measure registered models as stacks, single units (unrolled), stacks in a Python loop, or as the library chooses."""


@dataclasses.dataclass(frozen=True)
class Step(Benchmark):
    """Time of a train step, or of inference, and images per second."""

    mode: Literal["train", "inference"] = "train"
    """What a step does."""


@dataclasses.dataclass(frozen=True)
class Memory(Benchmark):
    """Memory of a train step, with and without rematerialisation."""

    variants: tuple[Variant, ...] = ("stacked",)
    """Only stacks rematerialise."""
    remat: tuple[str, ...] = ("false", "true")
    """Rematerialisation: false, true or a number of units, each measured."""
    steps: int = 2
    """Steps during which the peak is measured."""

    def variants_options(self) -> list[dict]:
        for value in self.remat:
            if value not in ("true", "false") and not (value.isdecimal() and int(value)):
                raise UserError(
                    f"--remat takes false, true or a number of units. Received: {value}"
                )
        words: dict[str, bool | int] = {"true": True, "false": False}
        remats = [words[value] if value in words else int(value) for value in self.remat]
        return [
            variant | {"remat": remat} for variant in super().variants_options() for remat in remats
        ]


@dataclasses.dataclass(frozen=True)
class Optimizer(Benchmark):
    """Time of the optimiser's update alone, for stacks and for single units."""

    variants: tuple[Variant, ...] = ("stacked", "unrolled")
    """Measure registered models as stacks, single units (unrolled), stacks in a Python loop, or as the library chooses."""


@dataclasses.dataclass(frozen=True)
class Health(Benchmark):
    """Time of a step in model.fit, with and without kp.TrainingHealth."""

    steps: int = 200
    """Timed steps per round, without the callback and with it."""
    limit: float = 3600
    """Stop a measurement after this many seconds and leave its candidate out of later rounds."""
    warmup: int = 100
    """Steps before the timed ones: one interval, so that the first record, which compiles, is not timed."""
    interval: int = 100
    """Steps between two records."""


@dataclasses.dataclass(frozen=True)
class CheckpointCost(Benchmark):
    """Time to write a checkpoint of a run and to restore it."""

    steps: int = 5
    """How often each is done per round."""
