"""The networks of runs: their options, what they are compiled with, and which of a run's
files they are read from.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from training.commands import train
from training.config import Config, Data, Model, Optimizer
from training.data import load
from training.directory import models
from training.errors import UserError
from training.run import networks


def built(**options) -> keras.Model:
    model = Model("digits_resnet8_preact", **{"width_factor": 0.25} | options)
    return networks.build(Config(model=model), load(Data("digits")), 8)


class TestModelOptions:
    def test_given_options_are_arguments_of_the_builder(self):
        given = {"arrangement": "relu_before_addition", "dropout": 0.25, "zero_init_last": False}
        options = ("output_stride=8", "use_bias=true")
        model = Model("digits_resnet8_preact", freeze="stem", options=options, **given)
        assert model.overrides() == given | {"output_stride": 8, "use_bias": True}
        network = built(squeeze_excitation=4, width_factor=0.5)
        assert vars(network.units[0].block)["squeeze_excitation"] == 4
        assert network.get_config()["stem_filters"] == 8

    def test_gates(self):
        shortcut = built(shortcut="exclusive_gating", gate_bias=-6.0).get_config()["shortcut"]
        assert shortcut["class_name"] == "ExclusiveGating"
        assert shortcut["config"]["bias"] == -6

    def test_whitening_stem_is_computed_from_the_training_images(self):
        config = Config(model=Model("cifar_fast_resnet8", width_factor=0.25), data=Data("digits"))
        with train.started(config, "digits") as run:
            network, images = run.network, run.data.in_memory.images
            stem = keras.Model(network.input, network.get_layer("stem_conv").output)
            components = stem.predict_on_batch(images).astype("float64")[..., :4]
        # the components of 2 x 2 pixels, with mean 0 and variance 1: none is constant
        covariance = np.cov(components.reshape(-1, 4).T)
        np.testing.assert_allclose(covariance, np.eye(4), atol=0.02)


#: Options that all optimizers take.
COMMON = {
    "momentum": 0.8,
    "nesterov": True,
    "ema": 0.99,
    "clip_norm": 2.0,
    "weight_decay": 3e-4,
    "exclude_from_decay": ("norm", "bias"),
}


class TestOptimizer:
    def made(self, **options):
        return networks.optimizer(Config(optimizer=Optimizer(**options), accumulate=4), 0.3)

    @pytest.mark.parametrize("name", ["sgd", "muon", "adamw", "lion"])
    def test_options(self, name):
        more = {"adam_ratio": 0.2} if name == "muon" else {}
        made = self.made(name=name, **COMMON, **more)
        assert made.global_clipnorm == 2.0
        assert (made.use_ema, made.ema_momentum) == (True, 0.99)
        assert made.gradient_accumulation_steps == 4
        assert made.exclude_from_decay == ["norm", "bias"]
        if name in ("adamw", "lion"):
            kind = {"adamw": kp.optimizers.AdamW, "lion": kp.optimizers.Lion}[name]
            assert isinstance(made, kind)
            assert (made.weight_decay, made.beta_1) == (3e-4, 0.8)
            return
        assert (made.momentum, made.nesterov) == (0.8, True)
        if name == "sgd":
            assert isinstance(made, kp.optimizers.CoupledSGD)
            assert made.coupled_weight_decay == 3e-4
        else:
            assert isinstance(made, kp.optimizers.Muon)
            assert (made.weight_decay, made.adam_weight_decay) == (3e-4, 3e-4)
            assert made.adam_lr_ratio == 0.2

    @pytest.mark.parametrize(
        ("power", "rates"), [(None, {}), (1.0, {"sgd": 2.0}), (0.5, {"muon": 0.5**0.5})]
    )
    @pytest.mark.parametrize("decay", [None, 0.5])
    @pytest.mark.parametrize("name", ["sgd", "muon", "adamw", "lion"])
    def test_rates_by_layer(self, name, decay, power, rates):
        """Those of `layer_decay`, times that of the branches for the depth, here twice the
        three units that a scaling is for.
        """
        h = "identity" if power is None else kp.shortcuts.DepthScaling(power, base=3)
        network = kp.models.resnet_cifar(14, input_shape=(8, 8, 1), shortcut=h)
        config = Config(optimizer=Optimizer(name=name, layer_decay=decay))
        made = networks.optimizer(config, 0.3, network)
        made.build(network.trainable_weights)
        of_branches = rates.get("sgd" if name == "sgd" else "muon", 1.0)
        parts = ("stem", "stage1", "stage2", "stage3", "head")
        of_parts = {part: (decay or 1) ** (4 - i) for i, part in enumerate(parts)}
        for weight, factor in zip(network.trainable_weights, made._factors, strict=True):
            wanted = next(f for part, f in of_parts.items() if weight.path.startswith(part))
            wanted *= of_branches if "/branch/" in weight.path else 1
            assert factor == pytest.approx(wanted), weight.path

    def test_rates_of_frozen_layers(self):
        h = kp.shortcuts.DepthScaling(1.0, base=3)
        network = kp.models.resnet_cifar(14, input_shape=(8, 8, 1), shortcut=h)
        for place, wanted in (
            ("stage2", {"stage3": 0.5, "head": 1.0, "stage3/branch": 1.0}),
            ("stage3", {"head": 1.0}),
        ):
            kp.transfer.freeze(network, up_to=place)
            made = networks.optimizer(Config(optimizer=Optimizer(layer_decay=0.5)), 0.3, network)
            assert made.rate_factors == wanted
            made.build(network.trainable_weights)

    @pytest.mark.parametrize(
        ("dtype", "scaled"), [("mixed_float16", True), ("mixed_bfloat16", False), (None, False)]
    )
    def test_loss_is_scaled_for_float16(self, dtype, scaled):
        made = networks.optimizer(Config(model=Model(dtype=dtype)), 0.3)
        assert isinstance(made, keras.optimizers.LossScaleOptimizer) == scaled


def test_open_run_names_the_checkpoints_that_are_there(run, tmp_path):
    (tmp_path / "checkpoints").mkdir()

    def error(*checkpoint) -> str:
        with pytest.raises(UserError) as raised:
            models.open_run(tmp_path, *checkpoint)
        return str(raised.value)

    assert "It has no model at all." in error()
    assert "It has no model at all." in error("last")
    [state] = run.glob("checkpoints/state-000000030-*")
    (tmp_path / "checkpoints" / state.name).write_bytes(state.read_bytes())
    assert "was not finished" in error()
    assert "It has: --checkpoint last." in error()
    assert "network.json is damaged or missing" in error("last")
    (tmp_path / "checkpoints" / "best.keras").touch()
    assert "It has: --checkpoint best, --checkpoint last." in error()
    assert "best.keras is damaged, or no model" in error("best")
