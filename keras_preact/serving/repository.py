"""The served models: loads the versions that appear in a directory, lends them, and
closes those that disappear.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from keras_preact import _checks
from keras_preact.serving import _scan, version_policy
from keras_preact.serving.errors import NotFound, Unavailable
from keras_preact.serving.loading import LoadError
from keras_preact.serving.servable import Servable
from keras_preact.serving.settings import Settings
from keras_preact.serving.tensors import shortened

log = logging.getLogger("keras_preact.serving")

T = TypeVar("T")

State = Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END"]


@dataclass(frozen=True)
class VersionStatus:
    """The state of a version, in TensorFlow Serving's words.

    Args:
        version: Its number.
        state: START (found), LOADING, AVAILABLE, UNLOADING (no new requests) or END
            (closed, or failed to load).
        error_code: OK, or why it failed to load.
        error_message: A sentence for clients; empty without an error.
    """

    version: int
    state: State
    error_code: str = "OK"
    error_message: str = ""


class _Version:
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
        """Call `load`, and return its error: the thread survives whatever a broken file
        causes.
        """
        try:
            self._servable = load()
        except BaseException as error:
            return error
        return None

    def succeed(self, seconds: float) -> None:
        self.failed_files = None
        self.enter("AVAILABLE")
        log.info("loaded %s in %.1f s", self, seconds, extra=self._fields | {"seconds": seconds})

    def fail(self, error: BaseException, files: _scan.Files) -> None:
        """Remember that these files failed; the status quotes no other library."""
        unforeseen = None if isinstance(error, LoadError) else error
        log.warning(
            "%s could not be loaded: %s", self, error, extra=self._fields, exc_info=unforeseen
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
        """Close the servable after its last lease. No new one may begin; one that lasts
        longer than `seconds` is logged.
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
                extra=self._fields,
            )
            await self._unused()
        try:
            await self._servable.close()
        except Exception:
            log.exception("%s could not be closed properly", self, extra=self._fields)
        self._servable = None
        self.enter("END")
        log.info("closed %s", self, extra=self._fields)

    async def _unused(self) -> None:
        while self._leases:
            self._idle.clear()
            await self._idle.wait()

    @property
    def _fields(self) -> dict[str, object]:
        """Fields of its log records."""
        return {"model": self.name, "version": self.number}


class Repository:
    """Follows a directory of models, and lends the loaded ones.

    Of each model it serves the `settings.versions` highest versions, or those that its
    `version_policy.json` chooses, among those that load, so that a broken one takes
    nothing away. A new version is loaded first; only then the one that it replaces is
    drained: it is not lent any more, and closed after its last lease. A version that
    failed to load is tried again when anything in its
    folder changes; one that is served stays as it was loaded.

    A model without versions is drained. While a folder cannot be read, everything stays
    as it is. At most one version is loaded at a time, in a thread; everything else
    happens in the event loop, to which the methods belong.

    Args:
        settings: `directory`, `versions`, `poll_seconds` and `drain_seconds` are used
            here, all by `load`.
        load: Loads and warms up a version: `load(path, settings)`, called in a thread.

    Example:
        >>> repository = Repository(Settings("saved_models"), loading.load)  # doctest: +SKIP
        >>> await repository.start()  # doctest: +SKIP
        >>> with repository.lease("cifar10_resnet20") as servable:  # doctest: +SKIP
        ...     await servable.predict("serving_default", {"images": images}, deadline)
    """

    def __init__(self, settings: Settings, load: Callable[[Path, Settings], Servable]):
        self._settings = settings
        self._load = load
        self._models: dict[str, dict[int, _Version]] = {}
        # The models in the directory; others in _models are being drained.
        self._found: set[str] = set()
        self._policies: dict[str, version_policy.Policy] = {}
        self._complaints: dict[Path, str] = {}
        self._closing: set[asyncio.Task] = set()
        self._stopping = asyncio.Event()
        self._poller: asyncio.Task | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def start(self) -> None:
        """Begin to follow the directory; return when each version to be served was
        loaded, or failed.
        """
        self._stopping.clear()
        self._thread = ThreadPoolExecutor(1, "keras-preact-repository")
        tried = asyncio.Event()
        self._poller = asyncio.create_task(self._poll(tried))
        await tried.wait()

    async def stop(self) -> None:
        """Lend nothing more, and close everything; after `settings.drain_seconds`,
        leave what is in use to its last lease.
        """
        if self._poller is None or self._thread is None:
            return
        self._stopping.set()
        for version in self._all("AVAILABLE"):
            self._drain(version)
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                # A load cannot be interrupted; what it brings is closed at once.
                await asyncio.wait({self._poller})
                while self._closing:
                    await asyncio.wait(self._closing)
        except TimeoutError:
            unfinished = [*self._all("LOADING"), *self._all("UNLOADING")]
            log.warning(
                "stopped while versions were being loaded or used: %s",
                ", ".join(map(str, unfinished)),
            )
        self._thread.shutdown(wait=False)
        self._poller = None

    def lease(self, name: str, version: int | None = None) -> AbstractContextManager[Servable]:
        """Return a context with a version, by default the highest available, which is
        not closed before the context ends.

        Enter it at once: it is counted from there.

        Raises:
            NotFound: if there is no such model, or no such version of it is served.
            Unavailable: while it is being loaded, or if it failed to.
        """
        if name not in self._found:
            raise self._unknown(name)
        versions = self._models[name]
        available = [number for number, one in versions.items() if one.state == "AVAILABLE"]
        if version in available or (available and version is None):
            return versions[max(available) if version is None else version].lend()
        if self._stopping.is_set():
            raise Unavailable("The server is stopping.")
        concerned = [known for number, known in versions.items() if version in (None, number)]
        if any(known.state in ("START", "LOADING") for known in concerned):
            raise Unavailable(f"Model {name!r} is being loaded.")
        if version is None or any(known.status.error_code != "OK" for known in concerned):
            raise Unavailable(f"Model {name!r} is not available; its status says why.")
        raise NotFound(
            f"Model {name!r} is served in the versions {sorted(available)}. Received: version "
            f"{version}"
        )

    def labelled(self, name: str, label: str) -> int:
        """Return the number of the version that has a label.

        Raises:
            NotFound: if there is no such model or label.
        """
        if name not in self._found:
            raise self._unknown(name)
        labels = self._policies[name].version_labels if name in self._policies else {}
        if label not in labels:
            raise NotFound(
                f"Model {name!r} has the labels {sorted(labels)}; {version_policy.FILE} in its "
                f"folder sets them. Received: {shortened(label)!r}"
            )
        return labels[label]

    def names(self) -> list[str]:
        """Return the names of the models in the directory, in order."""
        return sorted(self._found)

    def status(self, name: str) -> list[VersionStatus]:
        """Return the states of a model's versions, in their order. Versions that were
        never wanted are not among them.

        Raises:
            NotFound: if there is no such model.
        """
        if name not in self._models:
            raise self._unknown(name)
        return [version.status for _, version in sorted(self._models[name].items())]

    def available(self, name: str) -> list[int]:
        """Return the numbers of a model's versions that can be lent, in order.

        Raises:
            NotFound: if there is no such model.
        """
        return [status.version for status in self.status(name) if status.state == "AVAILABLE"]

    def ready(self) -> bool:
        """Return whether there is a model with an available version: one that is broken
        or being loaded takes nothing from the others.
        """
        return any(map(self.available, self._found))

    def _unknown(self, name: str) -> NotFound:
        name = shortened(name)
        hint = _checks.nearest(name, self.names()) if self._found else "There is none now."
        return NotFound(f"Unknown model. {hint} Received: {name!r}")

    def _all(self, state: str) -> list[_Version]:
        return [
            version
            for versions in self._models.values()
            for version in versions.values()
            if version.state == state
        ]

    async def _poll(self, tried: asyncio.Event) -> None:
        while not self._stopping.is_set():
            try:
                await self._update()
            except Exception:
                log.exception(
                    "the directory of models could not be followed; the next attempt comes soon"
                )
            tried.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.poll_seconds):
                    await self._stopping.wait()

    async def _update(self) -> None:
        """Bring what is loaded to what is in the directory now."""
        directory = self._settings.directory
        found = await self._read(_scan.models, directory)
        if found is None:
            return
        readable = {}
        for name, paths in found.items():
            if isinstance(paths, OSError):
                self._complain(directory / name, paths)
            else:
                self._complaints.pop(directory / name, None)
                readable[name] = paths
        still = {*readable, *(self._found & found.keys())}
        self._found &= still
        for name in self._models.keys() - still:
            self._policies.pop(name, None)
            self._settle(name, {}, set())
        chosen = {}
        for name, paths in readable.items():
            policy = await self._policy(name, paths)
            versions = self._models.setdefault(name, {})
            if policy is None:
                if not versions:
                    versions[max(paths)] = one = _Version(name, max(paths))
                    message = "Its version_policy.json cannot be followed; the log says why."
                    one.enter("END", "FAILED_PRECONDITION", message)
                continue  # everything stays as it is
            paths, wanted = policy.select(paths, self._settings.versions)
            for number in sorted(paths)[-wanted:]:
                versions.setdefault(number, _Version(name, number))
            chosen[name] = paths, wanted
        self._found = {*readable, *(self._found & found.keys())}
        for name, (paths, wanted) in chosen.items():
            await self._update_model(name, paths, wanted)

    async def _policy(self, name: str, paths: dict[int, Path]) -> version_policy.Policy | None:
        """Return the model's version policy; None while it cannot be followed."""
        file = next(iter(paths.values())).parent / version_policy.FILE
        policy = await self._read(functools.partial(version_policy.read, versions=paths), file)
        if policy is not None:
            self._policies[name] = policy
        return policy

    async def _update_model(self, name: str, paths: dict[int, Path], wanted: int) -> None:
        versions = self._models[name]
        kept: set[int] = set()
        for number in sorted(paths, reverse=True):
            if len(kept) == wanted:
                break
            version = versions.setdefault(number, _Version(name, number))
            if version.state in ("START", "END"):
                await self._try(version, paths[number])
            if version.state == "AVAILABLE":
                kept.add(number)
        self._settle(name, paths, kept)

    async def _try(self, version: _Version, path: Path) -> None:
        """Load a version, unless these very files failed before."""
        files = await self._read(_scan.files, path)
        if files is None or files == version.failed_files:
            return
        version.enter("LOADING")
        began = time.monotonic()
        error = await self._in_thread(
            version.load, functools.partial(self._load, path, self._settings)
        )
        if error is not None:
            version.fail(error, files)
            return
        version.succeed(time.monotonic() - began)
        if self._stopping.is_set():
            self._drain(version)

    def _settle(self, name: str, paths: Collection[int], kept: set[int]) -> None:
        """Drain what is available and not kept, and forget versions that are closed and
        not in the directory.
        """
        versions = self._models[name]
        available = set(self.available(name))
        if paths and available and not kept:
            kept = {max(available)}  # its folder went, but nothing that loads came in its place
        for number in available - kept:
            self._drain(versions[number])
        for number, version in list(versions.items()):
            if version.state in ("START", "END") and number not in paths:
                del versions[number]
        if not versions:
            del self._models[name]

    def _drain(self, version: _Version) -> None:
        version.enter("UNLOADING")
        task = asyncio.create_task(version.close(self._settings.drain_seconds))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _read(self, function: Callable[[Path], T], path: Path) -> T | None:
        """Return what `function` reads from the disk; None if it cannot, which is
        logged once, or if this is stopping.
        """
        if self._stopping.is_set():
            return None
        try:
            result = await self._in_thread(function, path)
        except OSError as error:
            self._complain(path, error)
            return None
        self._complaints.pop(path, None)
        return None if self._stopping.is_set() else result

    def _complain(self, path: Path, error: OSError) -> None:
        if self._complaints.get(path) != str(error):
            self._complaints[path] = str(error)
            log.warning("%s could not be read; what is loaded stays: %s", path, error)
