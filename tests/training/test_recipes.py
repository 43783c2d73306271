"""The recipes: the paper's numbers as literals, and how options change them."""

import dataclasses
import inspect
import json
import re

import pytest

import keras_preact as kp
from tests.training.commands import ROOT, words
from training import plans, train
from training.config import Config, Data, Model, Optimizer, Schedule
from training.data.pipelines import AUGMENTATIONS
from training.data.sources import SOURCES
from training.recipes import RECIPES

#: Appendix of arXiv 1603.05027. Nothing is spared from the decay.
PAPER_OPTIMIZER = {
    "name": "sgd",
    "learning_rate": 0.1,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 1e-4,
    "exclude_from_decay": (),
    "scaling": "none",
    "reference_batch_size": 256,
    "clip_norm": None,
    "ema": None,
    "label_smoothing": 0.0,
    "layer_decay": None,
    "adam_ratio": 0.1,  # of Muon alone
}


def fields(part) -> dict:
    return dataclasses.asdict(part)


@pytest.mark.parametrize(
    ("recipe", "model", "data"),
    [
        ("cifar10", "cifar_resnet20_preact", "cifar10"),
        ("cifar100", "cifar_resnet164_preact", "cifar100"),
    ],
)
def test_cifar_recipe_is_the_papers(recipe, model, data):
    config = RECIPES[recipe]()
    assert config.model == Model(model)  # nothing overridden
    assert config.batch_size == 128
    assert fields(config.optimizer) == PAPER_OPTIMIZER
    assert fields(config.schedule) == {
        "kind": "steps",
        "drops": (32_000, 48_000),
        "factor": 0.1,
        "warmup": 400,
        "warmup_learning_rate": 0.01,
        "length": 64_000,
        "unit": "iterations",
    }
    assert (config.data.name, config.data.augmentation) == (data, "pad_crop_flip")
    # all 50,000 images are trained on: the paper's final numbers
    assert (config.data.holdout, config.data.watch_test, config.data.size) == (0, False, None)
    assert config.data.border == 4
    assert config.data.padding == "mean"  # what is padded is normalised in the released code


def test_recipe_of_462_is_the_papers():
    config = RECIPES["cifar10_batch64"]()
    assert config.model == Model("cifar_resnet1001_preact")
    assert config.batch_size == 64
    assert fields(config.optimizer) == PAPER_OPTIMIZER | {"nesterov": True}
    assert (config.schedule.kind, config.schedule.unit) == ("steps", "iterations")
    assert (config.schedule.length, config.schedule.drops, config.schedule.factor) == (
        200 * 781,
        (81 * 781, 122 * 781),
        0.1,
    )
    assert (config.data.name, config.data.augmentation, config.data.holdout) == (
        "cifar10",
        "pad_crop_flip",
        0,
    )


def test_imagenet_recipe_is_the_papers():
    config = RECIPES["imagenet"]()
    assert config.batch_size == 256
    assert fields(config.optimizer) == PAPER_OPTIMIZER
    assert (config.schedule.kind, config.schedule.unit) == ("steps", "epochs")
    assert (config.schedule.length, config.schedule.drops, config.schedule.factor) == (
        90,
        (30, 60),
        0.1,
    )
    assert config.schedule.warmup == 0
    assert (config.data.name, config.data.augmentation, config.data.size) == (
        "imagenet2012",
        "resized_crop_flip",
        224,
    )


@pytest.mark.parametrize(
    ("recipe", "steps_per_epoch", "rates"),
    [
        ("cifar10", 391, {400: 0.01, 32_000: 0.1, 48_000: 0.01, 64_000: 0.001}),
        ("cifar10_batch64", 781, {400: 0.01, 81 * 781: 0.1, 122 * 781: 0.01, 200 * 781: 0.001}),
        # 1,281,167 images in batches of 256: 5,005 iterations an epoch
        ("imagenet", 5005, {30 * 5005: 0.1, 60 * 5005: 0.01, 90 * 5005: 0.001}),
    ],
)
def test_learning_rate_over_the_papers_runs(recipe, steps_per_epoch, rates):
    """`rates` has the rate of each phase, by the iteration after its last."""
    config = RECIPES[recipe]()
    plan = plans.plan(config, steps_per_epoch * config.batch_size)
    assert plan.iterations == max(rates)
    schedule = plans.learning_rate(config, plan)
    begin = 0
    for end, rate in rates.items():
        for step in (begin, end - 1):
            assert float(schedule(step)) == pytest.approx(rate, rel=1e-5), step
        begin = end


@pytest.mark.parametrize("name", ["digits", "folder", "folder_small", "finetune"])
def test_recipes_for_your_images_hold_some_out(name):
    assert RECIPES[name]().data.holdout == 0.1


@pytest.mark.parametrize("depth", [20, 56, 110, 164, 1001])
def test_cifar_recipe_is_what_is_recommended(depth):
    """`kp.recommend` and the recipe agree on the paper's networks at every depth."""
    config, advice = RECIPES["cifar10"](), kp.recommend(depth=depth, task="cifar", batch_size=128)
    assert (advice.learning_rate, advice.decay, advice.clip_norm) == (0.1, "steps", None)
    assert (config.optimizer.learning_rate, config.schedule.kind, config.optimizer.clip_norm) == (
        0.1,
        "steps",
        None,
    )
    assert advice.warmup_iterations == config.schedule.warmup
    assert tuple(share * config.schedule.length for share in advice.drops) == config.schedule.drops


PERCENT = re.compile(r"(\d+\.\d+) %")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_it_reaches(name):
    text = " ".join(inspect.getdoc(RECIPES[name]).split())
    if name == "digits":  # a test measures it each time
        assert "about 98 %" in text
        return
    assert "easured" in text
    assert "Published" not in text or re.search(r"Published .*\(Table \d of arXiv 1603.05027", text)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "cifar10",
            [
                {"table": "6 of 1512.03385", "network": "ResNet-20"},
                {"table": "2", "network": "ResNet-110"},
                {"table": "2", "network": "ResNet-164"},
                {"table": "3", "network": "ResNet-1001", "dataset": "cifar10"},
            ],
        ),
        ("cifar10_batch64", [{"table": "4"}]),
        (
            "cifar100",
            [
                {"table": "3", "network": f"ResNet-{depth}", "dataset": "cifar100"}
                for depth in (164, 1001)
            ],
        ),
        ("imagenet", [{"table": "5", "network": "ResNet-200"}]),
    ],
)
def test_published_numbers_are_those_of_the_tables(name, rows):
    text = inspect.getdoc(RECIPES[name])
    # the last row of a network is full pre-activation
    found = [kp.published.results(**row)[-1] for row in rows]
    expected = {
        f"{value:g}" for row in found for value in (row.error, row.top5) if value is not None
    }
    assert set(PERCENT.findall(text)) == expected


def test_measured_number_of_the_short_run_is_that_of_its_card():
    card = json.loads((ROOT / "saved_models" / "cifar10_resnet20" / "model_card.json").read_text())
    assert card["run"]["recipe"] == "cifar10_short"
    [error] = PERCENT.findall(inspect.getdoc(RECIPES["cifar10_short"]))
    assert float(error) == pytest.approx(100 * (1 - card["metrics"]["accuracy"]))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_together(name):
    recipe = RECIPES[name]
    config = recipe()
    assert isinstance(config, Config)
    # that has a network from a file
    assert (config.model.name in kp.list_models()) != (name == "finetune")
    assert config.data.name in SOURCES
    assert config.data.augmentation in AUGMENTATIONS
    assert config.output is None
    assert len(inspect.getdoc(recipe).split("\n")[0]) > 20  # what --help says of it


@pytest.fixture
def received(monkeypatch):
    """The configuration and the recipe's name that a command line comes to."""
    calls = []
    monkeypatch.setattr(train, "train", lambda config, recipe: calls.append((config, recipe)))

    def parse(*argv):
        train.main(list(argv))
        return calls.pop()

    return parse


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_without_options_is_the_function_s(received, name):
    assert received(name) == (RECIPES[name](), name)


def test_options_override_fields_and_leave_the_others(received, tmp_path):
    options = words(
        "--model.name cifar_resnet110_preact --model.arrangement original",
        "--model.shortcut exclusive_gating --model.gate-bias -6 --model.dtype mixed_bfloat16",
        f"--data.holdout 5000 --data.dir {tmp_path} --data.watch-test",
        "--optimizer.learning-rate 0.05 --optimizer.nesterov",
        "--optimizer.exclude-from-decay norm bias",
        "--schedule.drops 10 20 --schedule.length 30.5 --schedule.unit epochs",
        f"--batch-size 32 --seed 7 --jit-compile off --output {tmp_path / 'run'}",
    )
    config, name = received("cifar10", *options)
    assert name == "cifar10"
    assert config == Config(
        model=Model(
            "cifar_resnet110_preact",
            arrangement="original",
            shortcut="exclusive_gating",
            gate_bias=-6.0,
            dtype="mixed_bfloat16",
        ),
        data=Data(
            "cifar10", dir=tmp_path, augmentation="pad_crop_flip", holdout=5000, watch_test=True
        ),
        optimizer=Optimizer(learning_rate=0.05, nesterov=True, exclude_from_decay=("norm", "bias")),
        schedule=Schedule("steps", drops=(10, 20), warmup=400, length=30.5, unit="epochs"),
        batch_size=32,
        seed=7,
        jit_compile="off",
        output=tmp_path / "run",
    )


def test_only_overrides_that_are_set_reach_the_model():
    assert Model("any").overrides() == {}
    assert Model("any", gate_bias=0.0, width_factor=2).overrides() == {
        "gate_bias": 0.0,
        "width_factor": 2,
    }


@pytest.mark.parametrize(("unit", "expected"), [("epochs", 15), ("iterations", 2)])
def test_lengths_in_iterations(unit, expected):
    assert Config(schedule=Schedule(unit=unit)).iterations(1.5, 10) == expected
