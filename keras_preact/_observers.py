"""Looking into residual units while a network runs: what stands at the ends of their paths, as numbers of one shape a unit."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

from keras import ops

_OBSERVER: contextvars.ContextVar["Observer | None"] = contextvars.ContextVar("observer", default=None)


class Observer:
    """While active, sees every residual unit that runs.

    Args:
        look: Called by every unit with its signals as keyword arguments: `activated` (what the first weight reads), `shortcut`
            (None where there is none) and `residual` (what is added: h(x_l) and F(x_l) with their factors), `total` (their
            sum), `output` (x_{l+1}) and `axis`, that of the channels. Returns a float32 tensor.
        shape: Of what `look` returns.

    Attributes:
        seen: What `look` returned, in the order of the units: of a unit by itself a tensor of `(1, *shape)`, of a stack one of
            `(depth, *shape)`.
    """

    def __init__(self, look: Callable, shape: tuple[int, ...] = ()):
        self.look = look
        self.shape = shape
        self.seen: list = []

    @contextlib.contextmanager
    def active(self) -> Iterator["Observer"]:
        token = _OBSERVER.set(self)
        try:
            yield self
        finally:
            _OBSERVER.reset(token)


    def see(self, **signals) -> None:
        self.seen.append(ops.expand_dims(self.look(**signals), 0))


def active() -> Observer | None:
    """Return the observer that is looking, if there is one."""
    return _OBSERVER.get()
