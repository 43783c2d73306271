"""One version of a served model: its state, and the servable that it lends out while it
is available.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from keras_preact.serving import _scan
from keras_preact.serving.servable import LoadError, Servable

log = logging.getLogger("keras_preact.serving")

State = Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END"]


@dataclass(frozen=True)
class VersionStatus:
    """What became of a version, in TensorFlow Serving's words.

    Args:
        version: Its number.
        state: START (found), LOADING, AVAILABLE, UNLOADING (no new requests) or END
            (closed, or failed to load).
        error_code: OK, or why it failed to load.
        error_message: A sentence for clients, empty where there is no error.
    """

    version: int
    state: State
    error_code: str = "OK"
    error_message: str = ""


class Version:
    """A version, which belongs to the event loop; only `load` is called in a thread."""

    def __init__(self, name: str, number: int):
        self.name = name
        self.number = number
        self.status = VersionStatus(number, "START")
        self.failed_files: _scan.Files | None = None
        self._servable: Servable | None = None
        self._leases = 0
        self._idle = asyncio.Event()

    def __str__(self) -> str:
        return f"{self.name} version {self.number}"

    @property
    def state(self) -> State:
        return self.status.state

    def enter(self, state: State, error_code: str = "OK", error_message: str = "") -> None:
        self.status = VersionStatus(self.number, state, error_code, error_message)

    def load(self, load: Callable[[], Servable]) -> BaseException | None:
        """Call `load`, and return what it raised: a thread must survive whatever a
        broken file sets off.
        """
        try:
            self._servable = load()
        except BaseException as error:
            return error
        return None

    def succeed(self, seconds: float) -> None:
        self.failed_files = None
        self.enter("AVAILABLE")
        log.info("loaded %s in %.1f s", self, seconds, extra=self.fields | {"seconds": seconds})

    def fail(self, error: BaseException, files: _scan.Files) -> None:
        """Take note that these files could not be loaded; the status shows nothing that
        other libraries say.
        """
        unforeseen = None if isinstance(error, LoadError) else error
        log.warning(
            "%s could not be loaded: %s", self, error, extra=self.fields, exc_info=unforeseen
        )
        self.failed_files = files
        if isinstance(error, LoadError):
            self.enter("END", "INVALID_ARGUMENT", str(error))
        elif isinstance(error, MemoryError):
            self.enter("END", "RESOURCE_EXHAUSTED", "There was not enough memory to load it.")
        else:
            self.enter(
                "END",
                "INTERNAL",
                f"Loading it failed ({type(error).__name__}); the server's log says more.",
            )

    @contextlib.contextmanager
    def lend(self) -> Iterator[Servable]:
        assert self._servable is not None
        self._leases += 1
        try:
            yield self._servable
        finally:
            self._leases -= 1
            if not self._leases:
                self._idle.set()

    async def close(self, seconds: float) -> None:
        """Close the servable behind its last lease. No new one may begin; one still
        open after `seconds` is logged.
        """
        assert self._servable is not None
        try:
            async with asyncio.timeout(seconds):
                await self._unused()
        except TimeoutError:
            log.warning(
                "%s is still in use %g s after it was replaced or removed",
                self,
                seconds,
                extra=self.fields,
            )
            await self._unused()
        try:
            await self._servable.close()
        except Exception:
            log.exception("%s could not be closed properly", self, extra=self.fields)
        self._servable = None
        self.enter("END")
        log.info("closed %s", self, extra=self.fields)

    async def _unused(self) -> None:
        while self._leases:
            self._idle.clear()
            await self._idle.wait()

    @property
    def fields(self) -> dict[str, object]:
        """What log records carry of it."""
        return {"model": self.name, "version": self.number}
