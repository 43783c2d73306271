"""Modules of a person, which options name as MODULE:FUNCTION."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest


def forget(*names: str) -> None:
    """Forget modules whose names begin so, and what they registered with Keras, as a new
    process does.
    """
    for name in [name for name in sys.modules if name.startswith(names)]:
        del sys.modules[name]
    registered = keras.saving.get_custom_objects()
    for name in [name for name in registered if name.startswith("mine>")]:
        del registered[name]


@contextlib.contextmanager
def working_in(folder: Path, **modules: str) -> Iterator[Path]:
    """Write modules to a folder, code by name, and make it the working directory. The
    modules are unknown before and after.
    """
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    forget(*modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])  # commands add the folder to it
        yield folder
    forget(*modules)
