"""Packages that only some functions need."""

import importlib
from types import ModuleType


def load(module: str) -> ModuleType:
    """Return a module of a package that may be missing, such as SciPy or matplotlib.

    Raises:
        ImportError: if the package is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"This needs {module.split('.')[0]}: pip install 'keras-preact[training]'."
        ) from error
