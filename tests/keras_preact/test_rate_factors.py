"""Learning rates by layer. A weight with a factor moves as with the same optimizer at a
rate that is as many times higher. The optimizers themselves are tested in other files.
"""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from tests.keras_preact import harness

RATE, DECAY = 0.125, 0.25
#: Arguments of each optimizer, with a decay that shows.
KINDS = {
    "CoupledSGD": {"coupled_weight_decay": DECAY},
    "AdamW": {"weight_decay": DECAY},
    "Lion": {"weight_decay": DECAY},
    "Muon": {"weight_decay": DECAY, "adam_weight_decay": 2 * DECAY, "adam_lr_ratio": 0.5},
}
#: Factors of layers, and those of weights with this in their path; others have 1.
FACTORS = {
    "branch": ({"branch": 0.5, "stem": 2.0}, {"/branch/": 0.5, "stem": 2.0}),
    "frozen": ({"stem": 0, "branch": 0}, {"stem": 0, "stage": 0}),
    "stages": ({"stage1": 0.5, "stage2": 0.5, "head": 2}, {"stage": 0.5, "head": 2}),
    "longest": (
        {"stage2_unit1": 2.0, "stage2": 0.5},
        {"stage2_unit1": 2.0, "stage2": 0.5},
    ),
    "inner": (
        {"stage1_unit1": 2.0, "branch": 0.0, "stage2/branch": 0.5, "stage2": 2.0},
        {"stage1": 0.0, "stage2": 0.5},
    ),
}


def made(kind, rate=RATE, **options):
    return getattr(kp.optimizers, kind)(rate, **KINDS[kind], **options)


def network():
    """A network of dense layers, with a stack of units."""
    options = {"block": "dense", "stem": "dense", "stem_filters": 4, "input_shape": (5,)}
    model = kp.models.ResidualNetwork([(4, 1), (4, 3)], classes=4, stacked=True, **options)
    harness.randomize(model)
    return model


def after_updates(optimizer) -> dict[str, np.ndarray]:
    """The trained weights of `network` after two updates."""
    model, draw = network(), np.random.default_rng(0)
    weights = model.trainable_weights
    for _ in range(2):
        gradients = [draw.normal(size=weight.shape).astype("float32") for weight in weights]
        optimizer.apply(list(map(ops.convert_to_tensor, gradients)), weights)
    return {weight.path: harness.numpy(weight) for weight in weights}


@functools.cache
def at_rate(kind, factor):
    return after_updates(made(kind, RATE * factor))


@pytest.mark.backend
@pytest.mark.parametrize("case", FACTORS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_scales_step_and_decay(kind, case):
    """Decays of stem, norms and kernels differ: some of Muon's weights are AdamW's."""
    factors, of_weights = FACTORS[case]
    starts = dict(zip(harness.paths(network()), network().get_weights(), strict=True))
    seen = set()
    for path, value in after_updates(made(kind, rate_factors=factors)).items():
        factor = next((f for part, f in of_weights.items() if part in path), 1.0)
        seen.add(factor)
        if factor == 0:
            np.testing.assert_array_equal(value, starts[path], path)
        elif factor == 1:  # to the bit
            np.testing.assert_array_equal(value, at_rate(kind, 1.0)[path], path)
        else:
            assert not np.allclose(value, at_rate(kind, 1.0)[path], rtol=1e-3), path
            want = at_rate(kind, factor)[path]
            np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6, err_msg=path)
    assert seen >= set(of_weights.values())


def apply(optimizer, gradients, weights) -> None:
    """Apply gradients; on JAX without side effects, as a loss scale needs it."""
    if keras.backend.backend() != "jax":
        optimizer.apply(gradients, weights)
        return
    if not optimizer.built:
        optimizer.build(weights)
    state = [each.value for each in optimizer.variables]
    both = optimizer.stateless_apply(state, gradients, [each.value for each in weights])
    for variables, values in zip((weights, optimizer.variables), both, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


#: What a factor meets, for weights in float32, the only ones that Keras scales gradients of.
MEETS = {
    "gradient_accumulation_steps": 2,
    "use_ema": True,
    "ema_momentum": 0.5,
    "global_clipnorm": 1.0,
}


@pytest.mark.backend
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 8), ("float16", None)])
@pytest.mark.parametrize("kind", KINDS)
def test_factors_with_other_options(kind, dtype, scale):
    """A schedule and weights that are not decayed; accumulated and clipped gradients,
    averages and a loss scale. All weights have half the rate, in one of two ways.
    """
    shapes = {"stem/kernel": (3, 2), "branch/kernel": (2, 4), "branch/gamma": (2,)}
    draw = np.random.default_rng(0)
    starts = {path: draw.normal(size=shape) for path, shape in shapes.items()}
    steps = [[draw.normal(size=shape) for shape in shapes.values()] for _ in range(4)]
    results = []
    for factor in (0.5, 1.0):
        rates = [RATE / factor, RATE / factor / 2]
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], rates)
        factors = {"stem": factor, "branch": factor}
        options = {"exclude_from_decay": ["gamma"], "rate_factors": factors}
        optimizer = inner = made(kind, schedule, **options, **(MEETS if scale else {}))
        if scale:
            optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale)
        weights = [harness.variable(ops.cast(value, dtype), path) for path, value in starts.items()]
        for gradients in steps:
            tensors = [ops.cast((scale or 1) * each, dtype) for each in gradients]
            apply(optimizer, tensors, weights)
        averages = inner._model_variables_moving_average if scale else []
        assert {each.dtype for each in weights} == {dtype}
        results.append([harness.numpy(each) for each in (*weights, *averages)])
    tolerance = 1e-5 if dtype == "float32" else 3e-3
    for scaled, plain in zip(*results, strict=True):
        np.testing.assert_allclose(scaled, plain, rtol=tolerance, atol=tolerance)
    for scaled, start in zip(results[0], starts.values(), strict=False):
        assert np.abs(scaled - start).max() > 5 * tolerance  # it has moved


# --- All weights at once, on torch


def one_by_one(kind):
    """The optimizer as a person derives it, to update single weights in another way. Keras'
    own classes then compute each step.
    """
    base = getattr(kp.optimizers, kind)
    own = {"update_step": lambda self, *arguments: base.update_step(self, *arguments)}
    return type(kind, (base,), own)


#: What can differ between the weights of an update, or between updates.
AT_ONCE = {
    "plain": {},
    "factors": {"rate_factors": {"stage1": 0.5, "stage2": 0, "stage2/branch": 2.0}},
    "decay": {"exclude_from_decay": ["norm", "bias"], "rate_factors": {"stage2": 0.5}},
    "schedule": {
        "learning_rate": keras.optimizers.schedules.ExponentialDecay(RATE, 1, 0.5),
        "rate_factors": {"branch": 0.5},
    },
    "momentum": {"nesterov": False},
    "amsgrad": {"amsgrad": True},
}
ALONE = {"momentum": ("CoupledSGD", "Muon"), "amsgrad": ("AdamW",)}


@pytest.mark.backend
@pytest.mark.skipif(keras.backend.backend() != "torch", reason="each weight has its own step")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, case) for case in AT_ONCE for kind in ALONE.get(case, KINDS)],
)
def test_torch_updates_all_weights_at_once(kind, case, dtype, monkeypatch):
    """They move as with a step for each, also kernels in a stack, of one shape and of several."""
    options = {"learning_rate": RATE} | KINDS[kind] | AT_ONCE[case]
    results = []
    for make in (one_by_one(kind), getattr(kp.optimizers, kind)):
        model = kp.models.resnet_cifar(
            20, classes=4, width_factor=0.25, input_shape=(8, 8, 1), stacked=True, dtype=dtype
        )
        harness.randomize(model)
        weights, draw = model.trainable_weights, np.random.default_rng(0)
        optimizer = make(**options)
        for _ in range(3):
            gradients = [draw.normal(size=weight.shape) for weight in weights]
            optimizer.apply([ops.cast(each, dtype) for each in gradients], weights)
        results.append([harness.numpy(each) for each in (*weights, *optimizer.variables[2:])])
        for of_keras in ("Adam", "Lion", "Muon", "SGD"):  # now without a step for each
            monkeypatch.setattr(getattr(keras.optimizers, of_keras), "update_step", None)
    single, ours = (np.concatenate([each.ravel() for each in result]) for result in results)
    if dtype == "float32":
        np.testing.assert_allclose(ours, single, rtol=2e-5, atol=2e-5)
    else:  # Keras' powers of beta_2 are off by a percent, and signs of Lion can differ
        assert np.isclose(ours, single, rtol=0.02, atol=0.02).mean() > 0.999


@pytest.mark.backend
@pytest.mark.parametrize("kind", KINDS)
def test_fit_and_files(kind, tmp_path):
    dense = [keras.layers.Dense(4, name=name) for name in ("stem_dense", "branch", "head")]
    model = keras.Sequential([keras.Input((3,)), *dense])
    optimizer = made(kind, rate_factors={"stem": 0, "branch": np.float32(0.5)})
    harness.compiled(model, optimizer)
    before = harness.weights(model)
    model.fit(harness.images(8, 3), np.arange(8) % 4, batch_size=4, verbose=0)
    changed = {path.split("/")[-2] for path in harness.changed(model, before)}
    assert changed == {"branch", "head"}
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert loaded.get_config() == optimizer.get_config()
    assert loaded.rate_factors == {"stem": 0, "branch": 0.5}
    # files of optimizers that had no factors
    config = optimizer.get_config()
    del config["rate_factors"]
    assert type(optimizer).from_config(config).rate_factors == {}


# --- The depth


def deep(units=12, **options):
    options |= {"block": "dense", "stem": "dense", "stem_filters": 32, "input_shape": (5,)}
    return kp.models.ResidualNetwork([(32, units)], classes=4, **options)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("power", "rates"), [(1.0, (4.0, 1.0)), (0.5, (1.0, 0.5)), (0.75, (2.0, 4**-0.25))]
)
def test_rates_of_depths(power, rates, stacked):
    model = deep(shortcut=kp.shortcuts.DepthScaling(power, base=3), stacked=stacked)
    for names, rate in zip((["sgd"], ["adamw", "lion", "muon"]), rates, strict=True):
        for name in names:
            wanted = {} if rate == 1 else {"branch": pytest.approx(rate)}
            assert kp.optimizers.depth_rates(model, name) == wanted


def change_of_branches(units, name):
    """How much one update of the weights in the branches changes the output."""
    h = kp.shortcuts.DepthScaling(1.0, base=1)
    model = deep(units, shortcut=h, normalization="none", stacked=True)
    for place in ("stem_dense", "head_classifier"):  # the same at every depth
        layer, draw = model.get_layer(place), np.random.default_rng(0)
        shapes = [weight.shape for weight in layer.weights]
        layer.set_weights([draw.normal(size=shape) / shape[0] ** 0.5 for shape in shapes])
    rates = {"stem": 0, "head": 0} | kp.optimizers.depth_rates(model, name)
    kind = {"sgd": kp.optimizers.CoupledSGD, "adamw": kp.optimizers.AdamW}[name]
    harness.compiled(model, kind(1e-4, rate_factors=rates), run_eagerly=True)
    x = harness.images(16, 5)
    before = model.predict_on_batch(x)
    model.train_on_batch(x, np.arange(16) % 4)
    return np.abs(model.predict_on_batch(x) - before).mean()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_update_of_all_branches_does_the_same_at_every_depth(name):
    """With the rate of the other optimizer, it does 4 times, or a quarter of that."""
    assert 1 / 2 < change_of_branches(32, name) / change_of_branches(8, name) < 2


def test_rates_of_other_networks():
    scaling = kp.shortcuts.DepthScaling(base=3)
    rates = functools.partial(kp.optimizers.depth_rates, optimizer="sgd")
    assert rates(deep()) == rates(deep(3, shortcut=scaling)) == {}
    tokens = kp.models.transformer(3, width=4, num_heads=1, input_shape=(4, 4, 1), shortcut=scaling)
    assert rates(tokens) == {"branch": 2.0}  # attention and MLP are two units
    inner = deep(6, shortcut=scaling)
    outer = keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(5)])
    assert rates(outer) == {"branch": 2.0}
    kp.optimizers.CoupledSGD(rate_factors=rates(outer)).build(outer.trainable_weights)
    for other in (deep(3, shortcut=scaling), deep(3)):
        message = harness.error_of(lambda other=other: rates(keras.Sequential([outer, other])))
        assert "Received: DepthScaling(power=1.0, base=3, units=6) and " in message
    for unit in inner.segments:
        unit.trainable = False
    assert rates(inner) == {}
    message = harness.error_of(lambda: kp.optimizers.depth_rates(inner, "adam"))
    assert "'adamw'" in message
    assert "optimizer='adam'" in message
