"""Wrong input to the command lines: status 2, one line that says what would work, and
nothing written.
"""

import dataclasses
import re
import typing

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import downsampling
from keras_preact.layers import chains
from tests.training import images as pictures
from tests.training.commands import TINY, error_of, files, finish, one_error, run_evaluate, start
from training import cli, train
from training.config import Config, Data, Model, Optimizer, Schedule
from training.recipes import RECIPES

#: A start of Keras on every backend is that of `test_error_behind_the_start_of_keras`.


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.backend
class TestGuard:
    @pytest.mark.parametrize(
        "error", [cli.UserError("two\n  lines"), ValueError("two lines"), OSError("two \n\n lines")]
    )
    def test_errors_become_one_line_and_status_2(self, capsys, error):
        def fail():
            raise error

        assert error_of(capsys, cli.guard, fail) == "error: two lines\n"

    def test_interruption_is_status_130(self, capsys):
        def interrupted():
            raise KeyboardInterrupt

        with pytest.raises(SystemExit) as ended:
            cli.guard(interrupted)
        assert ended.value.code == 130
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("error", [TypeError, KeyError, AttributeError, ZeroDivisionError])
    def test_errors_in_the_program_are_not_hidden(self, error):
        def fail():
            raise error("bug")

        with pytest.raises(error, match="bug"):
            cli.guard(fail)


@pytest.mark.backend
class TestVerbose:
    @pytest.fixture(autouse=True)
    def traces_as_before(self):
        yield
        keras.config.enable_traceback_filtering()

    @pytest.mark.parametrize(
        ("argv", "rest", "verbose"),
        [
            ([], [], False),
            (["--verbose"], [], True),
            (["digits", "--seed", "3"], ["digits", "--seed", "3"], False),
            (["digits", "--verbose", "--seed", "3"], ["digits", "--seed", "3"], True),
            (("run", "--verbosely"), ["run", "--verbosely"], False),
        ],
    )
    def test_is_removed_from_any_place(self, argv, rest, verbose):
        assert cli.split_verbose(argv) == (rest, verbose)

    def test_shows_the_trace_above_the_message(self, capsys):
        def fail(path: str):
            try:
                int("x")
            except ValueError as error:
                raise cli.UserError(f"no number\nin {path}") from error

        with pytest.raises(SystemExit) as ended:
            cli.main("train", fail, ["--verbose", "--path", "somewhere"])
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("Traceback (most recent call last):\n")
        assert 'int("x")' in err
        assert "training.cli.UserError: no number" in err
        assert err.endswith("\nerror: no number in somewhere\n")

    def test_shows_what_keras_leaves_out(self, capsys):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        frames = {}
        for verbose in (False, True):
            with pytest.raises(SystemExit):
                # it is not compiled
                cli.guard(lambda: model.fit(np.zeros((2, 2)), np.zeros(2)), verbose)
            frames[verbose] = capsys.readouterr().err.count("\n")
        assert frames[False] == 1
        assert keras.config.is_traceback_filtering_enabled() is False
        assert frames[True] > 5

    def test_is_in_every_help_text(self, capsys):
        def command(path: str):
            """Do something.

            Args:
                path: To what.
            """

        with pytest.raises(SystemExit) as ended:
            cli.main("train", command, ["--help"])
        assert ended.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        start = "usage: keras-preact train [-h] --path NAME Examples: keras-preact train digits # "
        assert text.startswith(start)
        assert f"Do something. {cli.VERBOSE}" in text
        assert text.count("To what.") == 1


#: Options after `digits`, and each thing that the message must say.
WRONG = {
    "--model.name digits_resnet9_preact": [
        "Unknown --model.name: 'digits_resnet9_preact'",
        "Did you mean 'digits_resnet8_preact'",
    ],
    "--data.name cifar": ["'cifar10'", "'cifar100'", "Unknown data.name: 'cifar'"],
    "--model.gate-bias -6": ["exclusive_gating", "shortcut='identity'"],
    "--model.name digits_transformer6_preln": ["width_factor"],
    "--batch-size 1438": ["1 to 1437", "Received: batch_size=1438"],
    "--schedule.warmup 6": ["The warm-up (6 iterations)", "the run (5 iterations)"],
    "--schedule.kind steps --schedule.drops 3 2": ["`drops` must rise", "[3, 2]"],
    "--optimizer.weight-decay -1": ["must not be negative", "Received: -1"],
    "--model.dtype mixed_bfloat61": ["mixed_bfloat61", "mixed_bfloat16"],
    "--data.size 2": ["at least 4", "Received: input_shape=(2, 2, 1)"],
    "--data.augmentation pad_crop_flip --data.size 16": [
        "--data.augmentation pad_crop_flip keeps the images at 8 x 8 pixels",
        "Received: --data.size 16",
    ],
    "--data.flip alternating": [
        "--data.flip alternating needs --data.augmentation pad_crop_flip",
        "Received: none",
    ],
    "--data.holdout 1437": ["--data.holdout must be 0, a share below", "Received: 1437"],
    "--data.name folder": ["--data.dir", "train/CLASS/IMAGE", "Received: None"],
}


@pytest.mark.backend
@pytest.mark.parametrize("options", WRONG)
def test_wrong_option_of_train(options, capsys, empty_folder):
    arguments = ["digits", *TINY, "--output", "out/run", *options.split()]
    message = error_of(capsys, train.main, arguments)
    for part in WRONG[options]:
        assert part in message
    assert list(empty_folder.iterdir()) == []


@pytest.mark.backend
def test_folder_without_images(capsys, empty_folder):
    (empty_folder / "pictures" / "train" / "cat").mkdir(parents=True)
    (empty_folder / "pictures" / "train" / "cat" / "notes.txt").write_text("no image")
    message = error_of(capsys, train.main, ["folder", "--data.dir", "pictures", "--output", "run"])
    assert "pictures/train holds no images" in message
    assert "pictures/train/CLASS/IMAGE" in message
    assert files(empty_folder) == ["pictures/train/cat/notes.txt"]


@pytest.mark.backend
def test_images_of_no_common_size(capsys, empty_folder):
    pictures.write_folder(empty_folder / "pictures", images=2)
    before = files(empty_folder)
    options = ["--data.name", "folder", "--data.dir", "pictures", "--batch-size", "2"]
    message = error_of(capsys, train.main, ["digits", *options, "--output", "run"])
    assert "The images of folder differ in size. Choose one for the network, such as" in message
    assert files(empty_folder) == before
    assert not (empty_folder / "run").exists()


@pytest.mark.backend
def test_output_that_is_taken_stays_as_it_is(capsys, empty_folder):
    (empty_folder / "run").mkdir()
    (empty_folder / "run" / "precious").write_text("kept")
    message = error_of(capsys, train.main, ["digits", *TINY, "--output", "run"])
    assert "run exists and is not empty. Give another --output" in message
    assert files(empty_folder) == ["run/precious"]


@pytest.mark.backend
def test_unknown_option_is_named_with_its_neighbours(capsys, empty_folder):
    with pytest.raises(SystemExit) as ended:
        train.main(["digits", "--optimizer.learning-rat", "0.1"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "--optimizer.learning-rat" in message
    assert "--optimizer.learning-rate" in message
    assert list(empty_folder.iterdir()) == []


@pytest.mark.backend
@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_recipe(argv, capsys):
    train.main(argv)
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S", text, re.M) for name in RECIPES)


@pytest.mark.backend
def test_help_lists_every_model_of_images(capsys):
    train.main(["--help"])
    listed = capsys.readouterr().out
    assert all(f"\n  {pattern}\n" in listed for pattern in train.MODELS)
    names = train.models()
    assert sorted(names) == sorted(
        name for name in kp.list_models() if "dense" not in name and "transformer" not in name
    )


@pytest.mark.backend
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
    blocks = typing.get_args(typing.get_args(hints["block"])[0])
    assert set(blocks) < set(kp.BLOCKS)
    for block in blocks:
        kp.ResidualUnit(4, block=block)


@pytest.mark.backend
def test_a_name_that_is_no_choice_lists_them(capsys, empty_folder):
    with pytest.raises(SystemExit) as ended:
        train.main(["digits", "--model.arrangement", "full"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert all(name in message for name in kp.ARRANGEMENTS)
    assert list(empty_folder.iterdir()) == []


@pytest.mark.backend
class TestShortNames:
    @pytest.fixture(autouse=True)
    def no_training(self, monkeypatch):
        self.found = []
        monkeypatch.setattr(train, "train", lambda config, recipe: self.found.append(config))

    def parse(self, *argv):
        train.main(argv)
        return self.found.pop()

    def test_of_options(self):
        default = RECIPES["digits"]()
        config = self.parse("digits", "--lr", "0.3", "--batch=16")
        assert config == dataclasses.replace(
            default,
            batch_size=16,
            optimizer=dataclasses.replace(default.optimizer, learning_rate=0.3),
        )

    def test_epochs_stretch_the_schedule(self):
        config = self.parse("cifar10", "--epochs", "16")
        assert config.schedule == Schedule(
            "steps", drops=(8, 12), warmup=0.1, length=16, unit="epochs"
        )
        assert (
            dataclasses.replace(config, schedule=RECIPES["cifar10"]().schedule)
            == RECIPES["cifar10"]()
        )

    def test_options_of_the_schedule_win(self):
        schedule = self.parse("digits", "--schedule.warmup", "1", "--epochs=6").schedule
        assert schedule == Schedule("cosine", length=6, warmup=1)

    @pytest.mark.parametrize(("typed", "meant"), [("--bach", "--batch"), ("--lrr", "--lr")])
    def test_misspelt(self, typed, meant, capsys):
        with pytest.raises(SystemExit) as ended:
            train.main(["digits", typed, "3"])
        assert ended.value.code == 2
        assert f"{meant}, --" in capsys.readouterr().err

    def test_misspelt_epochs(self, capsys):
        message = error_of(capsys, train.main, ["digits", "--epoch", "3"])
        assert "Unknown option --epoch. Did you mean --epochs?" in message

    @pytest.mark.parametrize(
        "epochs", [["--epochs", "0"], ["--epochs", "ten"], ["--epochs=inf"], ["--epochs"]]
    )
    def test_epochs_that_are_none(self, epochs, capsys):
        assert "--epochs takes a positive number. Received: " in error_of(
            capsys, train.main, ["digits", *epochs]
        )


@pytest.mark.backend
class TestValues:
    def test_unset_is_a_value_of_optional_options(self, capsys):
        assert self.value("--optimizer.clip-norm", "unset").optimizer.clip_norm is None
        assert self.value("--model.shortcut", "none").model.shortcut == "none"  # the plain network
        assert self.value("--model.shortcut", "unset").model.shortcut is None
        assert self.value("--data.rand-augment", "2", "9").data.rand_augment == (2, 9)
        assert self.value("--data.rand-augment", "unset").data.rand_augment is None
        assert self.value("--model.stacked", "true").model.stacked is True
        assert self.value("--model.stacked", "false").model.stacked is False
        assert self.value("--schedule.drops", "1", "2.5").schedule.drops == (1.0, 2.5)
        assert self.value("--schedule.drops", "unset").schedule.drops == ()
        assert self.value("--schedule.drops").schedule.drops == ()

    def value(self, *argv):
        start = Config(
            optimizer=Optimizer(clip_norm=1.0),
            data=Data(rand_augment=(1, 1)),
            schedule=Schedule(drops=(3.0,)),
        )
        return cli.parse("train digits", Config, argv, "", default=start)

    @pytest.mark.parametrize(
        "argv",
        [("--data.rand-augment", "2"), ("--model.stacked", "maybe"), ("--schedule.drops", "x")],
    )
    def test_others_are_errors(self, argv, capsys):
        with pytest.raises(SystemExit) as ended:
            self.value(*argv)
        assert ended.value.code == 2
        assert argv[0] in capsys.readouterr().err


@pytest.mark.backend
class TestEvaluate:
    def error(self, capsys, *arguments):
        return error_of(capsys, run_evaluate, *arguments)

    @pytest.mark.parametrize("path", ["nothing", "nothing.keras", "."])
    def test_path_that_is_no_model(self, capsys, path, empty_folder):
        message = self.error(capsys, path)
        assert (
            f"{path} is neither a run directory nor a .keras file nor an exported model "
            "(saved_models/NAME) nor MODEL:WEIGHTS." in message
        )
        assert list(empty_folder.iterdir()) == []

    @pytest.mark.parametrize(
        ("subject", "words"),
        [
            ("cifar_resnet20:cifar10", ["Unknown name", "'cifar_resnet20_preact'"]),
            ("cifar_resnet20_preact:cifar100", ["'cifar_resnet20_preact': ('cifar10',)"]),
        ],
    )
    def test_weights_that_are_not_in_the_package(self, capsys, subject, words, empty_folder):
        message = self.error(capsys, subject)
        assert all(word in message for word in words)

    def test_config_of_another_program(self, capsys, empty_folder):
        (empty_folder / "config.json").write_text('{"model_type": "bert"}')
        assert "config.json was not written by keras-preact train" in self.error(capsys, ".")

    def test_model_without_data(self, capsys, empty_folder):
        model_file("m.keras")
        assert (
            "m.keras does not say which data it was trained on. Name it: --data digits"
            in self.error(capsys, "m.keras")
        )
        assert files(empty_folder) == ["m.keras"]

    def test_number_of_classes_that_does_not_fit(self, capsys, empty_folder):
        model_file("m.keras", classes=7)
        message = self.error(capsys, "m.keras", "--data", "digits")
        assert "m.keras has 7 classes, the data set digits has 10." in message
        assert files(empty_folder) == ["m.keras"]

    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ("--data digit", ["Did you mean 'digits'", "Unknown data.name: 'digit'"]),
            (
                "--data digits --batch-size 0",
                ["--batch-size must be positive", "Received: --batch-size 0"],
            ),
            (
                "--data digits --save-samples -1",
                ["--save-samples not negative", "--save-samples -1"],
            ),
        ],
    )
    def test_wrong_option(self, capsys, options, parts, empty_folder):
        model_file("m.keras")
        message = self.error(capsys, "m.keras", *options.split())
        for part in parts:
            assert part in message
        assert files(empty_folder) == ["m.keras"]

    def test_model_of_other_inputs(self, capsys, empty_folder):
        kp.create_model("dense_resnet6").save("dense.keras")
        assert "dense.keras does not take images: its input has shape (64,)" in self.error(
            capsys, "dense.keras", "--data", "digits"
        )
        model_file("colour.keras", input_shape=(8, 8, 3))
        assert "(256, 8, 8, 1)" in self.error(capsys, "colour.keras", "--data", "digits")
        assert files(empty_folder) == ["colour.keras", "dense.keras"]

    def test_damaged_file(self, capsys, empty_folder):
        model_file("m.keras")
        whole = (empty_folder / "m.keras").read_bytes()
        middle = len(whole) // 2
        for damaged in (
            b"",
            whole[:middle],
            whole[:-10],
            whole[:middle] + bytes(500) + whole[middle + 500 :],
        ):
            (empty_folder / "m.keras").write_bytes(damaged)
            assert "m.keras is damaged, or no model of this package" in self.error(
                capsys, "m.keras", "--data", "digits"
            )
        assert files(empty_folder) == ["m.keras"]


def model_file(path, **options):
    kp.create_model("digits_resnet8_preact", width_factor=0.25, **options).save(path)


class TestRealProcesses:
    """As a user meets it: nothing else on stderr, no traceback."""

    def test_unknown_recipe(self, empty_folder):
        status, out, err = finish(start("-m", "training", "train", "cifar", cwd=empty_folder))
        assert (status, out) == (2, "")
        assert one_error(err).startswith("error: Unknown recipe: 'cifar'. Did you mean 'cifar10'")
        assert all(name in err for name in RECIPES)
        assert list(empty_folder.iterdir()) == []

    @pytest.mark.backend
    def test_error_behind_the_start_of_keras(self, empty_folder):
        process = start(
            "-m", "training", "train", "digits", "--model.gate-bias", "-6", cwd=empty_folder
        )
        status, out, err = finish(process)
        assert (status, out) == (2, "")
        assert "gate_bias" in one_error(err)
        assert list(empty_folder.iterdir()) == []

    @pytest.mark.backend
    def test_without_tensorflow_the_package_is_imported_all_the_same(self, empty_folder):
        code = (
            "import sys; sys.modules['tensorflow'] = None; from training import cli; "
            "print(cli.command('train'))"
        )
        status, out, err = finish(start("-c", code, cwd=empty_folder))
        assert (status, out, err) == (0, "keras-preact train\n", "")
