"""Import modules of the library that need no Keras without it."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def networks_left_out() -> Iterator[None]:
    """Import modules of keras_preact without the package itself, which imports Keras, and
    TensorFlow without Keras and JAX. The server and `predict` need none of them.

    TensorFlow imports both if it can, to register their optimisers and to convert
    functions. Without them it takes 1.9 s of CPU time instead of 4.1, and 530 MB
    instead of 810. After this block they can be imported again.
    """
    hidden = []
    for name in ("keras_preact", "keras"):
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)
            hidden.append(name)
    for name in {"keras.src", "jax"} - sys.modules.keys():
        sys.modules[name] = None  # type: ignore[assignment]  # an ImportError
        hidden.append(name)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
