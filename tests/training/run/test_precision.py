"""Half precision and its choice, loss scaling, accumulated gradients, the average of the
weights, executions of several steps, XLA.

The networks are tiny and have the optimizers of runs. They are compared with float32,
with NumPy, or with a run without parts.
"""

import types

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from training import backends, disk
from training.commands.train import started
from training.config import Config, Data, Model, Optimizer
from training.run import networks

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()
#: Vectors with labels, for 6 batches of 8.
INPUTS = np.random.default_rng(0).normal(size=(48, 12)).astype("float32")
LABELS = np.random.default_rng(1).integers(0, 10, 48)


def network(**options) -> keras.Model:
    """A residual network of dense layers, which compiles fast."""
    keras.utils.set_random_seed(0)
    return kp.models.dense_resnet(4, width=16, input_shape=(12,), classes=10, **options)


def compiled(config: Config, rate=0.1, **options) -> keras.Model:
    """Return a tiny network with the optimizer and the loss of a run."""
    model = network(dtype=config.model.dtype, **options)
    model.compile(
        networks.optimizer(config, rate), networks.loss(config), jit_compile=BACKEND == "jax"
    )
    return model


def weights(model) -> list[np.ndarray]:
    return [
        np.array(ops.convert_to_numpy(variable.value)) for variable in model.trainable_variables
    ]


def averages(model) -> list[np.ndarray]:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return [
        np.array(ops.convert_to_numpy(average.value))
        for average in optimizer._model_variables_moving_average
    ]


def distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def train(model, batch_size: int, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        rows = slice(step * batch_size, (step + 1) * batch_size)
        losses.append(float(np.ravel(model.train_on_batch(INPUTS[rows], LABELS[rows]))[0]))
        model.reset_metrics()
    return losses


def with_options(dtype=None, accumulate=1, **options) -> Config:
    return Config(model=Model(dtype=dtype), optimizer=Optimizer(**options), accumulate=accumulate)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_trains_in_half_precision_with_float32_weights_and_logits(dtype):
    model = compiled(with_options(dtype))
    before = weights(model)
    losses = [train(model, 48, 1)[0] for _ in range(8)]
    assert {variable.dtype for variable in model.weights} == {"float32"}
    assert {unit.compute_dtype for unit in model.copy_units()} == {dtype.removeprefix("mixed_")}
    assert keras.backend.standardize_dtype(model(INPUTS[:2]).dtype) == "float32"
    assert distance(before, weights(model)) > 0
    assert losses[-1] < losses[0]
    if dtype == "mixed_bfloat16":
        single = compiled(with_options())
        assert losses[:4] == pytest.approx([train(single, 48, 1)[0] for _ in range(4)], rel=0.05)


#: Options that an update depends on, besides the mean gradient of a batch.
UPDATES = {
    "plain": {},
    "all": {"weight_decay": 0.05, "nesterov": True, "clip_norm": 0.05, "ema": 0.7},
}


class TestAccumulation:
    @pytest.mark.parametrize("options", UPDATES.values(), ids=UPDATES)
    def test_parts_are_the_whole_batch(self, options):
        """Without batch statistics, 3 updates with 16 images equal 3 updates with 4 parts of 4
        images. The rate changes with the updates.
        """
        schedule = kp.schedules.step_schedule(
            0.2, [2], factor=0.5, warmup_steps=1, warmup_learning_rate=0.05
        )
        whole = compiled(with_options(**options), schedule, normalization="none")
        parts = compiled(with_options(accumulate=4, **options), schedule, normalization="none")
        start = weights(whole)
        train(whole, 16, 3)
        train(parts, 4, 12)
        assert int(whole.optimizer.iterations) == int(parts.optimizer.iterations) == 3
        assert distance(start, weights(whole)) > 1e-3
        assert distance(weights(whole), weights(parts)) < 1e-6
        if "ema" in options:
            assert distance(averages(whole), weights(whole)) > 1e-4
            assert distance(averages(whole), averages(parts)) < 1e-6


def accelerator(monkeypatch, capability: int | None) -> None:
    """Pretend that the backend has an accelerator: an NVIDIA GPU with this compute
    capability, or one without.
    """
    if BACKEND == "tensorflow":
        import tensorflow as tf

        details = {"device_name": "X"} | (
            {} if capability is None else {"compute_capability": (capability, 0)}
        )
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
    elif BACKEND == "jax":
        import jax

        first = types.SimpleNamespace(platform="gpu", device_kind="X")
        first.compute_capability = "gfx906" if capability is None else f"{capability}.0"
        monkeypatch.setattr(jax, "devices", lambda: [first])
    else:
        import torch

        def supported(including_emulation=True):
            return including_emulation or (capability or 0) >= 8

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "X")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)


class TestAuto:
    """`--precision auto`"""

    @pytest.mark.parametrize(("capability", "fast"), [(8, True), (7, False), (None, False)])
    def test_accelerator(self, capability, fast, monkeypatch):
        accelerator(monkeypatch, capability)
        monkeypatch.setattr(backends, "cpu_flags", lambda: [] if fast else ["amx_bf16"])
        assert backends.faster_policy() == (
            ("mixed_bfloat16", "X computes in bfloat16")
            if fast
            else ("float32", "X does not compute in bfloat16")
        )

    @pytest.mark.parametrize("flag", ["amx_bf16", "avx512_bf16", "avx512f"])
    def test_cpu(self, flag, monkeypatch):
        monkeypatch.setattr(backends, "device", lambda: "CPU")
        monkeypatch.setattr(backends, "cpu_flags", lambda: ["amx_int8", flag])
        if BACKEND == "jax":
            expected = "float32", "JAX is not faster in bfloat16 on a CPU"
        elif flag == "avx512f":
            expected = "float32", "this CPU has no bfloat16 instructions"
        else:
            expected = "mixed_bfloat16", f"this CPU has {flag}"
        assert backends.faster_policy() == expected

    def test_run_keeps_its_policy(self, monkeypatch, tmp_path):
        """This holds also if it is resumed on a machine for which `auto` is another policy."""
        model = Model("digits_resnet8_preact", width_factor=0.25, dtype="auto")
        config = Config(model=model, data=Data("digits"), output=tmp_path, resume=True)
        found = []
        for policy, reason in (("mixed_bfloat16", "this CPU has x"), ("float32", "no x")):
            monkeypatch.setattr(backends, "faster_policy", lambda p=policy, r=reason: (p, r))
            with started(config, "digits") as run:
                disk.write_json(tmp_path / "config.json", run.described())
            assert run.network.units[0].compute_dtype == "bfloat16"
            found.append(run.precision)
        assert found == [
            "mixed_bfloat16: this CPU has x",
            "mixed_bfloat16, as at the start of the run",
        ]
