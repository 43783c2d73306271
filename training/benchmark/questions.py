"""The questions: the options and the figures of each, and how a process measures them."""

import dataclasses
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from .report import Column

if TYPE_CHECKING:
    from .subjects import Subject

#: The network that is measured if none is named.
MODEL = "cifar_resnet164_preact"

_MIB = 1 / 2**20
_STEP = Column("step_seconds", "step ms", 1e3, 1)


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about networks, with the options that all questions share."""

    models: tuple[str, ...] = (MODEL,)
    """Networks, each as NAME or NAME:option=value,... with options of its builder."""
    backends: tuple[Literal["tensorflow", "jax", "torch"], ...] = ("tensorflow",)
    """Keras backends. A network runs on each that supports it."""
    baseline: str | None = None
    """Candidate to divide by: BACKEND/NAME, or NAME on each backend. If not given: the first
    one."""
    rounds: int = 3
    """Number of rounds. Every candidate is measured once per round."""
    steps: int = 10
    """Timed steps per round."""
    warmup: int = 3
    """Steps before the timed ones. The first one compiles. compile and memory have none."""
    batch: Annotated[int, tyro.conf.arg(aliases=["--batch-size"])] = 16
    """Images per step."""
    image_size: int | None = None
    """Height and width of the images. If not given: the network's own."""
    dtype: Annotated[Literal["float32", "mixed_bfloat16"], tyro.conf.arg(name="precision")] = (
        "float32"
    )
    """Precision of networks without an option dtype of their own. torch modules use autocast."""
    jit_compile: Literal["auto", "on", "off"] = "auto"
    """Compile the step. auto: as Keras does, but off for TensorFlow on a CPU and for torch
    modules."""
    limit: float = 300
    """Stop a measurement after this many seconds and drop its candidate."""
    output: Path | None = None
    """Write settings, versions and every figure to this JSON file."""

    @property
    def stays(self) -> bool:
        """Whether a network's process stays for all rounds."""
        return False

    #: Name of the command.
    command: ClassVar[str]
    #: What the figures are, for the text above the table.
    about: ClassVar[str]
    #: Columns of the table. It shows the ratio to the baseline for the first one.
    columns: ClassVar[Sequence[Column]]

    def measure(self, subject: "Subject") -> dict:
        """Return the figures of one network, in its own process: numbers, and the lists
        that they are computed from.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Step(Question):
    """Time of a train step, or of inference, and images per second."""

    mode: Literal["train", "inference"] = "train"
    """Time a train step, or inference."""
    resident: bool = False
    """Keep one process per network for all rounds. They start together and compile once, and take
    turns as before. This needs memory for all networks."""

    @property
    def stays(self) -> bool:
        return self.resident

    command: ClassVar = "step"
    about: ClassVar = "step = median of the timed steps, on a batch that is already on the device."
    columns: ClassVar = (_STEP, Column("images_per_second", "images/s", digits=1))

    def measure(self, subject: "Subject") -> dict:
        from .subjects import seconds_of

        step = subject.train_step if self.mode == "train" else subject.inference_step
        steps = seconds_of(step, self.warmup, self.steps)
        seconds = statistics.median(steps)
        return {
            "step_seconds": seconds,
            "images_per_second": self.batch / seconds,
            "all_steps": steps,
        }


@dataclasses.dataclass(frozen=True)
class Compile(Question):
    """Time to build a network, to its first train step, and to compile it."""

    batch: Annotated[int, tyro.conf.arg(aliases=["--batch-size"])] = 2
    """Images per step: few, because the first step computes as well as compiles."""
    models: tuple[str, ...] = (f"{MODEL}:stacked=true", f"{MODEL}:stacked=false")
    """Networks, each as NAME or NAME:option=value,..., such as stacked=true,execution=loop."""

    command: ClassVar = "compile"
    about: ClassVar = (
        "compile = first train step, which traces and compiles, minus the median of the later "
        "steps."
    )
    columns: ClassVar = (
        Column("compile_seconds", "compile s"),
        Column("build_seconds", "build s"),
        Column("first_step_seconds", "first step s"),
        _STEP,
    )

    def measure(self, subject: "Subject") -> dict:
        from .subjects import seconds_of

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
            # torch.compile would reuse what an earlier round has compiled
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
            first, *steps = seconds_of(subject.train_step, 0, 1 + self.steps)
        step = statistics.median(steps)
        return {
            "first_step_seconds": first,
            "step_seconds": step,
            "compile_seconds": first - step,
            "all_steps": steps,
        }


@dataclasses.dataclass(frozen=True)
class Memory(Question):
    """Memory of a train step, with and without rematerialisation."""

    models: tuple[str, ...] = (f"{MODEL}:stacked=true", f"{MODEL}:stacked=true,remat=true")
    """Networks. NAME:stacked=true,remat=N recomputes N units together; only stacks can."""
    steps: int = 2
    """Steps during which the peak is measured."""

    command: ClassVar = "memory"
    about: ClassVar = (
        "XLA = temporary memory of the compiled step (loss, gradients, new state), by XLA's own "
        "analysis, on JAX. RSS increase = peak of the process's resident memory in its first "
        "steps, minus what was resident before. It includes tracing and compiling, except on "
        "JAX, where they come before."
    )
    columns: ClassVar = (
        Column("xla_temporary_bytes", "XLA MiB", _MIB, 1),
        Column("resident_increase_bytes", "RSS increase MiB", _MIB, 1),
        Column("peak_resident_bytes", "peak RSS MiB", _MIB, 1),
        Column("device_peak_bytes", "GPU peak MiB", _MIB, 1),
    )

    def measure(self, subject: "Subject") -> dict:
        from . import memory_use

        return memory_use.measure(subject, self.steps)


#: Name of a command to its question.
QUESTIONS: Mapping[str, type[Question]] = {
    question.command: question for question in (Step, Compile, Memory)
}
