"""`recommend`: the paper's settings at the paper's depths; all options build networks that
train.
"""

import pytest

import keras_preact as kp
from keras_preact import published
from keras_preact.recommend import recommend
from tests.keras_preact import harness

#: First and last depth, drops, epochs of the warm-up, initialiser.
DEPTHS = [
    (1, 49, (1 / 2, 3 / 4), 0, "VarianceScaling"),
    (50, 1202, (), 5, "VarianceScaling"),
    (1203, 100_000, (), 5, "DepthScaledHe"),
]
TASKS = ("vision", "mobile", "language", "cifar", "imagenet")


@pytest.mark.parametrize(("first", "last", "drops", "warmup", "initializer"), DEPTHS)
def test_depths(first, last, drops, warmup, initializer):
    for depth in (first, last):
        got = recommend(depth=depth)
        assert got.learning_rate == pytest.approx(0.1)
        assert (got.drops, got.warmup_epochs) == (drops, warmup)
        assert got.model_options["arrangement"] == "full_preactivation"
        assert type(got.model_options["kernel_initializer"]).__name__ == initializer
        assert all(f"{name}: " in str(got) for name in got.reasons)


@pytest.mark.parametrize("depth", [110, 164, 200, 300, 1001])
def test_nothing_contradicts_the_papers_tables(depth):
    """Original units train at 1,001 layers (7.61 %, Table 3), and every depth at a rate of
    0.1. Numbers in reasons are those of the tables.
    """
    text = str(recommend(depth=depth))
    for claim in ("hardly train", "mandatory", "essential", "requires", "guide"):
        assert claim not in text
    assert recommend(depth=depth).learning_rate == 0.1
    for shown in ("6.61", "6.37", "7.61", "4.92"):
        assert shown in text
        assert float(shown) in {row.error for row in published.results(dataset="cifar10")}


def test_rate_grows_with_the_batch():
    for batch_size in (1, 256, 1000):
        got = recommend(depth=500, batch_size=batch_size)
        assert got.learning_rate == pytest.approx(0.1 * (batch_size / 256) ** 0.5)


def test_tasks():
    for task, batch_size, wanted in (
        ("vision", 16, ("batch", "relu")),
        ("vision", 15, ("layer", "relu")),
        ("mobile", 256, ("batch", "hard_silu")),
        ("language", 2, ("rms", "swiglu")),
        ("cifar", 128, ("batch", "relu")),
    ):
        got = recommend(depth=50, task=task, batch_size=batch_size).model_options
        activation = got["mlp" if task == "language" else "activation"]
        assert (got["normalization"], activation) == wanted


@pytest.mark.parametrize(
    ("parameters", "rate"), [(None, 0), (10**8 - 1, 0.1), (10**8, 0), (10**9, 0)]
)
def test_dropout(parameters, rate):
    for task in ("vision", "language"):
        got = recommend(depth=50, task=task, parameters=parameters)
        assert got.model_options["dropout"] == rate
    got = recommend(depth=50, task="cifar", parameters=parameters)
    assert got.model_options["dropout"] == 0


def check_rates(got, epochs, steps_per_epoch, rates):
    schedule = got.schedule(steps_per_epoch=steps_per_epoch, epochs=epochs)
    assert [float(schedule(step)) for step in rates] == pytest.approx(list(rates.values()))


@pytest.mark.parametrize("depth", [20, 1202])
def test_the_papers_recipes_win_for_the_papers_networks(depth):
    """Iteration by iteration: 0.01 for 400, 0.1, divided by 10 at 32k and 48k."""
    got = recommend(depth=depth, task="cifar", batch_size=128)
    rates = {0: 0.01, 399: 0.01, 400: 0.1, 31_999: 0.1, 32_000: 0.01, 47_999: 0.01, 48_000: 0.001}
    check_rates(got, 64, 1000, rates)
    assert got.model_options["kernel_initializer"].get_config()["mode"] == "fan_out"
    assert got.optimizer_options == {"momentum": 0.9, "coupled_weight_decay": 1e-4}
    assert not recommend(depth=1203, task="cifar").drops  # deeper networks get other advice
    rates = {0: 0.1, 299: 0.1, 300: 0.01, 599: 0.01, 600: 0.001, 899: 0.001}
    check_rates(recommend(depth=152, task="imagenet"), 90, 10, rates)
    # the warm-up of a short training is shorter
    rates = {0: 0.01, 9: 0.01, 10: 0.1, 19: 0.1, 20: 0.01, 29: 0.01, 30: 0.001, 39: 0.001}
    check_rates(got, 4, 10, rates)
    assert (
        recommend(depth=1001, task="cifar", batch_size=64).learning_rate == 0.1
    )  # as for the paper's 4.62 %
    assert recommend(depth=110, task="cifar", batch_size=512).learning_rate == pytest.approx(0.2)


#: The depth decides only the initialiser among the options of a model.
DISTINCT = [(1, "vision"), (1203, "vision"), (1, "mobile"), (1, "language")]


@pytest.mark.parametrize(("depth", "task"), DISTINCT)
def test_options_build_a_network(depth, task):
    got = recommend(depth=depth, task=task, parameters=10**6).model_options
    options = {"input_shape": (8, 8, 1)} | got
    if task == "language":
        model = kp.models.transformer(1, width=8, **options)
    else:
        model = kp.models.resnet_cifar(8, width_factor=0.25, **options)
    config = model.get_config()
    assert config["dropout"] == 0.1
    for name in got.keys() - {"kernel_initializer"}:
        assert config[name] == got[name]


@pytest.mark.parametrize("depth", [1, 50, 1001, 1203])
def test_schedule_and_optimizer(depth):
    for task in TASKS:
        got = recommend(depth=depth, task=task)
        schedule = got.schedule(steps_per_epoch=7, epochs=60)
        kp.optimizers.CoupledSGD(schedule, **got.optimizer_options)
        rates = [float(schedule(step)) for step in (*range(40, 420, 40), 419)]
        assert got.learning_rate * 0.9 <= max(rates) <= got.learning_rate * 1.000001
        assert rates[-1] < 0.011 * got.learning_rate


def test_errors():
    deep = recommend(depth=2000)
    for call, word in (
        (lambda: recommend(depth=0), "`depth`"),
        (lambda: recommend(depth=20, batch_size=0), "`batch_size`"),
        (lambda: recommend(depth=20, parameters=-1), "`parameters`"),
        (lambda: recommend(depth=20, task="visoin"), "Did you mean 'vision'"),
        (lambda: deep.schedule(steps_per_epoch=10, epochs=5), "shorter than the training"),
        (lambda: deep.schedule(steps_per_epoch=0, epochs=60), "steps=0"),
    ):
        assert word in harness.error_of(call)
