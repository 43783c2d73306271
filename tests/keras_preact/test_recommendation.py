"""`recommend`: the guide's tables row by row, the paper's recipes, and that all of it
builds and trains.
"""

import keras
import pytest

import keras_preact as kp
from keras_preact import advice
from keras_preact.recommendation import recommend
from tests.keras_preact import harness

#: The guide's rows, Sec. 8.4, 8.5 and 8.7: first and last depth, range of the rate, decay, range of
#: the warm-up, initialiser.
GUIDE = [
    (1, 49, (0.1, 0.1), "steps", (0, 0), "he"),
    (50, 199, (0.1, 0.1), "cosine", (5, 10), "he"),
    (200, 999, (0.01, 0.05), "cosine", (10, 20), "delta_orthogonal"),
    (1000, 100_000, (0.001, 0.001), "cosine", (20, 50), "depth_scaled_he"),
]


@pytest.mark.parametrize(("first", "last", "rates", "decay", "warmup", "initializer"), GUIDE)
def test_depths(first, last, rates, decay, warmup, initializer):
    for depth in (first, last):
        got = recommend(depth=depth)
        ranges = got.learning_rate_range, got.decay, got.warmup_epochs_range
        assert ranges == (rates, decay, warmup)
        assert got.learning_rate == pytest.approx(sum(rates) / 2)
        assert got.warmup_epochs == sum(warmup) / 2
        assert (got.clip_norm is not None) == (first == 1000)
        assert (got.arrangement, got.initializer) == ("full_preactivation", initializer)


@pytest.mark.parametrize(("scaling", "power"), [("sqrt", 0.5), ("linear", 1.0)])
def test_rate_grows_with_the_batch(scaling, power):
    base = recommend(depth=500)
    for batch_size in (1, 256, 1000):
        got = recommend(depth=500, scaling=scaling, batch_size=batch_size)
        rates = [rate * (batch_size / 256) ** power for rate in base.learning_rate_range]
        assert got.learning_rate_range == pytest.approx(rates)
        assert got.learning_rate == pytest.approx(sum(rates) / 2)


def test_tasks():
    for task, batch_size, wanted in (
        ("vision", 16, ("batch", "relu")),
        ("vision", 15, ("layer", "relu")),
        ("mobile", 256, ("batch", "hard_silu")),
        ("language", 2, ("rms", "swiglu")),
        ("cifar", 128, ("batch", "relu")),
    ):
        got = recommend(depth=50, task=task, batch_size=batch_size)
        assert (got.normalization, got.activation) == wanted


@pytest.mark.parametrize(
    ("parameters", "rates"),
    [(None, (0, 0)), (10**8 - 1, (0.1, 0.2)), (10**8, (0, 0.1)), (10**9, (0, 0))],
)
def test_dropout(parameters, rates):
    for task, place in (("vision", "between_weights"), ("language", "before_addition")):
        got = recommend(depth=50, task=task, parameters=parameters)
        assert (got.dropout, got.dropout_range, got.dropout_at) == (rates[0], rates, place)
    assert recommend(depth=50, task="cifar", parameters=parameters).dropout == 0


def check_rates(got, epochs, steps_per_epoch, rates):
    schedule = got.schedule(steps_per_epoch=steps_per_epoch, epochs=epochs)
    assert [float(schedule(step)) for step in rates] == pytest.approx(list(rates.values()))


@pytest.mark.parametrize("depth", [20, 1202])
def test_the_papers_recipes_win_for_the_papers_networks(depth):
    """Iteration by iteration: 0.01 for 400, 0.1, divided by 10 at 32k and 48k."""
    got = recommend(depth=depth, task="cifar", batch_size=128)
    rates = {0: 0.01, 399: 0.01, 400: 0.1, 31_999: 0.1, 32_000: 0.01, 47_999: 0.01, 48_000: 0.001}
    check_rates(got, 64, 1000, rates)
    assert (got.initializer, got.clip_norm) == ("he", None)
    assert recommend(depth=1203, task="cifar").decay == "cosine"  # deeper, the guide holds
    rates = {0: 0.1, 299: 0.1, 300: 0.01, 599: 0.01, 600: 0.001, 899: 0.001}
    check_rates(recommend(depth=152, task="imagenet"), 90, 10, rates)
    # a short training has room after its warm-up
    rates = {0: 0.01, 9: 0.01, 10: 0.1, 19: 0.1, 20: 0.01, 29: 0.01, 30: 0.001, 39: 0.001}
    check_rates(got, 4, 10, rates)
    assert recommend(depth=1001, task="cifar", batch_size=64).learning_rate == 0.1  # of the 4.62 %
    assert recommend(depth=110, task="cifar", batch_size=512).learning_rate == pytest.approx(0.2)


#: The depth decides only the initialiser among the options of a model.
DISTINCT = [(1, "vision"), (200, "vision"), (1000, "vision"), (1, "mobile"), (1, "language")]


@pytest.mark.parametrize(("depth", "task"), DISTINCT)
def test_options_build_a_network(depth, task):
    got = recommend(depth=depth, task=task, parameters=10**6)
    options = {"input_shape": (8, 8, 1)} | got.model_options()
    if task == "language":
        model = kp.models.pre_ln_transformer(1, width=8, **options)
        unit = model.units[1].options
        assert (unit.arrangement, unit.block.name) == (kp.arrangements.get("pre_norm"), "swiglu")
    else:
        model = kp.models.resnet_cifar(8, width_factor=0.25, **options)
        unit = model.units[0].options
        assert unit.activation is keras.activations.get(got.activation)
        assert unit.dropout_at == got.dropout_at
    assert (unit.dropout, unit.normalization.serialize()) == (got.dropout, got.normalization)
    assert type(unit.kernel_initializer) is type(advice.INITIALIZERS[got.initializer]())


@pytest.mark.parametrize("depth", [row.start for row in advice.DEPTHS])
def test_schedule_optimizer_and_reasons(depth):
    for task in advice.TASKS:
        got = recommend(depth=depth, task=task)
        schedule = got.schedule(steps_per_epoch=7, epochs=60)
        optimizer = kp.optimizers.CoupledSGD(schedule, **got.optimizer_options())
        assert optimizer.global_clipnorm == got.clip_norm
        rates = [float(schedule(step)) for step in (*range(40, 420, 40), 419)]
        assert got.learning_rate * 0.9 <= max(rates) <= got.learning_rate * 1.000001
        assert rates[-1] < 0.011 * got.learning_rate
        assert all(f"\n  {reason.field}: " in str(got) for reason in got.reasons)


def test_errors():
    deep = recommend(depth=2000)
    for call, word in (
        (lambda: recommend(depth=0), "`depth`"),
        (lambda: recommend(depth=20, batch_size=0), "`batch_size`"),
        (lambda: recommend(depth=20, parameters=-1), "`parameters`"),
        (lambda: recommend(depth=20, task="visoin"), "Did you mean 'vision'"),
        (lambda: recommend(depth=20, scaling="square"), "sqrt"),
        (lambda: deep.schedule(steps_per_epoch=10, epochs=35), "epochs=35"),
        (lambda: deep.schedule(steps_per_epoch=0, epochs=60), "`steps_per_epoch`"),
    ):
        assert word in harness.error_of(call)
