"""The served models: load the versions that appear in a directory, lend them, and close
versions that disappear.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from keras_preact import _checks
from keras_preact.export.version import VersionError, layout, models, name_problem, walk
from keras_preact.serving import version_policy
from keras_preact.serving.errors import NotFound, Unavailable
from keras_preact.serving.servable import Servable
from keras_preact.serving.settings import Settings
from keras_preact.serving.tensors import shortened

log = logging.getLogger("keras_preact.serving")

#: The path, size and time of the last change of each file and folder.
Files = frozenset[tuple[str, int, int, int]]


@dataclass(eq=False)
class ServedVersion:
    """A version of a model and its state, in TensorFlow Serving's words. It belongs to
    the event loop.

    Args:
        model: The model's name.
        version: Its number.
        state: LOADING, AVAILABLE, UNLOADING (no new requests) or END (closed, or failed
            to load).
        error_code: OK, or why it failed to load.
        error_message: A sentence for clients; empty without an error.
        servable: The loaded version, until it is closed.
        failed_files: The files that could not be loaded.
        leases: Number of current leases.
        unused: Set when the last lease ends.
    """

    model: str
    version: int
    state: str = "LOADING"
    error_code: str = "OK"
    error_message: str = ""
    servable: Servable | None = None
    failed_files: Files | None = None
    leases: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self, state: str, code: str = "OK", message: str = "") -> None:
        self.state, self.error_code, self.error_message = state, code, message
        fields = {"model": self.model, "version": self.version}
        level = logging.INFO if code == "OK" else logging.WARNING
        text = f"{state}. {message}" if message else state
        log.log(level, "%s version %d: %s", *fields.values(), text, extra=fields)

    async def close(self) -> None:
        """Close the servable after its last lease. No new one may begin."""
        assert self.servable is not None
        while self.leases:
            self.unused.clear()
            await self.unused.wait()
        await self.servable.close()
        self.servable = None
        self.enter("END")


class Repository:
    """Follows a directory of models, and lends the loaded ones.

    It serves the `settings.versions` highest versions of each model, or the versions
    that its `version_policy.json` chooses. Versions that do not exist or fail to load do
    not count: a broken version does not replace one that works. A new version is loaded before the
    old one is drained: a drained version is no longer lent, and is closed after its
    last lease. A version that failed to load is tried again when anything in its folder
    changes. A served version stays as it was loaded.

    A model without versions is drained. While a folder cannot be read, everything stays
    as it is. At most one version is loaded at a time, in a thread. Everything else
    happens in the event loop, where the methods must be called.

    Args:
        settings: `directory`, `versions`, `poll_seconds` and `drain_seconds` are used
            here; `load` receives all settings.
        load: Loads and warms up a version: `load(path, settings)`, called in a thread.

    Example:
        >>> repository = Repository(Settings("saved_models"), loading.load)  # doctest: +SKIP
        >>> await repository.start()  # doctest: +SKIP
        >>> with repository.lease("cifar10_resnet20") as servable:  # doctest: +SKIP
        ...     await servable.predict("serving_default", images)
    """

    def __init__(self, settings: Settings, load: Callable[[Path, Settings], Servable]):
        self._settings = settings
        self._load = load
        self._models: dict[str, dict[int, ServedVersion]] = {}
        self._labels: dict[str, dict[str, int]] = {}
        self._unread: dict[str, str] = {}
        self._misplaced: dict[str, str] = {}
        self._closing: set[asyncio.Task] = set()
        self._stopping = asyncio.Event()
        self._poller: asyncio.Task | None = None

    async def start(self) -> None:
        """Start to follow the directory. Return when every version to serve is loaded
        or has failed.
        """
        await self._update()
        self._poller = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        """Lend nothing more, and close everything. After `settings.drain_seconds`, do
        not wait longer for versions in use. A load cannot be interrupted, and is not
        waited for: its version is closed when it is there.
        """
        self._stopping.set()
        self._keep_nothing()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_seconds):
                while self._closing:
                    await asyncio.wait(self._closing)

    @contextlib.contextmanager
    def lease(self, name: str, version: int | None = None) -> Iterator[Servable]:
        """Yield a version, by default the highest available one. It is not closed
        before the context ends.

        Raises:
            NotFound: if there is no such model, or no such version of it is served.
            Unavailable: while the version is being loaded, if it failed to load, or
                while the server stops.
        """
        if self._stopping.is_set():
            raise Unavailable("The server is stopping. Send the request again later.")
        candidates = [one for one in self.status(name) if version in (None, one.version)]
        available = [one for one in candidates if one.state == "AVAILABLE"]
        if not available:
            received = f"version {version}" if version is not None else "no version"
            if any(one.state == "LOADING" or one.error_code != "OK" for one in candidates):
                raise Unavailable(
                    f"Model {name!r} is not available, or not yet. GET /v1/models/{name} says "
                    f"why. Received: {received}"
                )
            raise NotFound(
                f"Model {name!r} is served in the versions {self.available(name)}. "
                f"Received: {received}"
            )
        one = available[-1]
        assert one.servable is not None
        one.leases += 1
        try:
            yield one.servable
        finally:
            one.leases -= 1
            if not one.leases:
                one.unused.set()

    def labelled(self, name: str, label: str) -> int:
        """Return the number of the version that has a label.

        Raises:
            NotFound: if there is no such model or label.
        """
        self.status(name)
        labels = self._labels.get(name, {})
        if label not in labels:
            raise NotFound(
                f"Model {name!r} has the labels {sorted(labels)}; {version_policy.FILE} in its "
                f"folder sets them. Received: {shortened(label)!r}"
            )
        return labels[label]

    def names(self) -> list[str]:
        """Return the names of the models, in order."""
        return sorted(self._models)

    def status(self, name: str) -> list[ServedVersion]:
        """Return a model's versions in ascending order, without those that were never
        to be served, and without failed ones below the versions that are served.

        Raises:
            NotFound: if there is no such model.
        """
        if name not in self._models:
            if name in self._misplaced:
                raise NotFound(f"Model {name!r} is not served. {self._misplaced[name]}")
            name = shortened(name)
            hint = _checks.nearest(name, self.names()) if self._models else "There are none now."
            raise NotFound(f"Unknown model. {hint} Received: {name!r}")
        return [version for _, version in sorted(self._models[name].items())]

    def available(self, name: str) -> list[int]:
        """Return the numbers of a model's versions that can be lent, in order.

        Raises:
            NotFound: if there is no such model.
        """
        return [one.version for one in self.status(name) if one.state == "AVAILABLE"]

    def servables(self) -> list[Servable]:
        """Return the versions that can be lent, for inspection only: to compute with
        one, lease it.
        """
        return [
            one.servable
            for name in self.names()
            for one in self.status(name)
            if one.state == "AVAILABLE" and one.servable
        ]

    def problems(self) -> dict[str, int]:
        """Return the number of problems of each model: versions that fail to load or do
        not exist, one more if its folder or its policy cannot be read, and one more if
        its files are in the wrong place. The name `""` is the directory itself.
        """
        failed = {
            name: sum(one.error_code != "OK" for one in versions.values())
            for name, versions in self._models.items()
        }
        for name in [*self._unread, *self._misplaced]:
            failed[name] = failed.get(name, 0) + 1
        return failed

    async def _poll(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._settings.poll_seconds)
                return
            await self._update()
        self._keep_nothing()

    async def _update(self) -> None:
        """Load and close versions to match the directory."""
        unread: dict[str, str] = {}
        misplaced: dict[str, str] = {}
        directory = self._settings.directory
        try:
            folders, misplaced[""] = await asyncio.to_thread(models, directory)
            for name in sorted(folders.keys() | self._models.keys()):
                try:
                    folder = folders.get(name, directory / name)
                    misplaced[name] = await self._update_model(name, folder)
                except Exception as error:  # the other models are still followed
                    unread[name] = str(error)
        except OSError as error:
            unread, misplaced = self._unread | {"": str(error)}, self._misplaced
        misplaced = {name: problem for name, problem in misplaced.items() if problem}
        _warn(unread, self._unread, " could not be read, and stays as it is: %s")
        _warn(misplaced, self._misplaced, ": %s")
        self._unread, self._misplaced = unread, misplaced

    async def _update_model(self, name: str, folder: Path) -> str:
        """Load and close versions of a model. Return what is wrong with its folder."""
        found = await asyncio.to_thread(layout, folder)
        paths = found.versions
        policy = await asyncio.to_thread(version_policy.read, folder / version_policy.FILE)
        wanted, count = policy.select(paths, self._settings.versions)
        if not paths or wanted & paths.keys():  # otherwise everything stays as it is
            self._labels[name] = policy.version_labels
        versions = self._models.setdefault(name, {})
        tried: set[int] = set()
        kept: set[int] = set()
        for number in sorted(wanted, reverse=True):
            if len(kept) == count:
                break
            tried.add(number)
            version = versions.setdefault(number, ServedVersion(name, number))
            if version.state in ("LOADING", "END"):
                await self._try(version, paths.get(number))
            if version.state == "AVAILABLE" and number in paths:
                kept.add(number)
        if paths and not kept:  # a folder is gone, but no version that loads replaced it
            kept = {n for n, one in versions.items() if one.state == "AVAILABLE"}
        self._keep(name, kept)
        for number, version in list(versions.items()):
            # A failed version no longer matters if a higher one took its place.
            is_over = number not in (tried if version.error_code != "OK" else wanted)
            if version.state in ("LOADING", "END") and is_over:
                del versions[number]
        if not versions:
            del self._models[name]
        if paths:
            return found.problem or name_problem(name)
        # A missing version that a policy chooses has its own status.
        is_misplaced = not wanted and await asyncio.to_thread(folder.is_dir)
        return found.problem if is_misplaced else ""

    async def _try(self, version: ServedVersion, path: Path | None) -> None:
        """Load a version, unless it does not exist or these very files failed before.
        The status quotes no other library.
        """
        if path is None:
            if version.error_code != "NOT_FOUND":  # say it once, not in every update
                reason = f"{version_policy.FILE} chooses it, but it does not exist."
                version.enter("END", "NOT_FOUND", reason)
                version.failed_files = None
            return
        files = await asyncio.to_thread(files_of, path)
        if files == version.failed_files or self._stopping.is_set():
            return
        version.enter("LOADING")
        version.failed_files = files
        try:
            version.servable = await asyncio.to_thread(self._load, path, self._settings)
        except VersionError as error:
            version.enter("END", "INVALID_ARGUMENT", error.problem)
        except Exception as error:
            log.exception("loading failed")
            reason = f"Loading it failed ({type(error).__name__}); the server's log says more."
            version.enter("END", "INTERNAL", reason)
        else:
            version.failed_files = None
            version.enter("AVAILABLE")

    def _keep_nothing(self) -> None:
        for name in self._models:
            self._keep(name, set())

    def _keep(self, name: str, kept: set[int]) -> None:
        """Drain the available versions that are not in `kept`."""
        for number, version in self._models[name].items():
            if version.state == "AVAILABLE" and number not in kept:
                version.enter("UNLOADING")
                task = asyncio.create_task(version.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


def _warn(problems: dict[str, str], known: dict[str, str], text: str) -> None:
    """Log each problem of a model once, not in every update."""
    for name, reason in problems.items():
        if reason != known.get(name):
            what = f"model {name}" if name else "the folder of models"
            log.warning(f"%s{text}", what, reason, extra={"model": name})


def files_of(folder: Path) -> Files:
    """Return a value that changes when anything in a version's folder changes.

    Raises:
        OSError: if it cannot be read.
    """
    files = []
    for parent, folders, names in walk(folder):
        for path in (os.path.join(parent, name) for name in [*folders, *names]):
            # of the target of a link, unless the target does not exist yet
            status = os.stat(path, follow_symlinks=os.path.exists(path))
            files.append((path, status.st_size, status.st_mtime_ns, status.st_mode))
    return frozenset(files)
