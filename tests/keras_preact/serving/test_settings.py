"""Settings refuse what cannot work, and every one of them is an option of the command."""

import dataclasses
import re
from pathlib import Path

import pytest

from keras_preact.serving import __main__ as command
from keras_preact.serving import settings
from keras_preact.serving.settings import Settings

BAD = [
    ("port", "65536"),
    ("versions", "newest"),
    ("max_queue", 0),
    ("hang_seconds", float("nan")),
    ("deadline_seconds", float("inf")),
    ("drain_seconds", None),
    ("engine", "abacus"),
    ("max_pending_bytes", 2**20),  # less than one body
    ("pages", 3),
    # these overflow in the HTTP server or in a timer, or keep the machine busy with threads
    ("max_requests", 10**20),
    ("header_seconds", 1e300),
    ("threads", 5000),
    ("host", ""),  # would be every address
    ("host", " "),
    ("allowed_hosts", " "),
    # no client sends these, so every request would be refused
    *(
        ("allowed_hosts", host)
        for host in (",", "a.example:80", "127.0.0.1:80", "[::1]:80", "*.example", "http://a")
    ),
    *(
        ("allowed_origins", origin)
        for origin in ("shop.example", "https://shop.example/", "https://a@b", "null", "", ",")
    ),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        Settings(Path("models"), **{name: value})
    with pytest.raises(
        ValueError, match=f"(?s)^`{name}`.* Received: .*{re.escape(str(value))}"
    ) as error:
        settings.read(Settings, {"directory": "models", name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("token", ["", "two words", "t\xebst", "line\nline"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_repeated(token):
    with pytest.raises(ValueError, match="token") as direct:
        Settings(Path("models"), token=token)
    with pytest.raises(ValueError, match="`token` must be printable ASCII") as read:
        settings.read(Settings, {"directory": "models", "token": token})
    assert not token or token not in f"{direct.value} {read.value}"
    assert "hunter2" not in repr(Settings(Path("models"), token="hunter2"))


#: Another value than the default for every setting but the directory.
TEXT = """
host=0.0.0.0 port=0 engine=openvino versions=all poll_seconds=0.5 threads=3 max_batch_size=8
batching=false max_queue=7 max_body_bytes=1000 max_pending_bytes=5000
max_requests=9 deadline_seconds=1.5 body_seconds=2.5 header_seconds=3.5 drain_seconds=4.5
hang_seconds=5.5 allowed_hosts=a.example allowed_origins=https://A.example,http://[::1]:3000
access_log=all open_metrics=true token=secret
"""
OTHERS = dict(pair.split("=") for pair in TEXT.split())


def test_every_setting_is_an_option(tmp_path, monkeypatch):
    (tmp_path / "token").write_text(" secret\n")
    assert {"directory", *OTHERS} == {field.name for field in dataclasses.fields(Settings)}
    defaults, others = Settings(tmp_path), Settings(tmp_path, **OTHERS)
    assert all(getattr(defaults, name) != getattr(others, name) for name in OTHERS)
    arguments = [str(tmp_path), "--no-batching", "--open-metrics"]
    arguments += ["--token-file", str(tmp_path / "token")]
    for name in OTHERS.keys() - {"batching", "open_metrics", "token"}:
        arguments += [f"--{name.replace('_', '-')}", OTHERS[name]]
    assert command.settings(arguments) == others
    assert command.settings([str(tmp_path)]) == defaults
    monkeypatch.setenv(settings.TOKEN_VARIABLE, "variable")
    assert command.settings(arguments).token == "secret"
    assert command.settings([str(tmp_path)]).token == "variable"


@pytest.mark.parametrize("value", ["", " ", "\n"])
def test_an_empty_variable_does_not_mean_that_everybody_may_use_the_server(
    value, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(settings.TOKEN_VARIABLE, value)
    with pytest.raises(SystemExit, match="2"):
        command.settings([str(tmp_path)])
    assert "KERAS_PREACT_TOKEN is set, but empty." in capsys.readouterr().err
    file = tmp_path / "token"
    file.write_text("secret")
    assert command.settings([str(tmp_path), "--token-file", str(file)]).token == "secret"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MISSING"], "`directory` must be a folder of models. Received: MISSING (No such file"),
        (["HERE/empty"], "`directory` must be a folder of models. Received: HERE/empty (Not a dir"),
        (["HERE", "--port", "70000"], "Received: port='70000'"),
        (["HERE", "--max-queue", "0"], "`--max-queue` must be greater than 0. Received"),
        (["HERE", "--port", "web"], "`--port` must be a valid integer. Received: port='web'"),
        (["HERE", "--host", ""], "`--host` must not be empty. Received: ''"),
        ([""], "`directory` must not be empty. Received: ''"),
        (["HERE", "--allowed-hosts", "a,b:80"], "`--allowed-hosts` must be host names without"),
        (
            ["HERE", "--token-file", "MISSING"],
            "`--token-file` must be a file that can be read. Received: MISSING (No such file",
        ),
        (["HERE", "--token-file", "HERE"], "can be read. Received: HERE (Is a directory)"),
        (["HERE", "--token-file", "HERE/empty"], "`token` must be"),
        (["HERE", "--token-file", "HERE/binary"], "Received: 2 characters (not shown)."),
        (["HERE", "--engine", "openvino"], "pip install 'keras-preact[openvino]'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    places = {"HERE": str(tmp_path), "MISSING": str(tmp_path / "missing")}
    for word, place in places.items():
        arguments = [one.replace(word, place) for one in arguments]
        message = message.replace(word, place)
    with pytest.raises(SystemExit) as ended:
        command.settings(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
