"""Fewer processes for what exports start a process each for: one with Keras on TensorFlow,
or none.

`python one_process.py` runs a module's main for each line of stdin, `[MODULE,
*ARGUMENTS]` as JSON, and answers with a line.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from keras_preact.export import _replay


def in_this_process(
    path: Path, batches: dict[str, np.ndarray], folder: Path, runtime: str = "saved_model"
) -> dict[str, np.ndarray]:
    """A stand-in for `_check.replay`: starts no process."""
    serve = _replay.RUNTIMES[runtime](str(path))
    return {
        f"{name}/{key}": value
        for name, images in batches.items()
        for key, value in serve(images).items()
    }


@contextlib.contextmanager
def started() -> Iterator[Callable]:
    """Give a stand-in for `_children.run` that has one process run the modules of all
    calls.
    """
    environment = os.environ | {
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, __file__], env=environment, text=True, **pipes
    ) as process:

        def run(arguments: Sequence[str], *_) -> None:
            option, module, *job = arguments
            if option == "-P":  # a script of the package
                module = f"keras_preact.export.{Path(module).stem}"
            print(json.dumps([module, *job]), file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"

        yield run


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # converters print to stdout
    for line in sys.stdin:
        module, *arguments = json.loads(line)
        importlib.import_module(module).main(*arguments)
        print("done", file=answers, flush=True)
