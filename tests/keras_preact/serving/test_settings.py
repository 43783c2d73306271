"""Settings refuse what cannot work, and every one of them is an option of the command."""

import dataclasses
from pathlib import Path

import pytest

from keras_preact.serving import __main__ as command
from keras_preact.serving import settings
from keras_preact.serving.settings import Settings

BAD = [
    ("port", -1),
    ("port", "65536"),
    ("versions", 0),
    ("versions", "newest"),
    ("max_batch_size", -4),
    ("threads", 1.5),
    ("max_queue", 0),
    ("max_requests", None),
    ("batch_wait_ms", -0.1),
    ("batch_wait_ms", float("nan")),
    ("poll_seconds", 0),
    ("deadline_seconds", float("inf")),
    ("body_seconds", "soon"),
    ("header_seconds", -1),
    ("drain_seconds", None),
    ("batching", "maybe"),
    ("engine", "abacus"),
    ("max_pending_bytes", 2**20),  # less than one body
    ("pages", 3),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        Settings(Path("models"), **{name: value})
    with pytest.raises(ValueError, match=rf"(?s)^`{name}`.* Received: {name}=.*{value}") as error:
        settings.read(Settings, {"directory": "models", name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("token", ["", "two words", "tëst", "line\nline"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_repeated(token):
    with pytest.raises(ValueError, match="token") as direct:
        Settings(Path("models"), token=token)
    with pytest.raises(ValueError, match="`token` must be printable ASCII") as read:
        settings.read(Settings, {"directory": "models", "token": token})
    assert not token or token not in f"{direct.value} {read.value}"


def test_the_token_is_in_no_representation():
    assert "hunter2" not in repr(Settings(Path("models"), token="hunter2"))


def test_every_setting_is_an_option(tmp_path, monkeypatch):
    (tmp_path / "token").write_text(" secret\n")
    other = {
        "host": "0.0.0.0",
        "port": 0,
        "engine": "openvino",
        "versions": None,
        "poll_seconds": 0.5,
        "threads": 3,
        "max_batch_size": 8,
        "batch_wait_ms": 2.5,
        "batching": False,
        "max_queue": 7,
        "max_body_bytes": 1000,
        "max_pending_bytes": 5000,
        "max_requests": 9,
        "deadline_seconds": 1.5,
        "body_seconds": 2.5,
        "header_seconds": 3.5,
        "drain_seconds": 4.5,
        "hang_seconds": 5.5,
        "allowed_hosts": "a.example, b.example",
        "access_log": "all",
        "open_metrics": True,
        "token": "secret",
    }
    assert {"directory", *other} == {field.name for field in dataclasses.fields(Settings)}
    defaults = Settings(tmp_path)
    assert all(getattr(defaults, name) != value for name, value in other.items())
    arguments = [str(tmp_path), "--no-batching", "--open-metrics"]
    arguments += ["--token-file", str(tmp_path / "token")]
    for name, value in other.items():
        if name not in ("batching", "open_metrics", "token"):
            text = "all" if value is None else str(value)
            arguments += [f"--{name.replace('_', '-')}", text]
    assert command.settings(arguments) == Settings(tmp_path, **other)
    assert command.settings([str(tmp_path)]) == defaults
    monkeypatch.setenv(settings.TOKEN_VARIABLE, "from the file or not")
    assert (
        command.settings([str(tmp_path), "--token-file", str(tmp_path / "token")]).token == "secret"
    )
    monkeypatch.setenv(settings.TOKEN_VARIABLE, "variable")
    assert command.settings([str(tmp_path)]).token == "variable"


def test_every_option_has_a_word_of_help():
    for action in command.parser()._actions:
        assert action.help, action.dest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MISSING"], "folder of models"),
        (
            ["DIRECTORY", "--port", "70000"],
            "`port`: Input should be less than or equal to 65535. Received: port='70000'",
        ),
        (
            ["DIRECTORY", "--max-queue", "0"],
            "`max_queue`: Input should be greater than 0. Received: max_queue='0'",
        ),
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


@pytest.mark.parametrize(
    ("host", "allowed", "hosts"),
    [
        ("127.0.0.1", None, {"localhost", "127.0.0.1", "::1"}),
        ("localhost", None, {"localhost", "127.0.0.1", "::1"}),
        ("127.0.0.2", None, {"localhost", "127.0.0.1", "::1", "127.0.0.2"}),
        ("0.0.0.0", None, None),
        ("::", None, None),
        ("0.0.0.0", "A.example, b.example", {"a.example", "b.example"}),
        ("127.0.0.1", "*", None),
    ],
)
def test_a_local_server_answers_to_local_names(host, allowed, hosts):
    assert Settings(Path("models"), host=host, allowed_hosts=allowed).hosts() == hosts


def test_a_token_on_the_command_line_is_no_option(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command.settings([str(tmp_path), "--token", "secret"])
    assert ended.value.code == 2
    assert "unknown option --token. Did you mean --token-file?" in capsys.readouterr().err
