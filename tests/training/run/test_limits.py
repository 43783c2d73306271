"""Every number of a configuration is checked before anything is opened or written."""

import dataclasses
import types
import typing

import pytest

from tests.training.calls import error_of, files
from training.commands import train
from training.config import Config
from training.errors import UserError
from training.recipes import RECIPES
from training.reproduce import __main__ as reproduce
from training.run import checks, limits

#: Values that an option does not take, by option.
WRONG = {
    "model.mean": ["-1 0 0", "256", "nan"],
    "model.std": ["0", "1 -1 1", "inf"],
    "model.scales": ["nan 1", "1 inf"],
    "model.gate-bias": ["nan", "-inf"],
    "model.width-factor": ["0", "-1", "inf", "nan"],
    "model.dropout": ["-0.1", "1", "nan"],
    "model.stochastic-depth": ["-0.1", "1", "nan"],
    "model.squeeze-excitation": ["0", "-4"],
    "model.remat": ["0", "-1"],
    "data.size": ["0", "-32"],
    "data.border": ["0", "-1"],
    "data.rand-augment": ["0 9", "2 31", "2 -1"],
    "data.mixup": ["-1", "inf", "nan"],
    "data.cutmix": ["-0.1", "inf", "nan"],
    "data.holdout": ["-1", "-0.1", "1.5", "nan", "inf"],
    "data.test": ["-0.1", "1", "20", "nan"],
    "optimizer.learning-rate": ["0", "-0.1", "inf", "nan"],
    "optimizer.momentum": ["-0.1", "1", "nan"],
    "optimizer.weight-decay": ["-1e-4", "inf", "nan"],
    "optimizer.adam-ratio": ["0", "-1", "nan"],
    "optimizer.reference-batch-size": ["0", "-1"],
    "optimizer.layer-decay": ["0", "-0.5", "1.1", "nan"],
    "optimizer.clip-norm": ["0", "-1", "nan", "inf"],
    "optimizer.ema": ["-0.1", "1", "nan"],
    "optimizer.label-smoothing": ["-0.1", "1", "nan"],
    "schedule.drops": ["0", "-1 2", "3 2", "2 2", "nan", "1 inf"],
    "schedule.factor": ["0", "-0.1", "nan", "inf"],
    "schedule.warmup": ["-1", "nan", "inf"],
    "schedule.stable": ["-1", "nan", "inf"],
    "schedule.cycles": ["0", "-1"],
    "schedule.warmup-learning-rate": ["-0.1", "nan", "inf"],
    "schedule.length": ["0", "-1", "nan", "inf"],
    "checkpoint.minutes": ["-1", "nan"],
    "checkpoint.every": ["-3"],
    "checkpoint.keep": ["0", "-1"],
    "batch-size": ["0", "-1"],
    "steps-per-epoch": ["-1"],
    "accumulate": ["0", "-2"],
    "seed": ["-1", "4294967296"],
    "steps-per-execution": ["0", "-1"],
    "health": ["-1"],
    "profile": ["0 3", "3 2", "-1 2"],
}
#: Options that do not fit others, whatever the data.
COMBINATIONS = {
    "--accumulate 7": "--accumulate must divide --batch-size",
    "--steps-per-execution 4 --steps-per-epoch 6": "--steps-per-epoch must be a multiple of 4",
    "--data.flip alternating": "--data.flip alternating needs --data.augmentation pad_crop_flip",
    "--precision int8": "--precision must be auto, float32, mixed_bfloat16, mixed_float16 or",
    "--model.precision float": "--model.precision must be auto, float32, mixed_bfloat16,",
    "--precision int8_from_float32": "policy of Keras. Received: int8_from_float32",
    "--data.border 2": "--data.border 2 needs --data.augmentation pad_crop_flip",
    "--data.on-device --distribution mirrored": "--data.on-device needs --distribution none",
    "--model.name digits_resnet9_preact": "Did you mean 'digits_resnet8_preact'",
    "--model.scales 1 1": "--model.scales needs --model.shortcut constant_scaling",
    "--model.options sums": "Options are written NAME=VALUE. Received: sums",
    **{
        f"--model.options {text}": f"--model.options cannot set {text.partition('=')[0]}: a run"
        for text in (
            *("classes=3", "input_shape=3", "data_format=channels_first", "mean=3", "std=3"),
            *("include_preprocessing=true", "include_top=false", "name=mine"),
            "classifier_activation=softmax",
        )
    },
    "--model.name training.recipes:digits --model.options mean=3": "cannot set mean: a run sets",
    "--model.shortcut-options rate=0": "--model.shortcut-options needs --model.shortcut",
    "--model.shortcut dropout --model.shortcut-options rat=0": "has the options rate, seed",
    "--model.shortcut dropout --model.shortcut-options rate=1": "`rate` must be a number in [0, 1)",
    "--model.shortcut dropout --model.shortcut-options rate=a": "rate takes a number",
    "--model.shortcut identity --model.shortcut-options rate=0": "Identity has no options",
    "--output taken": "taken exists and is not empty",
}


def numeric_options(kind: type = Config, prefix: str = "") -> list[str]:
    """Return the options that take numbers."""
    names = []
    for name, hint in typing.get_type_hints(kind).items():
        option = prefix + name.replace("_", "-")
        if dataclasses.is_dataclass(hint):
            names += numeric_options(hint, f"{option}.")
        elif {int, float} & {*members(hint)}:
            names.append(option)
    return names


def members(hint) -> list:
    """Return the simple types in a type: int and None in `tuple[int, ...] | None`."""
    if typing.get_origin(hint) in (tuple, types.UnionType, typing.Union):
        return [kind for part in typing.get_args(hint) for kind in members(part)]
    return [hint]


def test_every_number_has_limits():
    assert numeric_options() == list(limits.LIMITS) == list(WRONG)


@pytest.fixture(autouse=True)
def nothing_is_opened(tmp_path, monkeypatch):
    """A working directory with one folder. To open data or to begin a run is an error."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training.data.load", None)
    yield
    assert files(tmp_path) == ["taken/file"]


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in WRONG.items() for value in values]
)
def test_wrong_numbers(option, value, capsys):
    words = ["digits", f"--{option}", *value.split()]
    message = error_of(capsys, train.main, words)
    assert f"--{option} must be {limits.LIMITS[option].words}. Received: " in message
    received = [float(word) for word in message.rpartition(": ")[2].split()]
    assert str(received) == str([float(word) for word in value.split()])


def test_the_first_field_comes_first(capsys):
    numbers = "--health -1 --checkpoint.keep 0 --data.mixup -1 --schedule.stable 1"
    words = ["digits", *numbers.split()]
    assert "--data.mixup must be" in error_of(capsys, train.main, words)


@pytest.mark.parametrize("options", COMBINATIONS)
def test_options_that_do_not_fit(options, capsys):
    assert COMBINATIONS[options] in error_of(capsys, train.main, ["digits", *options.split()])


#: Options for the digits, where they have no effect, by option.
UNUSED = {
    "data.padding": "black",
    "data.test": "0.2",
    "data.watch-test": "",
    "data.skip-broken": "",
    "optimizer.nesterov": "--optimizer.name adamw",
    "optimizer.adam-ratio": "1",
    "optimizer.reference-batch-size": "64",
    "schedule.drops": "1 2",
    "schedule.factor": "0.5",
    "schedule.stable": "1",
    "schedule.cycles": "2 --schedule.kind linear",
    "schedule.warmup-learning-rate": "0.02",
}


def test_every_option_without_an_effect_is_tried():
    assert list(UNUSED) == list(checks.USED_WITH)


@pytest.mark.parametrize("option", UNUSED)
def test_options_without_an_effect(option, capsys):
    other, users = checks.USED_WITH[option]
    message = error_of(capsys, train.main, ["digits", f"--{option}", *UNUSED[option].split()])
    words = " and ".join(map(str, users))
    assert message.startswith(f"error: --{option} is for --{other} {words}. Received: --{other} ")


def test_what_a_recipe_has_set_may_have_no_effect():
    recipe = RECIPES["cifar10"]()
    cosine = dataclasses.replace(recipe.schedule, kind="cosine")
    changed = dataclasses.replace(recipe, schedule=cosine)
    checks.check_given(changed, recipe)
    with pytest.raises(UserError, match=r"--schedule.drops is for --schedule.kind steps"):
        checks.check_given(changed, Config())  # a recipe of a person
    for each in RECIPES.values():
        checks.check_given(each(), Config())


def test_a_mistake_deletes_nothing(tmp_path, capsys):
    smoke = tmp_path / "work" / "smoke"
    smoke.mkdir(parents=True)
    (smoke / "record").touch()
    words = ["digits", "--smoke", "--work", "work", "--rows", "original-resnet-99"]
    assert "Unknown row" in error_of(capsys, reproduce.main, words)
    assert (smoke / "record").is_file()
    (smoke / "record").unlink()
