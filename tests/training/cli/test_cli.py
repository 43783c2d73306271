"""Options of the commands. Wrong input ends with status 2 and one line that says what would
work; nothing is written.
"""

import dataclasses
import errno
import io
import os
import re
import shlex
import signal
import sys
import types
import typing

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import downsampling
from keras_preact.layers import chains
from tests.training import images as pictures
from tests.training.calls import ROOT, TINY, error_of, files, finish, run_evaluate, start, words
from training import cli, disk
from training.cli import console
from training.commands import train
from training.config import Config, Model, Schedule
from training.errors import UserError, checking, command, reading, writing
from training.recipes import RECIPES


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fail(error):
    raise error


def checked(call):
    with checking():
        call()


@pytest.mark.parametrize(
    ("error", "status", "stderr"),
    [
        (UserError("two\n  lines"), 2, "error: two lines\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_end_with_a_line_and_a_status(error, status, stderr, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.guard(lambda: fail(error))
    assert (ended.value.code, capsys.readouterr().err) == (status, stderr)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "café 猫 \\udce9\n".encode()),
        ("latin-1", b"caf\xe9 \\u732b \\udce9\n"),
        ("ascii", b"caf\\xe9 \\u732b \\udce9\n"),
    ],
)
def test_stdout_shows_every_name_in_every_encoding(encoding, shown, monkeypatch):
    """A name that is not UTF-8 has characters that no encoding has."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    cli.guard(lambda: print("café 猫", os.fsdecode(b"\xe9")))
    assert written.getvalue() == shown


@pytest.mark.parametrize("folder", ["runs/a", "my run", "it's", "$(reboot)", "a;b", "~", "a*"])
def test_commands_can_be_typed_as_they_are_printed(folder):
    line = command("train digits", "--output", folder)
    assert shlex.split(line) == ["keras-preact", "train", "digits", "--output", folder]


def test_no_command_is_put_together_by_hand():
    """`cli.command` quotes the arguments that it gets, and no others."""
    for path in (ROOT / "training").rglob("*.py"):
        assert not re.search(r"command\(['\"][a-z ]+['\"]\)\} (--|\{)", path.read_text()), path


@pytest.mark.parametrize("error", [TypeError, KeyError, AttributeError, ValueError, OSError])
def test_errors_in_the_program_are_not_hidden(error):
    with pytest.raises(error, match="bug"):
        cli.guard(lambda: fail(error("bug")))


def test_verbose_shows_the_trace_above_the_message(capsys):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    errors = {}
    for verbose in (False, True):
        with pytest.raises(SystemExit):
            # it is not compiled
            cli.guard(lambda: checked(lambda: model.fit(np.zeros((2, 2)), np.zeros(2))), verbose)
        errors[verbose] = capsys.readouterr().err
    keras.config.enable_traceback_filtering()
    assert errors[True].startswith("Traceback (most recent call last):\n")
    assert "keras/src" in errors[True]  # Keras leaves these lines out by default
    assert errors[True].endswith(f"\n{errors[False]}")


def test_a_machine_may_be_at_fault(tmp_path):
    """Only an error that lasts is a mistake: a shared disk may come back."""
    contexts = (
        lambda: reading("a.json is damaged"),
        lambda: writing("a.json"),
        lambda: disk.replacing(tmp_path / "a.json"),
        checking,
    )
    for context in contexts:
        for number in (errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EROFS, None):
            with pytest.raises(UserError), context():
                raise OSError(number, "no luck") if number else OSError("no luck")
        for number in (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET):
            with pytest.raises(OSError, match="no luck") as raised, context():
                raise OSError(number, "no luck")
            assert raised.value.errno == number


@pytest.fixture
def module(monkeypatch):
    module = types.ModuleType("code_of_a_user")
    monkeypatch.setitem(sys.modules, "code_of_a_user", module)
    return module


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("on_train_begin", ValueError),
        ("on_train_batch_end", OSError),
        ("on_epoch_end", FileNotFoundError),
        *(
            pytest.param(*pair, marks=pytest.mark.soak)
            for pair in (
                ("on_train_begin", OSError),
                ("on_train_begin", FileNotFoundError),
                ("on_train_batch_end", ValueError),
                ("on_train_batch_end", FileNotFoundError),
                ("on_epoch_end", ValueError),
                ("on_epoch_end", OSError),
            )
        ),
    ],
)
def test_a_fault_in_a_callback_shows_its_trace(module, place, error):
    """The status is then that of Python, 1, and launchers start the run again."""

    def bug(*arguments, **named):
        raise error("a bug of the user")

    module.make = lambda folder: type("Bug", (keras.callbacks.Callback,), {place: bug})()
    with pytest.raises(error, match="a bug of the user"):
        train.main(["digits", *TINY, *words("--callbacks code_of_a_user:make --output run")])


@pytest.mark.parametrize("option", ["--callbacks", "--data.name"])
def test_a_fault_in_a_function_of_the_user_shows_its_trace(module, option):
    module.f = lambda *arguments: fail(ValueError("a bug of the user"))
    with pytest.raises(RuntimeError, match="code_of_a_user:f raised ValueError: a bug") as raised:
        train.main(["digits", *TINY, option, "code_of_a_user:f", "--output", "run"])
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_closed_pipe_ends_quietly(monkeypatch, capfd):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(SystemExit) as ended:
            cli.guard(lambda: print("nobody reads this"))
        assert ended.value.code == 128 + signal.SIGPIPE
        print("nor this", flush=True)  # as Python does at exit
    monkeypatch.undo()
    assert capfd.readouterr().err == ""
    with pytest.raises(BrokenPipeError):  # of a socket, not of stdout
        cli.guard(lambda: fail(BrokenPipeError(errno.EPIPE, "socket")))


@pytest.mark.process
@pytest.mark.parametrize("arguments", ["--help", "train", "train digits --help", "--version"])
def test_the_first_line_of_a_help(arguments, tmp_path):
    line = f'"{sys.executable}" -m training {arguments} | true; exit ${{PIPESTATUS[0]}}'
    starter = f"import os; os.execvp('bash', ['bash', '-c', {line!r}])"
    status, _, err = finish(start("-c", starter, cwd=tmp_path))
    assert (status in (0, 141), err) == (True, "")


@pytest.mark.process
@pytest.mark.parametrize("arguments", ["--help", "train digits --help", "--version"])
def test_a_full_disk(arguments, tmp_path):
    """That of stdout, of which the error does not name a file."""
    line = f'exec "{sys.executable}" -m training {arguments} > /dev/full'
    starter = f"import os; os.execvp('sh', ['sh', '-c', {line!r}])"
    status, _, err = finish(start("-c", starter, cwd=tmp_path))
    assert (status, err) == (2, "error: [Errno 28] No space left on device\n")


#: Options after `digits`, and words that the message must contain.
WRONG = {
    "--model.gate-bias -6": ["exclusive_gating", "shortcut='identity'"],
    "--schedule.warmup 6": ["The warm-up (6 iterations)", "the run (5 iterations)"],
    "--model.precision mixed_bfloat61": ["mixed_bfloat61", "mixed_bfloat16"],
    "--data.size 2": ["at least 4", "input_shape=(2, 2, 1)"],
    "--data.name folder --data.dir pictures --batch-size 2": ["differ in size. Choose one"],
    "--epoch 3": ["Unknown option --epoch. Did you mean --epochs?"],
    "--epochs=inf": ["--epochs takes a positive number"],
    "--epochs 3": ["--epochs says how long the run is, and so does --schedule.length with --"],
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_option_of_train(options, capsys, empty_folder):
    pictures.write_folder(empty_folder / "pictures", images=2)
    before = files(empty_folder)
    arguments = ["digits", *TINY, "--output", "out/run", *words(options)]
    message = error_of(capsys, train.main, arguments)
    assert all(part in message for part in WRONG[options])
    assert files(empty_folder) == before


def test_choices_are_the_librarys():
    hints = typing.get_type_hints(Model)
    tables = {
        "arrangement": kp.ARRANGEMENTS,
        "shortcut": kp.SHORTCUTS,
        "normalization": chains.NORMALIZATIONS,
        "downsampling": downsampling.DOWNSAMPLINGS,
    }
    for name, table in tables.items():
        assert set(typing.get_args(typing.get_args(hints[name])[0])) == set(table), name
    assert set(typing.get_args(typing.get_args(hints["block"])[0])) < set(kp.BLOCKS)


def test_short_names(received):
    default = RECIPES["digits"]()
    optimizer = dataclasses.replace(default.optimizer, learning_rate=0.3)
    expected = dataclasses.replace(default, batch_size=16, optimizer=optimizer)
    assert received(*words("digits --lr 0.3 --batch=16")) == expected
    # --epochs scales the schedule; options of the schedule override it
    schedule = Schedule("steps", drops=(8, 12), warmup=0.1, length=16, unit="epochs")
    expected = dataclasses.replace(RECIPES["cifar10"](), schedule=schedule)
    assert received(*words("cifar10 --epochs 16")) == expected
    schedule = received(*words("digits --schedule.warmup 1 --epochs=6")).schedule
    assert schedule == Schedule("cosine", length=6, warmup=1)
    # none is the plain network, None the model's default shortcut; an option may have no value
    for value, expected in (("none", "none"), ("None", None)):
        assert received("digits", "--model.shortcut", value).model.shortcut == expected
    assert received("cifar10", "--schedule.drops").schedule.drops == ()


@pytest.mark.parametrize("before", [False, True])
def test_both_forms_of_an_option_that_is_on_or_off(before):
    default = dataclasses.replace(Config(), dry_run=before)
    for word, after in (("--dry-run", True), ("--no-dry-run", False)):
        assert cli.parse("train digits", Config, [word], default=default).dry_run == after


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for file, name, options in (
        ("m", "digits_resnet8_preact", {"width_factor": 0.25}),
        ("seven", "digits_resnet8_preact", {"width_factor": 0.25, "classes": 7}),
        ("dense", "dense_resnet6", {}),
        ("colour", "digits_resnet8_preact", {"width_factor": 0.25, "input_shape": (8, 8, 3)}),
        ("flat", "digits_resnet8_preact", {"width_factor": 0.25, "input_shape": (8, 16, 1)}),
    ):
        kp.create_model(name, **options).save(folder / f"{file}.keras")
    pair = [keras.Input((8, 8, 1)), keras.Input((8, 8, 1))]
    features = keras.layers.Flatten()(keras.layers.Concatenate()(pair))
    classifiers = {name: keras.layers.Dense(10)(features) for name in "ab"}
    keras.Model(pair, classifiers).save(folder / "several.keras")
    with pytest.warns(match="not yet been built"):
        keras.Sequential([keras.layers.Dense(10)]).save(folder / "unbuilt.keras")
    whole = (folder / "m.keras").read_bytes()
    middle = len(whole) // 2
    (folder / "short.keras").write_bytes(whole[:-10])
    (folder / "zeros.keras").write_bytes(whole[:middle] + bytes(500) + whole[middle + 500 :])
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text('{"model_type": "bert"}')
    return folder


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("nothing.keras", "is not a run directory, a .keras file, an exported model"),
        ("cifar_resnet20:cifar10", "'cifar_resnet20_preact'"),
        ("cifar_resnet20_preact:cifar100", "('cifar10',)"),
        ("other", "config.json was not written by keras-preact train"),
        ("m.keras", "Name it: --data digits"),
        ("m.keras --data digits --batch-size 0", "--batch-size must be positive"),
        ("m.keras --data digits --save-samples -1", "--save-samples must be 0 or more"),
        ("seven.keras --data digits", "has 7 classes, the data set digits has 10"),
        ("dense.keras --data digits", "does not take images: its input has shape (64,)"),
        ("colour.keras --data digits", "takes images of shape (8, 8, 3): height, width, channels."),
        ("colour.keras --data digits", "The data set digits has images of shape (8, 8, 1)."),
        ("flat.keras --data digits", "takes images of shape (8, 16, 1): height, width, channels."),
        ("short.keras --data digits", "is damaged, or no model"),
        ("zeros.keras --data digits", "is damaged, or no model"),
    ],
)
def test_wrong_arguments_of_evaluate(arguments, part, capsys, models, monkeypatch):
    monkeypatch.chdir(models)
    before = files(models)
    assert part in error_of(capsys, run_evaluate, *words(arguments))
    assert files(models) == before


@pytest.mark.parametrize("line", ["evaluate {} --data digits", "audit {}", "analyze {}"])
@pytest.mark.parametrize(("name", "counts"), [("several", "2 and 2"), ("unbuilt", "0 and 0")])
def test_networks_of_another_kind(line, name, counts, capsys, models, monkeypatch):
    monkeypatch.chdir(models)
    message = error_of(capsys, console.main, words(line.format(f"{name}.keras")))
    assert message == (
        f"error: {name}.keras must have one input and one output, each of a known shape. Received: "
        f"{counts}\n"
    )
