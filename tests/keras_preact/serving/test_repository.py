"""The repository with real folders and renames; what it loads from them is a stand-in
that knows whether it was closed.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest

from keras_preact.export.version import VersionError, layout, number_of
from keras_preact.serving import repository as module
from keras_preact.serving.errors import NotFound, Unavailable
from keras_preact.serving.repository import Repository
from keras_preact.serving.settings import Settings
from tests.keras_preact.export import layouts

pytestmark = pytest.mark.anyio

BROKEN, GONE = "broken", "gone"
LATIN = os.fsdecode(b"caf\xe9")  # a name that is not UTF-8


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
        self.name, self.version = path.parent.name, number_of(path.name)
        self.closed = 0

    async def close(self):
        await asyncio.sleep(0)
        self.closed += 1


class Loader:
    """Loads what holds "good", never two at once. Holds on while `open` is not set."""

    def __init__(self, error: BaseException | None = None):
        self.error = error or VersionError(Path("models/m/1"), "The file is broken.")
        self.open = threading.Event()
        self.open.set()
        self.loaded: list[Loaded] = []
        self.attempts: list[tuple[str, int]] = []
        self.alone = threading.Lock()

    def __call__(self, path: Path, settings: Settings) -> Loaded:
        assert self.alone.acquire(blocking=False)
        try:
            self.attempts.append((path.parent.name, number_of(path.name)))
            assert self.open.wait(60)
            if (path / "saved_model.pb").read_text() != "good":
                raise self.error
            self.loaded.append(Loaded(path))
            return self.loaded[-1]
        finally:
            self.alone.release()


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def polled(monkeypatch):
    """Return a function that waits until all that is in the directory now was seen and
    dealt with.
    """
    scan = mock.Mock(wraps=module.models)
    monkeypatch.setattr(module, "models", scan)

    async def wait():
        before = scan.call_count
        await until(lambda: scan.call_count >= before + 2)

    return wait


@contextlib.asynccontextmanager
async def serving(directory: Path, load, **options):
    settings = Settings(directory, **{"poll_seconds": 0.001, "drain_seconds": 60.0} | options)
    repository = Repository(settings, load)
    tasks = asyncio.all_tasks()
    try:
        await repository.start()
        yield repository
    finally:
        was_loading = is_loading(repository)
        await repository.stop()
    if was_loading:  # `stop` does not wait for it
        await asyncio.gather(*asyncio.all_tasks() - tasks)
    assert all(loaded.closed == 1 for loaded in load.loaded)


def is_loading(repository: Repository) -> bool:
    names = repository.names()
    return any("LOADING" in states(repository, name).values() for name in names)


def states(repository: Repository, name: str) -> dict[int, str]:
    return {status.version: status.state for status in repository.status(name)}


def leased(repository: Repository, name: str, version: int | None = None) -> int:
    with repository.lease(name, version) as servable:
        assert not servable.closed
        return servable.version


def warnings(caplog, words: str) -> int:
    """Return how many warnings match these words."""
    texts = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    return sum(re.search(words, text) is not None for text in texts)


def refused(repository: Repository, error: type, words: str, name: str, version=None) -> None:
    with pytest.raises(error, match=words), repository.lease(name, version):
        pass


async def test_what_is_a_model(tmp_path):
    for name, version in (("one", 1), ("one", 12), ("two", 3), ("empty", 1), (".hidden", 1)):
        export(tmp_path / name, version)
    (tmp_path / "empty" / "1" / "saved_model.pb").unlink()
    for name in ("²", "-1", "1.0", "v1", "1e3", "9" * 20):
        export(tmp_path / "one", 7).rename(tmp_path / "one" / name)
    export(tmp_path / "named", 1).rename(tmp_path / "named" / "latest")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "model_card.json").write_text("{}")
    (tmp_path / "one" / "13").write_text("a file")
    (tmp_path / "one" / ".export-x" / "version").mkdir(parents=True)
    (tmp_path / "gone").symlink_to("nowhere")
    async with serving(tmp_path, Loader(), versions=None) as repository:
        assert repository.names() == ["one", "two"]
        assert states(repository, "one") == {1: "AVAILABLE", 12: "AVAILABLE"}
        assert states(repository, "two") == {3: "AVAILABLE"}
        problems = {name: number for name, number in repository.problems().items() if number}
        assert problems == {"empty": 1, "named": 1, "nothing": 1}


@pytest.mark.parametrize("name", layouts.LAYOUTS)
async def test_a_model_in_the_wrong_place_is_explained_once(tmp_path, polled, caplog, name):
    """In the log, in the metric and to clients, until it is in the right place."""
    files, versions, words = layouts.LAYOUTS[name]
    export(tmp_path / "models" / "good", 1)
    layouts.build(tmp_path / "models" / "m", files)
    async with serving(tmp_path / "models", Loader(), versions=None) as repository:
        for _ in range(2):
            assert warnings(caplog, f"^model m: .*{words}") == bool(words)
            assert repository.problems().get("m", 0) == bool(words)
            assert repository.problems()["good"] == 0
            if versions:
                assert repository.available("m") == list(versions)
                assert [leased(repository, "m", number) for number in versions] == list(versions)
            else:
                text = f"'m' is not served. .*{words}" if words else "Unknown model"
                refused(repository, NotFound, text, "m")
            await polled()
            await polled()
        shutil.rmtree(tmp_path / "models" / "m")
        export(tmp_path / "models" / "m", 1)
        await until(lambda: repository.problems() == {"good": 0, "m": 0})
        await until(lambda: repository.available("m") == [1])


@pytest.mark.parametrize(
    ("name", "words"),
    [("a:b", "A colon ends a model's name"), ("stats", "The address /v2/models/stats is")],
)
async def test_a_name_that_not_all_addresses_can_hold(tmp_path, polled, caplog, name, words):
    export(tmp_path / name, 1)
    async with serving(tmp_path, Loader()) as repository:
        await polled()
        assert warnings(caplog, f"^model {name}: {words}") == 1
        assert repository.problems() == {name: 1}
        assert leased(repository, name) == 1  # by the other addresses


@pytest.mark.parametrize(
    ("files", "served", "words"),
    [
        ({"m/1": ""}, "m/1", "It is itself a version, 1. Use the folder above it"),
        ({"m": ""}, "m", "Move its content into a folder 1 inside it"),
        ({"m/1": ""}, "m", ""),
        ({"m/v1": ""}, "m", ""),  # the model v1 is in the wrong place
        ({"m.onnx": "file"}, ".", "It holds no folder of a model"),
        ({}, ".", "It holds no folder of a model"),
        ({f"{LATIN}/1": ""}, ".", f"that is not UTF-8: {re.escape(ascii(LATIN))}. Give"),
        ({LATIN: None, f"{LATIN}.txt": "file"}, ".", "UTF-8"),
        ({f"{LATIN}/1": ""}, LATIN, "UTF-8"),
    ],
)
async def test_a_folder_that_holds_no_models(tmp_path, polled, caplog, files, served, words):
    layouts.build(tmp_path / "models", files)
    async with serving(tmp_path / "models" / served, Loader()) as repository:
        await polled()
        assert warnings(caplog, f"^the folder of models: .*{words}") == bool(words)
        assert repository.problems().get("", 0) == bool(words)
        assert bool(repository.names()) == ((files, served) == ({"m/1": ""}, "m"))


def set_policy(model: Path, choice=None, **labels) -> None:
    """Write a policy, whole at once."""
    policy = {"version_labels": labels}
    if choice is not None:
        policy["model_version_policy"] = choice
    (model / ".policy").write_text(json.dumps(policy))
    (model / ".policy").rename(model / "version_policy.json")


@pytest.mark.parametrize(
    ("versions", "choice", "served"),
    [
        (1, None, [10]),
        (2, None, [9, 10]),
        (None, None, [1, 2, 9, 10]),
        (2, {"specific": {"versions": [2, 9]}}, [2, 9]),
        (2, {"latest": {"num_versions": 3}}, [2, 9, 10]),
        (2, {"all": {}}, [1, 2, 9, 10]),
    ],
)
async def test_the_highest_versions_are_served_or_those_of_a_policy(
    tmp_path, versions, choice, served
):
    for version in (1, 2, 9, 10):
        export(tmp_path / "model", version)
    set_policy(tmp_path / "model", choice)
    loader = Loader()
    async with serving(tmp_path, loader, versions=versions) as repository:
        assert states(repository, "model") == dict.fromkeys(served, "AVAILABLE")
        assert leased(repository, "model") == served[-1]
        assert [leased(repository, "model", version) for version in served] == served
        assert len(loader.attempts) == len(served)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Invalid JSON"),
        ('{"model_version_policy": {"latest": {}, "all": {}}}', "one of .* Received: all, latest"),
        ('{"model_version_policy": {"latest": {"num_versions": 0}}}', "latest.num_versions: "),
        ('{"model_version_policy": {"specific": {"versions": [7]}}}', "version 7: END. .* chooses"),
        ('{"version_label": {"stable": 1}}', "version_label: "),
    ],
)
async def test_a_policy_rolls_back_and_one_that_cannot_be_followed_changes_nothing(
    tmp_path, polled, text, words, caplog
):
    model = tmp_path / "model"
    for version in (1, 2):
        export(model, version)
    loader = Loader()
    async with serving(tmp_path, loader) as repository:
        loader.open.clear()
        set_policy(model, {"specific": {"versions": [1]}}, stable=1)
        await until(lambda: ("model", 1) in loader.attempts)
        assert leased(repository, "model") == 2
        loader.open.set()
        await until(lambda: leased(repository, "model") == 1)
        await polled()
        assert repository.problems() == {"model": 0}
        (model / ".new").write_text(text)
        (model / ".new").rename(model / "version_policy.json")
        await polled()
        await polled()
        assert warnings(caplog, "version_policy.json") == warnings(caplog, words) == 1
        export(model, 3)
        await polled()
        assert repository.available("model") == [1]
        assert repository.problems() == {"model": 1}
        assert repository.labelled("model", "stable") == 1
        with pytest.raises(NotFound, match=r"labels \['stable'\].* Received: 'canary'"):
            repository.labelled("model", "canary")
        (model / "version_policy.json").unlink()
        await until(lambda: leased(repository, "model") == 3)
        await until(lambda: repository.problems() == {"model": 0})


async def test_a_policy_that_chooses_a_version_that_does_not_exist(tmp_path, polled, caplog):
    """The log says so once per change, and the version is served when it exists."""
    model = tmp_path / "model"
    export(model, 1)
    set_policy(model, {"specific": {"versions": [1, 5]}}, canary=5)
    async with serving(tmp_path, Loader()) as repository:
        for times in (1, 2):
            await until(lambda: repository.status("model")[-1].error_code == "NOT_FOUND")
            await polled()
            await polled()
            assert warnings(caplog, "model version 5: END. version_policy.json") == times
            assert states(repository, "model") == {1: "AVAILABLE", 5: "END"}
            assert repository.problems() == {"model": 1}
            assert leased(repository, "model") == 1
            with pytest.raises(Unavailable):
                leased(repository, "model", repository.labelled("model", "canary"))
            export(model, 5)
            await until(lambda: states(repository, "model") == {1: "AVAILABLE", 5: "AVAILABLE"})
            await polled()
            assert repository.problems() == {"model": 0}
            shutil.rmtree(model / "5")


async def test_a_policy_of_a_model_without_versions(tmp_path, caplog):
    (tmp_path / "model").mkdir()
    set_policy(tmp_path / "model", {"specific": {"versions": [5]}}, stable=5)
    async with serving(tmp_path, Loader()) as repository:
        assert repository.problems() == {"model": 1}
        assert states(repository, "model") == {5: "END"}
        export(tmp_path / "model", 5)
        await until(lambda: states(repository, "model") == {5: "AVAILABLE"})
        assert repository.labelled("model", "stable") == 5


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
            refused(repository, Unavailable, "'model' is not available, or not yet", "model", 2)
            loader.open.set()
            await until(lambda: states(repository, "model")[2] == "AVAILABLE")
            assert leased(repository, "model") == 2
            # old is lent once, to this test
            await until(lambda: states(repository, "model")[1] == "UNLOADING")
            refused(repository, NotFound, r"versions \[2\]. Received: version 1", "model", 1)
            assert not old.closed
        await until(lambda: states(repository, "model") == {1: "END", 2: "AVAILABLE"})
        assert old.closed == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (
            VersionError(Path("/secret"), "It is of a newer one."),
            ("INVALID_ARGUMENT", "It is of a newer one."),
        ),
        (
            OSError("/secret"),
            ("INTERNAL", "Loading it failed (OSError); the server's log says more."),
        ),
    ],
)
async def test_a_broken_version_takes_nothing_away(tmp_path, polled, error, status, caplog):
    loaded = export(tmp_path / "model", 1)
    loader = Loader(error)
    async with serving(tmp_path, loader) as repository:
        (loaded / "saved_model.pb").write_text(BROKEN)  # which is not loaded again
        broken = export(tmp_path / "model", 2, BROKEN)
        await until(lambda: states(repository, "model").get(2) == "END")
        assert states(repository, "model") == {1: "AVAILABLE", 2: "END"}
        one = repository.status("model")[1]
        assert (one.error_code, one.error_message) == status
        assert repository.problems() == {"model": 1}
        assert leased(repository, "model") == 1
        refused(
            repository,
            Unavailable,
            "GET /v1/models/model says why. Received: version 2",
            "model",
            2,
        )
        await polled()
        assert loader.attempts.count(("model", 2)) == 1
        assert warnings(caplog, re.escape(f"model version 2: END. {status[1]}")) == 1
        # It is tried again when any of its files changes, or who may read it.
        (broken / "saved_model.pb").chmod(0o600)
        await polled()
        tries = loader.attempts.count(("model", 2))
        assert tries >= 2
        (broken / "variables" / "more").write_text("")
        await polled()
        assert loader.attempts.count(("model", 2)) > tries
        (broken / "saved_model.pb").write_text("good")
        await until(lambda: states(repository, "model") == {1: "END", 2: "AVAILABLE"})
        assert leased(repository, "model") == 2
        assert repository.problems() == {"model": 0}


async def test_a_higher_version_ends_the_problem_of_a_broken_one(tmp_path):
    export(tmp_path / "model", 1, BROKEN)
    export(tmp_path / "model", 2, BROKEN)
    async with serving(tmp_path, Loader()) as repository:
        assert repository.problems() == {"model": 2}
        export(tmp_path / "model", 3)
        await until(lambda: states(repository, "model") == {3: "AVAILABLE"})
        assert repository.problems() == {"model": 0}


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
            await until(lambda: states(repository, "two") == {1: "UNLOADING"})
            refused(repository, NotFound, r"versions \[\]. Received: no version", "two")
            assert not servable.closed
        await until(lambda: repository.names() == ["one"])
        assert servable.closed
        refused(repository, NotFound, "Available: one. Received: 'two'", "two")
        directory.rename(tmp_path / "away")
        await until(lambda: all(loaded.closed for loaded in loader.loaded))
        await until(lambda: repository.names() == repository.servables() == [])
        (tmp_path / "away").rename(directory)
        await until(repository.servables)
        assert leased(repository, "one") == 1


async def test_stop_leaves_what_is_in_use_to_its_last_lease(tmp_path):
    export(tmp_path / "model", 1)
    loader = Loader()
    repository = Repository(Settings(tmp_path, drain_seconds=0.01), loader)
    await repository.start()
    with repository.lease("model") as servable:
        await repository.stop()
        assert not servable.closed
        refused(repository, Unavailable, "stopping", "model")
    await until(lambda: servable.closed)
    assert [loaded.closed for loaded in loader.loaded] == [1]


async def test_stop_while_a_version_is_being_loaded(tmp_path):
    loader = Loader()
    async with serving(tmp_path, loader) as repository:
        loader.open.clear()
        for name in ("first", "second"):
            export(tmp_path / name, 1)
        await until(lambda: loader.attempts)
        assert states(repository, "first") == {1: "LOADING"}
        assert not repository.servables()
        await repository.stop()  # does not wait for it
        assert not loader.loaded
        loader.open.set()
        await until(lambda: loader.loaded and loader.loaded[0].closed)
    assert loader.attempts == [("first", 1)]
    assert [loaded.closed for loaded in loader.loaded] == [1]


def change(model: Path, versions: dict[int, str], choice: random.Random) -> None:
    """Change a model's folder, in which at every moment there is some version, though
    maybe a broken one. `versions`: what each holds, gone ones too.
    """
    here = [number for number in versions if versions[number] != GONE]
    broken = [number for number in here if versions[number] == BROKEN]
    kind = choice.choice(["good", BROKEN, BROKEN, "repair", GONE, GONE])
    if kind == "repair" and broken:
        (model / str(broken[0]) / "saved_model.pb").write_text("good")
        versions[broken[0]] = "good"
    elif kind == GONE and len(here) > 1:
        number = choice.choice(here)
        versions[number] = GONE
        shutil.rmtree(model / str(number))
    elif kind in ("good", BROKEN):
        versions[len(versions)] = kind
        export(model, len(versions) - 1, kind)


@pytest.mark.parametrize(("seed", "versions"), [(0, 1), (1, 2), (2, None)])
async def test_leases_while_versions_come_and_go(tmp_path, polled, seed, versions):
    model, choice, content = tmp_path / "models" / "model", random.Random(seed), {0: "good"}
    export(model, 0)
    stopped = False

    async def client(repository: Repository) -> None:
        while not stopped:
            available = repository.available("model")
            wanted = choice.choice([None, None, *available])
            # Never refused: there is an available version at every moment
            with repository.lease("model", wanted) as servable:
                assert servable.version == (max(available) if wanted is None else wanted)
                for _ in range(choice.choice([0, 1, 5, 100])):
                    assert not servable.closed
                    await asyncio.sleep(0)
                assert not servable.closed
            # a loop without a pause would leave the threads that read the folders no time
            await asyncio.sleep(0.001)

    loader = Loader()
    async with serving(model.parent, loader, versions=versions, poll_seconds=0.0005) as repository:
        clients = [asyncio.create_task(client(repository)) for _ in range(20)]
        for _ in range(150):
            change(model, content, choice)
            for _ in range(choice.randrange(60)):
                await asyncio.sleep(0)
            if choice.random() < 0.3:
                await polled()
            assert repository.servables()
        content[len(content)] = "good"
        export(model, len(content) - 1)

        good = [number for number in content if content[number] == "good"]
        served = good if versions is None else good[-versions:]
        await until(lambda: repository.available("model") == served)
        await until(lambda: sum(not loaded.closed for loaded in loader.loaded) == len(served))
        stopped = True
        await asyncio.gather(*clients)


def test_a_look_never_misses_both_the_old_version_and_the_new(tmp_path):
    for version in (1, 2):
        export(tmp_path / "model", version)

    def replace():
        for version in range(2, 1000):
            (tmp_path / "model" / str(version)).rename(tmp_path / "model" / str(version + 1))

    thread = threading.Thread(target=replace)
    thread.start()
    (tmp_path / "model" / "1").rename(tmp_path / "gone")
    while thread.is_alive():
        # If it changed whenever it was read, nothing is concluded from that.
        with contextlib.suppress(OSError):
            assert layout(tmp_path / "model").versions
    thread.join()


async def test_the_event_loop_never_waits_for_the_disk(tmp_path, monkeypatch):
    """Which may hang, as a folder of another machine may."""
    export(tmp_path / "good", 1)
    set_policy(tmp_path / "good", {"specific": {"versions": [1, 2]}})
    export(tmp_path / "broken", 1, BROKEN)
    layouts.build(tmp_path / "misplaced", {"v1": ""})
    threads = []

    def noted(function):
        def call(*arguments, **options):
            threads.append(threading.current_thread())
            return function(*arguments, **options)

        return call

    repository = Repository(Settings(tmp_path, drain_seconds=60.0), Loader())
    with monkeypatch.context() as patch:
        for name in ("stat", "listdir", "scandir", "open"):
            patch.setattr(os, name, noted(getattr(os, name)))
        await repository.start()
    assert repository.problems() == {"broken": 1, "good": 1, "misplaced": 1}
    assert threads
    assert threading.main_thread() not in threads
    await repository.stop()


async def test_an_error_of_the_file_system_changes_nothing(tmp_path, polled, caplog):
    export(tmp_path / "disk" / "model", 1)
    link = tmp_path / "models"
    link.symlink_to(tmp_path / "disk")

    def point(target: Path) -> None:
        (tmp_path / "new").symlink_to(target)
        (tmp_path / "new").replace(link)

    async with serving(link, Loader()) as repository:
        point(link)  # to itself: OSError, too many levels of symbolic links
        await polled()
        await polled()
        assert leased(repository, "model") == 1
        assert repository.problems() == {"model": 0, "": 1}
        assert warnings(caplog, "the folder of models could not be read") == 1
        point(tmp_path / "disk")
        export(tmp_path / "disk" / "model", 2)
        await until(lambda: leased(repository, "model") == 2)
        await until(lambda: repository.problems() == {"model": 0})
