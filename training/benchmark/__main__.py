"""The command line: `keras-preact benchmark COMMAND`."""

import contextlib
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from .. import cli
from . import exports, input, serve, very_deep
from .questions import QUESTIONS, Question

DESCRIPTION = """Measure networks side by side, each in its own process, in turn (A B A B ...).
Prints medians with the least and the largest value, and ratios to a baseline in the same
round; --output writes every figure. A network is a registered model with options of its
builder, such as cifar_resnet164_preact:stacked=true,remat=3, or one of another package:
keras_applications_resnet50v2, keras_hub_resnet50v2, timm_resnetv2_50:channels_last=true,
torch_resnet_cifar20 (also 56 and 110, in plain PyTorch). Each takes dtype=mixed_bfloat16 and
compile=true."""

#: Name of a command to its question, which holds the options, or to a function that measures.
COMMANDS: Mapping[str, Callable[..., Question | None]] = {
    **QUESTIONS,
    "exports": exports.run,
    "input": input.run,
    "serve": serve.run,
    "very-deep": very_deep.run,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments and measure."""
    lines = {
        name: (inspect.getdoc(command) or "").partition("\n")[0]
        for name, command in COMMANDS.items()
    }
    cli.choose("benchmark", DESCRIPTION, lines, _start, argv)


def _start(command: str, argv: Sequence[str]) -> None:
    question = cli.parse(f"benchmark {command}", COMMANDS[command], argv)
    if question is not None:
        from . import comparison  # imports Keras, which is too slow for a help text

        with _exit_on_sigterm():
            comparison.run(question)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that the measured processes stop as well."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
