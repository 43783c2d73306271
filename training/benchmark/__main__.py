"""The command line: `keras-preact benchmark COMMAND`."""

import dataclasses
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .. import cli

DESCRIPTION = """Measure networks side by side, each in a process of its own, in turn (A B C, A B C, ...).
Prints medians with least and most, and ratios to a baseline of the same round; --output writes every figure.
A network is a registered model with options of its builder, cifar_resnet164_preact:stacked=true,remat=3, or one
of another package: keras_applications_resnet50v2, keras_hub_resnet50v2, timm_resnetv2_50:channels_last=true."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A row of the table.

    Args:
        about: What the command measures, in one line.
        options: MODULE:NAME of this package: a dataclass of options, or a function
            whose parameters they are.
        run: MODULE of this package whose `run` takes the dataclass; empty for a
            function.
    """

    about: str
    options: str
    run: str = "comparison"


#: Name to command, in the order of the help text.
COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "step": Command("Time of a train step or of inference.", "options:Step"),
        "compile": Command("Time to build and compile a network.", "options:Compile"),
        "memory": Command(
            "Memory of a train step, with and without rematerialisation.", "options:Memory"
        ),
        "optimizer": Command("Time of the optimiser's update.", "options:Optimizer"),
        "health": Command("Cost of kp.TrainingHealth.", "options:Health"),
        "checkpoint": Command("Cost of a checkpoint.", "options:CheckpointCost"),
        "very-deep": Command(
            "Train 10,001 layers, or 10,000 without shortcuts, for some steps.", "very_deep:run", ""
        ),
        "distribution": Command(
            "Two virtual devices of a CPU against one.", "distribution:Distribution", "distribution"
        ),
        "input": Command(
            "Images per second of the CIFAR input, beside plain tf.data.", "input:Input", "input"
        ),
        "import": Command(
            "Time of `import keras_preact`, beside `import keras`.", "imports:Import", "imports"
        ),
        "serving": Command(
            "Exported networks in a loop and behind the server, under load.",
            "serving.suite:Options",
            "serving.suite",
        ),
    }
)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments and measure."""
    argv, verbose = cli.split_verbose(sys.argv[1:] if argv is None else argv)
    cli.guard(lambda: _start(argv), verbose)


def _start(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(
            cli.listing(
                "benchmark", DESCRIPTION, {name: row.about for name, row in COMMANDS.items()}
            )
        )
        return
    command = cli.lookup(COMMANDS, argv[0], "command of benchmark")
    module, _, kind = command.options.partition(":")
    options = cli.parse(f"benchmark {argv[0]}", getattr(_module(module), kind), argv[1:])
    if command.run:
        _module(command.run).run(options)


def _module(name: str):
    return importlib.import_module(f".{name}", __package__)


if __name__ == "__main__":
    main()
