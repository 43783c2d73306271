"""The command line: `keras-preact benchmark COMMAND`."""

import contextlib
import dataclasses
import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

from .. import cli

DESCRIPTION = """Measure networks side by side, each in a process of its own, in turn (A B C, ...).
Prints medians with the least and the largest value, and ratios to a baseline of the same
round; --output writes every figure. A network is a registered model with options of its
builder, cifar_resnet164_preact:stacked=true,remat=3, or one of another package:
keras_applications_resnet50v2, keras_hub_resnet50v2, timm_resnetv2_50:channels_last=true,
torch_resnet_cifar20 (also 56 and 110, in plain PyTorch). Each takes dtype=mixed_bfloat16."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A row of the table.

    Args:
        about: What the command measures, in one line.
        options: MODULE:NAME of this package: a dataclass of options, or a function
            whose parameters they are.
        run: Module of this package whose `run` takes the dataclass; empty for a
            function.
    """

    about: str
    options: str
    run: str = "comparison"


#: Name of a command to its row, in the order of the help text.
COMMANDS: Mapping[str, Question] = {
    "step": Question("Time of a train step or of inference.", "step_time:Step"),
    "compile": Question("Time to build and compile a network.", "compile_time:Compile"),
    "memory": Question(
        "Memory of a train step, with and without rematerialisation.", "memory_use:Memory"
    ),
    "optimizer": Question("Time of the optimiser's update.", "update_time:Optimizer"),
    "health": Question("Cost of kp.TrainingHealth.", "health_cost:Health"),
    "checkpoint": Question("Cost of a checkpoint.", "checkpoint_cost:CheckpointCost"),
    "very-deep": Question(
        "Train 10,001 layers, or 10,000 without shortcuts, for some steps.", "very_deep:run", ""
    ),
    "distribution": Question(
        "Two virtual devices of a CPU against one.", "two_devices:TwoDevices", "two_devices"
    ),
    "processes": Question(
        "Two processes with one core each against one with both.",
        "two_processes:TwoProcesses",
        "two_processes",
    ),
    "input": Question(
        "Images per second of the CIFAR input, beside plain tf.data.",
        "input_rate:Input",
        "input_rate",
    ),
    "import": Question(
        "Time of `import keras_preact`, beside `import keras`.",
        "import_time:Import",
        "import_time",
    ),
    "serving": Question(
        "Exported networks in a loop and behind the server, under load.",
        "serving.workload:Options",
        "serving.suite",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments and measure."""
    argv, verbose = cli.split_verbose(sys.argv[1:] if argv is None else argv)
    cli.guard(lambda: _start(argv), verbose)


def _start(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        about = {name: row.about for name, row in COMMANDS.items()}
        print(cli.listing("benchmark", DESCRIPTION, about))
        return
    question = cli.lookup(COMMANDS, argv[0], "command of benchmark")
    module, _, kind = question.options.partition(":")
    options = cli.parse(f"benchmark {argv[0]}", getattr(_module(module), kind), argv[1:])
    if question.run:
        with _ended_by_sigterm():
            _module(question.run).run(options)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise SystemExit, which ends the processes that are measured as well."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _module(name: str):
    return importlib.import_module(f".{name}", __package__)


if __name__ == "__main__":
    main()
