"""A run: its configuration is checked, its parts are made, it is trained."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import checking
from . import compile_cache
from .checks import check

if TYPE_CHECKING:
    from .run import Run


@contextlib.contextmanager
def started(config: Config, recipe: str) -> "Iterator[Run]":
    """Check a configuration, make its run, and yield it inside its distribution.

    Raises:
        UserError: for a configuration that does not fit; nothing is written then.
    """
    if not config.dry_run:  # it writes nothing, and measures how long compiling takes
        compile_cache.use(config.compile_cache)  # before the imports, which read it
    check(config)  # before the imports, which take seconds

    import keras

    import keras_preact as kp

    from .run import Run

    with contextlib.ExitStack() as stack:
        with checking():
            distribution = stack.enter_context(
                kp.distribution.start(config.distribution, batch_norm=config.batch_norm)
            )
            keras.utils.set_random_seed(config.seed)
            run = Run(config, recipe, distribution)
        stack.enter_context(run.data.name_broken_images())
        yield run
