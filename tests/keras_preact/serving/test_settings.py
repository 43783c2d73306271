"""Settings refuse what cannot work, and every one of them is an option of the command."""

import dataclasses
from pathlib import Path

import keras
import pytest

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)

pytest.importorskip("uvicorn")
from keras_preact.serving import __main__ as command  # noqa: E402
from keras_preact.serving.settings import Settings  # noqa: E402

BAD = [
    ("port", -1),
    ("port", 65536),
    ("port", "8501"),
    ("versions", 0),
    ("max_batch_size", -4),
    ("threads", 1.5),
    ("max_queue", 0),
    ("max_body_bytes", True),
    ("max_requests", None),
    ("batch_wait_ms", -0.1),
    ("batch_wait_ms", float("nan")),
    ("poll_seconds", 0),
    ("deadline_seconds", float("inf")),
    ("body_seconds", "15"),
    ("header_seconds", -1),
    ("drain_seconds", None),
    ("max_pending_bytes", 2**20),  # less than one body
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"`{name}` must be .*Received: {name}="):
        Settings(Path("models"), **{name: value})


@pytest.mark.parametrize("token", ["", "two words", "tëst", "line\nline"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_repeated(token):
    with pytest.raises(ValueError, match="`token` must be printable ASCII") as error:
        Settings(Path("models"), token=token)
    assert not token or token not in str(error.value)


def test_the_token_is_in_no_representation():
    assert "hunter2" not in repr(Settings(Path("models"), token="hunter2"))


def test_every_setting_is_an_option(tmp_path, monkeypatch):
    (tmp_path / "token").write_text(" secret\n")
    wanted = Settings(
        tmp_path,
        "0.0.0.0",
        0,
        "tensorflow",
        None,
        0.5,
        8,
        2.5,
        False,
        3,
        7,
        1000,
        5000,
        9,
        1.5,
        2.5,
        3.5,
        4.5,
        "secret",
    )
    defaults = Settings(tmp_path)
    same = [
        f.name
        for f in dataclasses.fields(Settings)
        if getattr(wanted, f.name) == getattr(defaults, f.name)
    ]
    assert same == ["directory", "engine"]  # the others are told apart from their defaults
    arguments = f"""--host 0.0.0.0 --port 0 --engine tensorflow --versions all --poll-seconds 0.5 --max-batch-size 8
        --batch-wait-ms 2.5 --no-batching --threads 3 --max-queue 7 --max-body-bytes 1000 --max-pending-bytes 5000
        --max-requests 9 --deadline-seconds 1.5 --body-seconds 2.5 --header-seconds 3.5 --drain-seconds 4.5
        --token-file {tmp_path / "token"}"""
    assert command.settings([str(tmp_path), *arguments.split()]) == wanted
    assert command.settings([str(tmp_path)]) == defaults
    monkeypatch.setenv(command.TOKEN_VARIABLE, "from the file or not")
    assert (
        command.settings([str(tmp_path), "--token-file", str(tmp_path / "token")]).token == "secret"
    )
    monkeypatch.setenv(command.TOKEN_VARIABLE, "variable")
    assert command.settings([str(tmp_path)]).token == "variable"


def test_every_option_has_a_word_of_help():
    for action in command.parser()._actions:
        assert action.help, action.dest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MISSING"], "folder of models"),
        (["DIRECTORY", "--port", "70000"], "`port` must be a whole number from 0 to 65535"),
        (["DIRECTORY", "--max-queue", "0"], "`max_queue` must be"),
        (["DIRECTORY", "--token-file", "MISSING"], "No such file"),
        (["DIRECTORY", "--token-file", "DIRECTORY/empty"], "`token` must be"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, tmp_path, capsys):
    (tmp_path / "empty").write_text("\n")
    arguments = [
        one.replace("DIRECTORY", str(tmp_path)).replace("MISSING", str(tmp_path / "missing"))
        for one in arguments
    ]
    with pytest.raises(SystemExit) as ended:
        command.settings(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_token_on_the_command_line_is_no_option(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command.settings([str(tmp_path), "--token", "secret"])
    assert ended.value.code == 2
    assert "unknown option --token. Did you mean --token-file?" in capsys.readouterr().err
