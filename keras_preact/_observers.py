"""Looking into residual units while a network runs, at what stands at the ends of their
paths, and changing what F adds.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

from keras import ops

_OBSERVER: contextvars.ContextVar["Observer | None"] = contextvars.ContextVar(
    "observer", default=None
)


class Observer:
    """While active, sees every residual unit that runs.

    Args:
        look: Called by every unit with its signals as keyword arguments: `activated`
            (what the first weight reads), `shortcut` (None where there is none) and
            `residual` (what is added: h(x_l) and F(x_l) with their factors), `total`
            (their sum), `output` (x_{l+1}) and `axis`, that of the channels. Returns a
            float32 tensor.
        shape: Of what `look` returns; None for that of the unit's output.
        factors: `(units,)`, what F(x_l) is multiplied by, in the order in which the
            units run; None for nothing.
        detached: Whether the branches take no part in gradients, which then flow
            through the shortcuts alone.

    Attributes:
        seen: What `look` returned, in the order of the units: of a unit by itself a
            tensor of `(1, *shape)`, of a stack one of `(depth, *shape)`.
    """

    def __init__(
        self,
        look: Callable,
        shape: tuple[int, ...] | None = (),
        *,
        factors=None,
        detached: bool = False,
    ):
        self.look = look
        self.shape = shape
        self.factors = factors
        self.detached = detached
        self.seen: list = []
        self._units = 0

    @contextlib.contextmanager
    def active(self) -> Iterator["Observer"]:
        token = _OBSERVER.set(self)
        try:
            yield self
        finally:
            _OBSERVER.reset(token)

    def take_factors(self, units: int):
        """Return the factors of the next units."""
        self._units += units
        return self.factors[self._units - units : self._units]

    def change(self, residual):
        """Return what takes the place of F(x_l) in the next unit."""
        if self.detached:
            residual = ops.stop_gradient(residual)
        return (
            residual
            if self.factors is None
            else residual * ops.cast(self.take_factors(1)[0], residual.dtype)
        )

    def see(self, **signals) -> None:
        self.seen.append(ops.expand_dims(self.look(**signals), 0))

    def of_one(self, factors) -> "Observer":
        """Return an observer that looks alike, for one unit."""
        return Observer(self.look, self.shape, factors=factors, detached=self.detached)


def active() -> Observer | None:
    """Return the observer that is looking, if there is one."""
    return _OBSERVER.get()
