"""The repository with real folders and renames; what it loads from them is a stand-in
that knows whether it was closed.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from keras_preact.serving import _scan
from keras_preact.serving.errors import NotFound, Unavailable
from keras_preact.serving.loading import LoadError
from keras_preact.serving.repository import Repository, VersionStatus
from keras_preact.serving.settings import Settings

pytestmark = pytest.mark.anyio

BROKEN = "broken"


def export(model: Path, version: int, content: str = "good") -> Path:
    """Put a version there as an export does: built in a hidden folder, and renamed."""
    built = model / f".export-{version}" / "version"
    (built / "variables").mkdir(parents=True)
    (built / "saved_model.pb").write_text(content)
    (built / "variables" / "variables.index").write_text("index")
    built.rename(model / str(version))
    built.parent.rmdir()
    return model / str(version)


class Loaded:
    def __init__(self, path: Path):
        self.name, self.version = path.parent.name, int(path.name)
        self.closed = 0

    async def close(self):
        await asyncio.sleep(0)
        self.closed += 1
        if self.name == "stubborn":
            raise RuntimeError("no")


class Loader:
    """Loads what holds "good". Holds on while `open` is not set, and knows how many
    loads run at once.
    """

    def __init__(self, error: BaseException | None = None):
        self.error = error or LoadError("The file is broken.")
        self.open = threading.Event()
        self.open.set()
        self.loaded: list[Loaded] = []
        self.attempts: list[tuple[str, int]] = []
        self.running = self.most_running = 0
        self.lock = threading.Lock()

    def __call__(self, path: Path, settings: Settings) -> Loaded:
        with self.lock:
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        try:
            self.attempts.append((path.parent.name, int(path.name)))
            assert self.open.wait(60)
            if (path / "saved_model.pb").read_text() != "good":
                raise self.error
            self.loaded.append(Loaded(path))
            return self.loaded[-1]
        finally:
            with self.lock:
                self.running -= 1


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def polled(monkeypatch):
    """Return a function that waits until all that is in the directory now was seen and
    dealt with.
    """
    looks = itertools.count()
    last = [0]
    scan = _scan.models

    def counting(directory):
        last[0] = next(looks)
        return scan(directory)

    async def wait():
        before = last[0]
        await until(lambda: last[0] >= before + 2)

    monkeypatch.setattr(_scan, "models", counting)
    return wait


@contextlib.asynccontextmanager
async def serving(directory: Path, load, **options):
    settings = Settings(directory, **{"poll_seconds": 0.001, "drain_seconds": 60.0} | options)
    repository = Repository(settings, load)
    try:
        await repository.start()
        yield repository
    finally:
        await repository.stop()
    assert all(loaded.closed == 1 for loaded in getattr(load, "loaded", []))


def states(repository: Repository, name: str) -> dict[int, str]:
    return {status.version: status.state for status in repository.status(name)}


def leased(repository: Repository, name: str, version: int | None = None) -> int:
    with repository.lease(name, version) as servable:
        assert not servable.closed
        return servable.version


async def test_what_is_a_model(tmp_path):
    for name, version in (("one", 1), ("one", 12), ("two", 3), ("empty", 1), (".hidden", 1)):
        export(tmp_path / name, version)
    (tmp_path / "empty" / "1" / "saved_model.pb").unlink()
    for name in ("²", "-1", "1.0", "v1", "1e3"):
        export(tmp_path / "one", 7).rename(tmp_path / "one" / name)
    export(tmp_path / "named", 1).rename(tmp_path / "named" / "latest")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "model_card.json").write_text("{}")
    (tmp_path / "one" / "13").write_text("a file")
    (tmp_path / "one" / ".export-x" / "version").mkdir(parents=True)
    (tmp_path / "gone").symlink_to("nowhere")
    async with serving(tmp_path, Loader(), versions=None) as repository:
        assert repository.names() == ["one", "two"]
        assert repository.status("one") == [
            VersionStatus(1, "AVAILABLE"),
            VersionStatus(12, "AVAILABLE"),
        ]
        assert repository.status("two") == [VersionStatus(3, "AVAILABLE")]
        assert repository.ready()


@pytest.mark.parametrize("directory", [".", "../digits", "link"])
async def test_a_directory_that_is_one_model(tmp_path, monkeypatch, directory):
    export(tmp_path / "digits", 1)
    monkeypatch.chdir(tmp_path / "digits")
    (tmp_path / "digits" / "link").symlink_to(tmp_path / "digits")
    async with serving(Path(directory), Loader()) as repository:
        assert repository.names() == ["link" if directory == "link" else "digits"]
        assert leased(repository, repository.names()[0]) == 1


@pytest.mark.parametrize(
    ("versions", "served"), [(1, [10]), (2, [9, 10]), (3, [2, 9, 10]), (None, [2, 9, 10])]
)
async def test_the_highest_versions_are_served(tmp_path, versions, served):
    for version in (2, 9, 10):
        export(tmp_path / "model", version)
    loader = Loader()
    async with serving(tmp_path, loader, versions=versions) as repository:
        assert states(repository, "model") == dict.fromkeys(served, "AVAILABLE")
        assert leased(repository, "model") == 10
        assert [leased(repository, "model", version) for version in served] == served
        assert len(loader.attempts) == len(served)


def set_policy(model: Path, choice=None, **labels) -> None:
    """Write a policy, whole at once."""
    policy = {"version_labels": labels}
    if choice is not None:
        policy["model_version_policy"] = choice
    (model / ".policy").write_text(json.dumps(policy))
    (model / ".policy").rename(model / "version_policy.json")


@pytest.mark.parametrize(
    ("choice", "served"),
    [
        ({"specific": {"versions": [2, 3]}}, [2, 3]),
        ({"specific": {"versions": [1, 9]}}, [1]),
        ({"latest": {"num_versions": 3}}, [2, 3, 4]),
        ({"latest": {}}, [4]),
        ({"all": {}}, [1, 2, 3, 4]),
        (None, [3, 4]),
    ],
)
async def test_a_policy_chooses_the_versions(tmp_path, choice, served):
    for version in (1, 2, 3, 4):
        export(tmp_path / "model", version)
    set_policy(tmp_path / "model", choice)
    async with serving(tmp_path, Loader(), versions=2) as repository:
        assert states(repository, "model") == dict.fromkeys(served, "AVAILABLE")
        assert leased(repository, "model") == served[-1]


async def test_a_policy_rolls_back_without_a_gap(tmp_path, polled):
    model = tmp_path / "model"
    for version in (1, 2):
        export(model, version)
    loader = Loader()
    async with serving(tmp_path, loader) as repository:
        assert leased(repository, "model") == 2
        loader.open.clear()
        set_policy(model, {"specific": {"versions": [1]}}, stable=1)
        await until(lambda: ("model", 1) in loader.attempts)
        assert leased(repository, "model") == 2
        loader.open.set()
        await until(lambda: leased(repository, "model") == 1)
        assert repository.labelled("model", "stable") == 1
        export(model, 3)  # not chosen
        await polled()
        assert states(repository, "model")[1] == "AVAILABLE"
        assert 3 not in states(repository, "model")
        with pytest.raises(NotFound, match=r"labels \['stable'\].* Received: 'canary'"):
            repository.labelled("model", "canary")
        with pytest.raises(NotFound, match="Unknown model"):
            repository.labelled("other", "stable")
        (model / "version_policy.json").unlink()
        await until(lambda: leased(repository, "model") == 3)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"model_version_policy": {}}',
        '{"model_version_policy": {"latest": {}, "all": {}}}',
        '{"model_version_policy": {"latest": {"num_versions": 0}}}',
        '{"model_version_policy": {"specific": {"versions": []}}}',
        '{"model_version_policy": {"specific": {"versions": [7]}}}',
        '{"version_label": {"stable": 1}}',
        '{"version_labels": {"stable": "one"}}',
    ],
)
async def test_a_policy_that_cannot_be_followed_changes_nothing(tmp_path, polled, caplog, text):
    model = tmp_path / "model"
    for version in (1, 2):
        export(model, version)
    set_policy(model, {"specific": {"versions": [1]}}, stable=1)
    async with serving(tmp_path, Loader()) as repository:
        (model / ".new").write_text(text)
        (model / ".new").rename(model / "version_policy.json")
        await polled()
        export(model, 3)
        for _ in range(3):
            await polled()
        assert states(repository, "model") == {1: "AVAILABLE"}
        assert repository.labelled("model", "stable") == 1
        told = [record for record in caplog.records if "version_policy.json" in record.message]
        assert 1 <= len(told) <= 2  # with the versions that there are, and again with the third
        set_policy(model, {"specific": {"versions": [2]}})
        await until(lambda: leased(repository, "model") == 2)


async def test_a_model_that_comes_with_a_wrong_policy_is_not_served(tmp_path):
    export(tmp_path / "model", 1)
    set_policy(tmp_path / "model", {"specific": {"versions": [7]}})
    async with serving(tmp_path, Loader()) as repository:
        [status] = repository.status("model")
        assert (status.state, status.error_code) == ("END", "FAILED_PRECONDITION")
        assert "version_policy.json cannot be followed" in status.error_message
        set_policy(tmp_path / "model", {"specific": {"versions": [1]}})
        await until(lambda: states(repository, "model") == {1: "AVAILABLE"})


async def test_a_pinned_version_whose_folder_goes_is_not_replaced(tmp_path, polled):
    for version in (1, 2):
        export(tmp_path / "model", version)
    set_policy(tmp_path / "model", {"specific": {"versions": [1]}})
    async with serving(tmp_path, Loader()) as repository:
        shutil.rmtree(tmp_path / "model" / "1")
        for _ in range(3):
            await polled()
        assert leased(repository, "model") == 1


async def test_a_new_version_takes_over_without_a_gap(tmp_path):
    export(tmp_path / "model", 1)
    loader = Loader()
    async with serving(tmp_path, loader) as repository:
        loader.open.clear()
        with repository.lease("model") as old:
            export(tmp_path / "model", 2)
            await until(lambda: ("model", 2) in loader.attempts)
            assert states(repository, "model") == {1: "AVAILABLE", 2: "LOADING"}
            assert leased(repository, "model") == 1
            with pytest.raises(Unavailable, match="'model' is being loaded"):
                repository.lease("model", 2)
            loader.open.set()
            await until(lambda: states(repository, "model")[2] == "AVAILABLE")
            assert leased(repository, "model") == 2
            # old is lent once, to this test
            await until(lambda: states(repository, "model")[1] == "UNLOADING")
            with pytest.raises(NotFound, match=r"versions \[2\]. Received: version 1"):
                repository.lease("model", 1)
            assert not old.closed
        await until(lambda: states(repository, "model") == {1: "END", 2: "AVAILABLE"})
        assert old.closed == 1
        assert repository.status("model")[0] == VersionStatus(1, "END", "OK", "")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (
            LoadError("It was exported by a newer one."),
            ("INVALID_ARGUMENT", "It was exported by a newer one."),
        ),
        (MemoryError("/secret"), ("RESOURCE_EXHAUSTED", "There was not enough memory to load it.")),
        (
            ValueError("/secret/1"),
            ("INTERNAL", "Loading it failed (ValueError); the server's log says more."),
        ),
        *(
            (
                error("/secret"),
                ("INTERNAL", f"Loading it failed ({error.__name__}); the server's log says more."),
            )
            for error in (
                OSError,
                StopIteration,
                SystemExit,
                KeyboardInterrupt,
                RecursionError,
                asyncio.CancelledError,
            )
        ),
    ],
)
async def test_a_broken_version_takes_nothing_away(tmp_path, polled, error, status):
    export(tmp_path / "model", 1)
    loader = Loader(error)
    async with serving(tmp_path, loader) as repository:
        broken = export(tmp_path / "model", 2, BROKEN)
        await until(lambda: states(repository, "model").get(2) == "END")
        assert repository.status("model") == [
            VersionStatus(1, "AVAILABLE"),
            VersionStatus(2, "END", *status),
        ]
        assert leased(repository, "model") == 1
        assert repository.ready()
        with pytest.raises(Unavailable, match="its status says why"):
            repository.lease("model", 2)
        await polled()
        assert loader.attempts.count(("model", 2)) == 1

        (broken / "saved_model.pb").write_text("good")
        await until(lambda: states(repository, "model") == {1: "END", 2: "AVAILABLE"})
        assert leased(repository, "model") == 2


@pytest.mark.parametrize("versions", [1, 2])
async def test_a_broken_version_is_passed_over_at_the_start(tmp_path, versions):
    for version in (1, 2, 3):
        export(tmp_path / "model", version, BROKEN if version == 3 else "good")
    async with serving(tmp_path, Loader(), versions=versions) as repository:
        served = [2] if versions == 1 else [1, 2]
        assert states(repository, "model") == dict.fromkeys(served, "AVAILABLE") | {3: "END"}
        assert repository.ready()


async def test_a_broken_or_a_new_model_leaves_the_server_ready(tmp_path, polled):
    export(tmp_path / "good", 1)
    export(tmp_path / "broken", 1, BROKEN)
    loader = Loader()
    async with serving(tmp_path, loader) as repository:
        assert repository.ready()
        assert states(repository, "broken") == {1: "END"}
        loader.open.clear()
        export(tmp_path / "new", 1)
        await until(lambda: ("new", 1) in loader.attempts)
        assert repository.ready()
        assert leased(repository, "good") == 1
        loader.open.set()
        await until(lambda: states(repository, "new") == {1: "AVAILABLE"})
        shutil.rmtree(tmp_path / "good")
        shutil.rmtree(tmp_path / "new")
        await until(lambda: repository.names() == ["broken"])
        assert not repository.ready()  # nothing is left that serves


CHANGES = {
    "a new file": lambda path: (path / "variables" / "more").write_text(""),
    "a file gone": lambda path: (path / "variables" / "variables.index").unlink(),
    "a name": lambda path: (path / "variables" / "variables.index").rename(
        path / "variables" / "other"
    ),
    "a size": lambda path: (path / "variables" / "variables.index").write_text(
        "longer than it was"
    ),
    "a time": lambda path: os.utime(path / "variables" / "variables.index", (1, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_failed_version_is_tried_again_when_it_changed(tmp_path, polled, change):
    path = export(tmp_path / "model", 1, BROKEN)
    (path / "link").symlink_to("nowhere")  # of which there is no size
    loader = Loader()
    async with serving(tmp_path, loader) as repository:
        assert states(repository, "model") == {1: "END"}
        assert not repository.ready()
        with pytest.raises(Unavailable, match="its status says why"):
            repository.lease("model")
        await polled()
        assert len(loader.attempts) == 1
        CHANGES[change](path)
        await polled()
        assert len(loader.attempts) > 1
        tried = len(loader.attempts)
        await polled()
        assert len(loader.attempts) == tried


async def test_what_vanishes_is_drained(tmp_path):
    directory = tmp_path / "models"
    for name, version in (("one", 1), ("one", 2), ("two", 1)):
        export(directory / name, version)
    loader = Loader()
    async with serving(directory, loader) as repository:
        shutil.rmtree(directory / "one" / "2")  # 1 was not wanted so far
        await until(lambda: leased(repository, "one") == 1)
        await until(lambda: states(repository, "one") == {1: "AVAILABLE"})
        with repository.lease("two") as servable:
            shutil.rmtree(directory / "two")
            await until(lambda: repository.names() == ["one"])
            with pytest.raises(NotFound, match=r"Available: one. Received: 'two'"):
                repository.lease("two")
            assert states(repository, "two") == {1: "UNLOADING"}
            assert repository.ready()
            assert not servable.closed
        await until(lambda: servable.closed)

        directory.rename(tmp_path / "away")
        await until(lambda: all(loaded.closed for loaded in loader.loaded))
        assert repository.names() == []
        assert not repository.ready()
        with pytest.raises(NotFound, match="There is none now"):
            repository.lease("one")
        (tmp_path / "away").rename(directory)
        await until(repository.ready)
        assert leased(repository, "one") == 1
        with pytest.raises(NotFound):
            repository.status("two")


async def test_the_last_version_stays_while_nothing_takes_its_place(tmp_path, polled):
    loaded = export(tmp_path / "model", 1)
    loader = Loader()
    async with serving(tmp_path, loader) as repository:
        (loaded / "saved_model.pb").write_text(BROKEN)
        await polled()
        assert leased(repository, "model") == 1
        assert len(loader.attempts) == 1
        repaired = export(tmp_path / "model", 2, BROKEN)
        shutil.rmtree(tmp_path / "model" / "1")
        await polled()
        assert leased(repository, "model") == 1
        (repaired / "saved_model.pb").write_text("good")
        await until(lambda: states(repository, "model") == {2: "AVAILABLE"})


@pytest.mark.parametrize("broken", ["models", "models/model"])
async def test_an_error_of_the_file_system_changes_nothing(tmp_path, polled, caplog, broken):
    export(tmp_path / "disk" / "models" / "model", 1)
    export(tmp_path / "disk" / "models" / "other", 1)
    link = tmp_path / broken
    if link.name == "model":
        (tmp_path / "models").mkdir()
    link.symlink_to(tmp_path / "disk" / broken)

    def point(target: object) -> None:
        (tmp_path / "new").symlink_to(target)
        (tmp_path / "new").replace(link)

    caplog.set_level(logging.WARNING, "keras_preact.serving")
    loader = Loader()
    async with serving(tmp_path / "models", loader) as repository:
        assert leased(repository, "model") == 1
        point(link)  # to itself: OSError, too many levels of symbolic links
        for _ in range(3):
            await polled()
        assert leased(repository, "model") == 1
        assert "model" in repository.names()
        assert repository.ready()
        assert (
            len([record for record in caplog.records if "could not be read" in record.message]) == 1
        )
        if link.name == "model":
            export(tmp_path / "models" / "third", 1)
            await until(lambda: "third" in repository.names())
        point(tmp_path / "disk" / broken)
        export(tmp_path / "disk" / "models" / "model", 2)
        await until(lambda: leased(repository, "model") == 2)


async def test_no_directory_yet(tmp_path):
    async with serving(tmp_path / "models", Loader()) as repository:
        assert repository.names() == []
        assert not repository.ready()
        export(tmp_path / "models" / "model", 1)
        await until(repository.ready)


@pytest.mark.parametrize(
    ("name", "version", "error", "message"),
    [
        (
            "digit",
            None,
            NotFound,
            "Did you mean 'digits'? Available: cifar, digits. Received: 'digit'",
        ),
        ("", None, NotFound, "Available: cifar, digits. Received: ''"),
        ("digits", 2, NotFound, "'digits' is served in the versions [3]. Received: version 2"),
        ("digits", 0, NotFound, "'digits' is served in the versions [3]. Received: version 0"),
        ("cifar", None, Unavailable, "'cifar' is not available; its status says why."),
        ("cifar", 1, Unavailable, "'cifar' is not available; its status says why."),
        ("cifar", 2, NotFound, "'cifar' is served in the versions []. Received: version 2"),
    ],
)
async def test_what_cannot_be_lent(tmp_path, name, version, error, message):
    export(tmp_path / "digits", 2)
    export(tmp_path / "digits", 3)
    export(tmp_path / "cifar", 1, BROKEN)
    async with serving(tmp_path, Loader()) as repository:
        with pytest.raises(error) as raised, repository.lease(name, version):
            pass
        assert raised.value.message.endswith(message)


async def test_stop_leaves_what_is_in_use_to_its_last_lease(tmp_path):
    export(tmp_path / "model", 1)
    export(tmp_path / "other", 1)
    loader = Loader()
    async with serving(tmp_path, loader) as repository:
        pass
    assert [loaded.closed for loaded in loader.loaded] == [1, 1]
    repository = Repository(Settings(tmp_path, drain_seconds=0.01), loader)
    await repository.stop()  # before it started
    await repository.start()
    with repository.lease("model") as servable:
        await repository.stop()
        assert not servable.closed
        with pytest.raises(Unavailable, match="stopping"):
            repository.lease("model")
        with pytest.raises(Unavailable, match="stopping"):
            repository.lease("other", 1)
    await until(lambda: servable.closed)
    await repository.stop()
    assert [loaded.closed for loaded in loader.loaded] == [1, 1, 1, 1]


@pytest.mark.parametrize("drain_seconds", [0.01, 60.0])
async def test_stop_while_a_version_is_being_loaded(tmp_path, drain_seconds):
    for name in ("first", "second"):
        export(tmp_path / name, 1)
    loader = Loader()
    loader.open.clear()
    repository = Repository(Settings(tmp_path, drain_seconds=drain_seconds), loader)
    starting = asyncio.create_task(repository.start())
    await until(lambda: loader.attempts)
    assert [states(repository, name) for name in ("first", "second")] == [
        {1: "LOADING"},
        {1: "START"},
    ]
    assert not repository.ready()
    with pytest.raises(Unavailable, match="'second' is being loaded"):
        repository.lease("second")
    starting.cancel()
    stopping = asyncio.create_task(repository.stop())
    if drain_seconds < 1:
        await stopping
    loader.open.set()
    await stopping
    await until(lambda: loader.loaded and loader.loaded[0].closed)
    assert loader.attempts == [("first", 1)]


async def test_a_lease_that_lasts_is_logged_and_closing_may_fail(tmp_path, caplog):
    export(tmp_path / "stubborn", 1)

    def messages() -> str:
        return "\n".join(record.message for record in caplog.records)

    caplog.set_level(logging.INFO, "keras_preact.serving")
    async with serving(tmp_path, Loader(), drain_seconds=0.01) as repository:
        with repository.lease("stubborn") as servable:
            export(tmp_path / "stubborn", 2)
            await until(lambda: "stubborn version 1 is still in use" in messages())
            assert not servable.closed
        await until(lambda: states(repository, "stubborn") == {1: "END", 2: "AVAILABLE"})
        assert "stubborn version 1 could not be closed properly" in messages()
    records = [record for record in caplog.records if record.message.startswith("loaded ")]
    assert [(record.model, record.version) for record in records] == [
        ("stubborn", 1),
        ("stubborn", 2),
    ]


async def test_an_exception_in_a_pass_does_not_end_the_polling(tmp_path, caplog, monkeypatch):
    export(tmp_path / "model", 1)
    scan, failed = _scan.files, []

    def files(folder):
        if not failed:
            failed.append(folder)
            raise RuntimeError("what nobody foresaw")
        return scan(folder)

    monkeypatch.setattr(_scan, "files", files)
    async with serving(tmp_path, Loader()) as repository:
        await until(lambda: states(repository, "model") == {1: "AVAILABLE"})
    assert "what nobody foresaw" in caplog.text


class World:
    """Random changes to a model's folder, in which at every moment there is some
    version, though maybe a broken one.
    """

    def __init__(self, model: Path, seed: int):
        self.model = model
        self.random = random.Random(seed)
        self.numbers = itertools.count(1)
        self.versions: dict[int, str] = {}
        self.add("good")

    def add(self, content: str) -> None:
        number = next(self.numbers)
        if content == "copied":  # slowly, and not all yet
            (self.model / str(number) / "variables").mkdir(parents=True)
            (self.model / str(number) / "saved_model.pb").write_text("go")
            content = BROKEN
        else:
            export(self.model, number, content)
        self.versions[number] = content

    def repair(self) -> None:
        for number in [number for number, content in self.versions.items() if content == BROKEN][
            :1
        ]:
            (self.model / str(number) / "saved_model.pb").write_text("good")
            self.versions[number] = "good"

    def remove(self) -> None:
        if len(self.versions) > 1:
            number = self.random.choice(list(self.versions))
            del self.versions[number]
            if self.random.random() < 0.5:
                shutil.rmtree(self.model / str(number))
            else:
                (self.model / str(number)).rename(self.model.parent.parent / f"{number}-away")

    def step(self) -> None:
        kind = self.random.choice(["good", BROKEN, "copied", "repair", "remove", "remove"])
        {"repair": self.repair, "remove": self.remove}.get(kind, lambda: self.add(kind))()


@pytest.mark.parametrize("versions", [1, 2, None])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 9))]
)
async def test_leases_while_versions_come_and_go(tmp_path, polled, seed, versions):
    world = World(tmp_path / "models" / "model", seed)
    leases = []

    async def client(repository: Repository, number: int) -> None:
        choice = random.Random(f"{seed} {number}")
        while world.versions:
            available = [
                version
                for version, state in states(repository, "model").items()
                if state == "AVAILABLE"
            ]
            wanted = choice.choice([None, None, *available])
            # Never refused: there is an available version at every moment
            with repository.lease("model", wanted) as servable:
                assert servable.version == (wanted or max(available))
                for _ in range(choice.choice([0, 1, 5, 100])):
                    assert not servable.closed
                    await asyncio.sleep(0)
                assert not servable.closed
            leases.append(servable.version)
            await asyncio.sleep(0)

    loader = Loader()
    async with serving(
        tmp_path / "models", loader, versions=versions, poll_seconds=0.0005
    ) as repository:
        clients = [asyncio.create_task(client(repository, number)) for number in range(20)]
        for _ in range(150):
            world.step()
            for _ in range(world.random.randrange(60)):
                await asyncio.sleep(0)
            if world.random.random() < 0.3:
                await polled()
            assert repository.ready()
        world.add("good")

        good = sorted(number for number, content in world.versions.items() if content == "good")
        served = good if versions is None else good[-versions:]
        await until(
            lambda: (
                [
                    number
                    for number, state in states(repository, "model").items()
                    if state == "AVAILABLE"
                ]
                == served
            )
        )
        await until(lambda: sum(not loaded.closed for loaded in loader.loaded) == len(served))
        world.versions = {}
        await asyncio.gather(*clients)
    assert loader.most_running == 1
    assert len(loader.loaded) > 20
    assert len(loader.attempts) > len(loader.loaded)
    assert len(leases) > 2000
    assert len(set(leases)) > 10


def test_a_look_never_misses_both_the_old_version_and_the_new(tmp_path):
    for version in (1, 2):
        export(tmp_path / "model", version)
    done = threading.Event()

    def replace():
        for version in range(2, 3000):
            (tmp_path / "model" / str(version)).rename(tmp_path / "model" / str(version + 1))
            if version % 2:
                (tmp_path / "model" / "1").rename(tmp_path / "model" / ".away")
                (tmp_path / "model" / ".away").rename(tmp_path / "model" / "1")
        done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    looks = 0
    while not done.is_set():
        with contextlib.suppress(
            OSError
        ):  # it changed whenever it was read: nothing is concluded from that
            assert _scan.versions(tmp_path / "model")
        looks += 1
    thread.join()
    assert looks > 100
