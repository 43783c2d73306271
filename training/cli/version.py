"""What `keras-preact --version` prints: what a report of a bug should name."""

import platform
from collections.abc import Iterator
from importlib import metadata

from .. import backends
from ..errors import PROGRAM


def lines(verbose: bool) -> Iterator[str]:
    """Yield the versions of this package, Python, Keras, NumPy and the installed backends.

    With `verbose`, the last line is the backend and its device, or why it cannot be
    imported. The import takes seconds.
    """
    yield f"{PROGRAM} {metadata.version('keras-preact')}"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    found = backends.versions("keras", "numpy", "tensorflow", "jax", "torch")
    yield ", ".join(f"{name} {found[name]}" for name in found if name != "python")
    if not verbose:
        return
    try:
        import keras

        yield f"backend {keras.backend.backend()}, device {backends.device()}, {backends.cpu()}"
    except Exception as error:  # of a broken installation
        yield f"the backend cannot be imported: {type(error).__name__}: {error}"
