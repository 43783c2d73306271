"""The networks of runs: what they are compiled with, and which of a run's files they
are read from.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from training import networks
from training.config import Config, Model, Optimizer

pytestmark = pytest.mark.backend


class TestOptimizer:
    def test_options(self):
        options = Optimizer(
            clip_norm=2.0,
            ema=0.99,
            momentum=0.8,
            weight_decay=3e-4,
            exclude_from_decay=("norm", "bias"),
        )
        made = networks.optimizer(Config(optimizer=options, accumulate=4), 0.3)
        assert isinstance(made, kp.optimizers.CoupledSGD)
        assert (made.global_clipnorm, made.use_ema, made.ema_momentum, made.momentum) == (
            2.0,
            True,
            0.99,
            0.8,
        )
        assert (made.gradient_accumulation_steps, made.coupled_weight_decay) == (4, 3e-4)
        assert made.exclude_from_decay == ["norm", "bias"]
        plain = networks.optimizer(Config(), 0.3)
        assert (plain.global_clipnorm, plain.use_ema, plain.gradient_accumulation_steps) == (
            None,
            False,
            None,
        )

    def test_muon(self):
        options = Optimizer(
            name="muon",
            momentum=0.6,
            nesterov=True,
            weight_decay=0.1,
            adam_ratio=0.2,
            ema=0.99,
            exclude_from_decay=("norm",),
        )
        made = networks.optimizer(Config(optimizer=options, accumulate=4), 0.3)
        assert isinstance(made, kp.optimizers.Muon)
        assert (made.momentum, made.nesterov, made.adam_lr_ratio) == (0.6, True, 0.2)
        assert (made.weight_decay, made.adam_weight_decay) == (0.1, 0.1)
        assert (made.ema_momentum, made.gradient_accumulation_steps) == (0.99, 4)
        assert made.exclude_from_decay == ["norm"]

    @pytest.mark.parametrize(
        ("dtype", "scaled"), [("mixed_float16", True), ("mixed_bfloat16", False), (None, False)]
    )
    def test_loss_is_scaled_for_float16(self, dtype, scaled):
        made = networks.optimizer(Config(model=Model(dtype=dtype)), 0.3)
        assert isinstance(made, keras.optimizers.LossScaleOptimizer) == scaled

    def test_label_smoothing(self):
        loss = networks.loss(Config(optimizer=Optimizer(label_smoothing=0.1)))
        logits = np.array([[2.0, 0.0, -1.0]], "float32")
        log_shares = logits - np.log(np.exp(logits).sum())
        expected = -(log_shares * (0.9 * np.array([1, 0, 0]) + 0.1 / 3)).sum()
        assert float(loss(np.array([0]), logits)) == pytest.approx(expected, rel=1e-5)


class TestOpenRun:
    def test_each_is_of_its_file(self, run):
        [state] = run.glob("checkpoints/state-000000030-*")
        paths = {
            "final": run / "model.keras",
            "best": run / "checkpoints" / "best.keras",
            "last": state,
        }
        images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), "uint8")
        outputs = []
        for checkpoint, path in paths.items():
            model, found = networks.open_run(run, checkpoint)
            assert found == path
            outputs.append(model.predict_on_batch(images))
        np.testing.assert_array_equal(outputs[0], outputs[2])

    def test_error_names_those_that_are_there(self, run, tmp_path):
        (tmp_path / "checkpoints").mkdir()
        with pytest.raises(
            ValueError,
            match=r"was not finished: there is no .*model.keras. It has no model at all\.",
        ):
            networks.open_run(tmp_path)
        with pytest.raises(
            ValueError, match=r"there is no .*state-\*.npz. It has no model at all\."
        ):
            networks.open_run(tmp_path, "last")
        [state] = run.glob("checkpoints/state-000000030-*")
        (tmp_path / "checkpoints" / state.name).write_bytes(state.read_bytes())
        with pytest.raises(
            ValueError, match=r"there is no .*model.keras. It has: --checkpoint last\."
        ):
            networks.open_run(tmp_path)
        (tmp_path / "checkpoints" / "best.keras").touch()
        with pytest.raises(ValueError, match=r"It has: --checkpoint best, --checkpoint last\."):
            networks.open_run(tmp_path)
        with pytest.raises(ValueError, match=r"network.json is damaged or missing"):
            networks.open_run(tmp_path, "last")
        with pytest.raises(ValueError, match=r"best.keras is damaged, or no model"):
            networks.open_run(tmp_path, "best")
