"""Versions of a model that come, go and are broken under load: no request fails, every
answer is right.
"""

import shutil

import pytest

from tests.keras_preact.serving.load import Load
from tests.keras_preact.serving.server_process import (
    NAME,
    PREDICT,
    SavedModel,
    Server,
    check_answers,
    export,
    predict_body,
    random_images,
    wait_for,
)

pytestmark = pytest.mark.soak  # most tests start a server of their own


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with the versions 1 and 2, whose weights differ."""
    directory = tmp_path_factory.mktemp("exported")
    for version in (1, 2):
        export(directory, version, seed=version)
    return directory / NAME


@pytest.fixture(scope="module")
def saved_models(exported):
    return {version: SavedModel(exported / str(version)) for version in (1, 2)}


@pytest.fixture
def model(exported, tmp_path):
    """The folder of a model that has version 1."""
    model = tmp_path / "models" / NAME
    shutil.copytree(exported / "1", model / "1")
    return model


@pytest.fixture
def server(model, tmp_path):
    with Server(model.parent, tmp_path / "log", "--poll-seconds", 0.1) as server:
        yield server


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def breakages():
    def weights(version):
        flip_a_byte(next(version.glob("variables/variables.data*")))

    def graph(version):
        flip_a_byte(version / "saved_model.pb")

    def cut(version):
        path = next(version.glob("variables/variables.data*"))
        path.write_bytes(path.read_bytes()[:-100])

    def missing(version):
        (version / "variables" / "variables.index").unlink()

    def no_card(version):
        (version / "assets.extra" / "model_card.json").unlink()

    def half_a_card(version):
        path = version / "assets.extra" / "model_card.json"
        path.write_text(path.read_text()[:200])

    def empty(version):
        (version / "saved_model.pb").write_bytes(b"")

    return [weights, graph, cut, missing, no_card, half_a_card, empty]


def test_broken_versions_appear_and_the_good_one_goes_on(server, model, exported, saved_models):
    with Load(server) as load:
        for number, breakage in enumerate(breakages(), 3):
            work = model / ".work"
            shutil.copytree(exported / "2", work)
            breakage(work)
            work.rename(model / str(number))
            _, message = wait_for(
                lambda n=number: (one := server.states().get(n)) and one[0] == "END" and one
            )
            assert len(message) > 10, message
            assert str(model.parent) not in message
            assert server.states()[1] == ("AVAILABLE", "")
            load.wait_for_more(1)
    load.versions({1: saved_models[1]})
    assert server.process.poll() is None


def test_a_version_that_is_copied_slowly_is_served_once_it_is_whole(
    server, model, exported, saved_models
):
    """Copied in place, file after file, without the rename that makes it appear at
    once.
    """
    with Load(server) as load:
        files = sorted(path for path in (exported / "2").rglob("*") if path.is_file())
        for path in files:
            target = model / "2" / path.relative_to(exported / "2")
            target.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            with open(target, "wb") as file:
                for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                    file.write(part)
                    file.flush()
                    load.wait_for_more(1)
        wait_for(lambda: server.states().get(2, ("",))[0] == "AVAILABLE")
        load.wait_for_more()
    for versions in load.versions(saved_models):
        assert versions == sorted(versions)
        assert versions[-1] == 2


def test_a_new_version_takes_over_under_load(server, model, exported, saved_models):
    with Load(server) as load:
        shutil.copytree(exported / "2", model / ".new")
        (model / ".new").rename(model / "2")
        wait_for(
            lambda: (
                server.states() == {1: ("END", ""), 2: ("AVAILABLE", "")}
                or 1 not in server.states()
            )
        )
        load.wait_for_more()
    assert set(load.ends) == {None}
    for versions in load.versions(saved_models):
        assert versions == sorted(
            versions
        )  # once the new one has answered, the old one does not any more
        assert (versions[0], versions[-1]) == (1, 2)


def test_a_model_that_goes_away_and_comes_back(server, model, exported, saved_models):
    gone = model.parent.parent / "gone"
    model.rename(gone)
    wait_for(lambda: server.get(f"/v1/models/{NAME}")[0] == 404)
    status, answer, _ = server.post(PREDICT, predict_body(random_images(0)))
    assert (status, answer.keys()) == (404, {"error"})
    gone.rename(model)
    wait_for(lambda: server.get("/v2/health/ready")[0] == 200)
    check_answers(server, saved_models[1])
