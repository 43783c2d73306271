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
#: the warm-up.
GUIDE = [
    (1, 49, (0.1, 0.1), "steps", (0, 0)),
    (50, 199, (0.1, 0.1), "cosine", (5, 10)),
    (200, 999, (0.01, 0.05), "cosine", (10, 20)),
    (1000, 100_000, (0.001, 0.001), "cosine", (20, 50)),
]


@pytest.mark.parametrize(("first", "last", "rates", "decay", "warmup"), GUIDE)
def test_depths(first, last, rates, decay, warmup):
    for depth in (first, last):
        got = recommend(depth=depth)
        assert (got.learning_rate_range, got.decay, got.warmup_epochs_range) == (
            rates,
            decay,
            warmup,
        )
        assert got.learning_rate == pytest.approx(sum(rates) / 2)
        assert got.warmup_epochs == sum(warmup) / 2
        assert (got.clip_norm is not None) == (first == 1000)
        assert got.arrangement == "full_preactivation"
    initializers = {1: "he", 50: "he", 200: "delta_orthogonal", 1000: "depth_scaled_he"}
    assert (
        recommend(depth=first).initializer
        == recommend(depth=last).initializer
        == initializers[first]
    )


@pytest.mark.parametrize("batch_size", [1, 256, 1024, 1000])
@pytest.mark.parametrize(("scaling", "power"), [("sqrt", 0.5), ("linear", 1.0)])
def test_rate_grows_with_the_batch(scaling, power, batch_size):
    for depth in (20, 500):
        base = recommend(depth=depth)
        got = recommend(depth=depth, scaling=scaling, batch_size=batch_size)
        factor = (batch_size / 256) ** power
        assert got.learning_rate == pytest.approx(base.learning_rate * factor)
        rates = [rate * factor for rate in base.learning_rate_range]
        assert got.learning_rate_range == pytest.approx(rates)


@pytest.mark.parametrize(
    ("task", "batch_size", "normalization", "activation"),
    [
        ("vision", 256, "batch", "relu"),
        ("vision", 16, "batch", "relu"),
        ("vision", 15, "layer", "relu"),
        ("mobile", 256, "batch", "hard_silu"),
        ("language", 256, "rms", "swiglu"),
        ("language", 2, "rms", "swiglu"),
        ("cifar", 128, "batch", "relu"),
        ("imagenet", 256, "batch", "relu"),
    ],
)
def test_tasks(task, batch_size, normalization, activation):
    got = recommend(depth=50, task=task, batch_size=batch_size)
    assert (got.normalization, got.activation) == (normalization, activation)


@pytest.mark.parametrize(
    ("parameters", "rates"),
    [
        (None, (0, 0)),
        (1, (0.1, 0.2)),
        (99_999_999, (0.1, 0.2)),
        (100_000_000, (0, 0.1)),
        (999_999_999, (0, 0.1)),
        (10**9, (0, 0)),
    ],
)
def test_dropout(parameters, rates):
    for task, place in (("vision", "between_weights"), ("language", "before_addition")):
        got = recommend(depth=50, task=task, parameters=parameters)
        assert (got.dropout, got.dropout_range, got.dropout_at) == (rates[0], rates, place)
    assert recommend(depth=50, task="cifar", parameters=parameters).dropout == 0


@pytest.mark.parametrize("depth", [20, 110, 164, 1001, 1202])
def test_the_papers_recipe_wins_for_the_papers_networks(depth):
    """Iteration by iteration: 0.01 for 400, 0.1, divided by 10 at 32k and 48k, at every
    depth.
    """
    got = recommend(depth=depth, task="cifar", batch_size=128)
    schedule = got.schedule(steps_per_epoch=1000, epochs=64)
    ends = [(0, 399, 0.01), (400, 31_999, 0.1), (32_000, 47_999, 0.01), (48_000, 63_999, 0.001)]
    for first, last, rate in ends:
        assert [float(schedule(step)) for step in (first, last)] == pytest.approx([rate] * 2)
    assert (got.initializer, got.clip_norm) == ("he", None)
    [reason] = [reason for reason in got.reasons if reason.field == "learning_rate"]
    assert "1603.05027" in reason.source


def test_recipes_and_batches():
    assert (
        recommend(depth=1001, task="cifar", batch_size=64).learning_rate == 0.1
    )  # the recipe of the 4.62 %
    assert recommend(depth=110, task="cifar", batch_size=512).learning_rate == pytest.approx(0.2)
    assert recommend(
        depth=110, task="cifar", batch_size=512, scaling="linear"
    ).learning_rate == pytest.approx(0.4)
    imagenet = recommend(depth=152, task="imagenet").schedule(steps_per_epoch=10, epochs=90)
    wanted = {0: 0.1, 299: 0.1, 300: 0.01, 599: 0.01, 600: 0.001, 899: 0.001}
    assert [float(imagenet(step)) for step in wanted] == pytest.approx(list(wanted.values()))


@pytest.mark.parametrize(("task", "deepest"), [("cifar", 1202), ("imagenet", 200)])
def test_deeper_than_the_paper_the_guide_speaks(task, deepest):
    assert recommend(depth=deepest, task=task).decay == "steps"
    assert recommend(depth=deepest + 1, task=task).decay == "cosine"


def test_reasons_say_where_guide_and_measurement_differ():
    """The guide requires orthogonal weights; ten thousand layers trained here without."""
    reasons = {reason.field: reason.sentence for reason in recommend(depth=10_001).reasons}
    for part in ("orthogonal", "10,001", "DepthScaledHe", "very_deep_preact_jax.json"):
        assert part in reasons["initializer"]
    assert "at 0.1 (task='cifar')" in reasons["learning_rate"]


ALL = [(row.start, task) for row in advice.DEPTHS for task in advice.TASKS]

#: The depth decides only the initialiser among the options of a model.
DISTINCT = [
    (1, "vision"),
    (200, "vision"),
    (1000, "vision"),
    (1, "mobile"),
    (1, "cifar"),
    (1, "language"),
    (1000, "language"),
]


@pytest.mark.parametrize(("depth", "task"), DISTINCT)
def test_options_build_a_network(depth, task):
    got = recommend(depth=depth, task=task, parameters=10**6)
    if task == "language":
        model = kp.models.pre_ln_transformer(
            1, width=8, input_shape=(8, 8, 1), **got.model_options()
        )
        assert {unit.options.arrangement for unit in model.units} == {
            kp.arrangements.get("pre_norm")
        }
        assert model.units[1].options.block.name == "swiglu"
    else:
        model = kp.models.resnet_cifar(
            8, width_factor=0.25, input_shape=(8, 8, 1), **got.model_options()
        )
        assert model.units[0].options.activation is keras.activations.get(got.activation)
        assert model.units[0].options.dropout_at == got.dropout_at
    assert {unit.options.dropout for unit in model.units} == {got.dropout}
    assert {unit.options.normalization.serialize() for unit in model.units} == {got.normalization}
    kind = type(advice.INITIALIZERS[got.initializer]())
    assert {type(unit.options.kernel_initializer) for unit in model.units} == {kind}


@pytest.mark.parametrize(("depth", "task"), ALL)
def test_schedule_and_optimizer(depth, task):
    got = recommend(depth=depth, task=task)
    schedule = got.schedule(steps_per_epoch=7, epochs=60)
    optimizer = kp.optimizers.CoupledSGD(schedule, **got.optimizer_options())
    assert optimizer.global_clipnorm == got.clip_norm
    rates = [float(schedule(step)) for step in (*range(40, 420, 40), 419)]
    assert max(rates) <= got.learning_rate * 1.000001
    assert max(rates) >= got.learning_rate * 0.9
    assert rates[-1] < 0.011 * got.learning_rate


def test_a_short_training_has_room_after_its_warmup():
    schedule = recommend(depth=20, task="cifar", batch_size=128).schedule(
        steps_per_epoch=10, epochs=4
    )
    assert [round(float(schedule(step)), 6) for step in (0, 9, 10, 19, 20, 29, 30, 39)] == [
        0.01, 0.01, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001
    ]  # fmt: skip


def test_text_names_defaults_and_links():
    lines = str(recommend(depth=110)).splitlines()
    assert lines[1] == (
        "  Defaults: task='vision' ('cifar' and 'imagenet' are the paper's recipes), batch_size=256"
    )
    assert lines[-1] == "https://arxiv.org/abs/1603.05027"
    assert lines.count("  activation: relu") == 1
    cifar = str(recommend(depth=110, task="cifar", batch_size=128)).splitlines()
    assert not any("Defaults" in line for line in cifar)
    links = ["https://arxiv.org/abs/1512.03385", "https://arxiv.org/abs/1603.05027"]
    assert cifar[-2:] == links


def test_text_and_reasons():
    for depth, task in ALL:
        got = recommend(depth=depth, task=task, parameters=10**6)
        text = str(got)
        assert text.startswith(f"{depth} layers, {task}, batches of 256, 1,000,000 parameters\n")
        fields = [reason.field for reason in got.reasons]
        assert len(set(fields)) == len(fields) == 10
        for reason in got.reasons:
            assert hasattr(got, reason.field)
            assert f"\n  {reason.field}: " in text
            assert reason.sentence.endswith(".")
            assert reason.source
        assert max(map(len, text.splitlines())) <= 100
    with pytest.raises(AttributeError):
        got.depth = 3


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"depth": 0}, ("`depth` must be a positive integer", "depth=0")),
        ({"depth": 20.5}, ("`depth`", "20.5")),
        ({"batch_size": 0}, ("`batch_size` must be a positive integer", "batch_size=0")),
        ({"parameters": -1}, ("`parameters` must be a positive integer", "parameters=-1")),
        ({"task": "visoin"}, ("Unknown task", "Did you mean 'vision'", "task='visoin'")),
        ({"scaling": "square"}, ("Unknown scaling", "sqrt", "scaling='square'")),
    ],
    ids=harness.label,
)
def test_errors(options, parts):
    message = harness.error_of(lambda: recommend(**{"depth": 20} | options))
    assert all(part in message for part in parts), message


def test_errors_of_a_schedule():
    got = recommend(depth=2000)
    message = harness.error_of(lambda: got.schedule(steps_per_epoch=10, epochs=35))
    assert "35 epochs" in message
    assert "Received: epochs=35" in message
    assert "`steps_per_epoch`" in harness.error_of(
        lambda: got.schedule(steps_per_epoch=0, epochs=60)
    )
