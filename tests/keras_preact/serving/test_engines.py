"""The engines compute what the SavedModel does."""

from typing import get_args, get_type_hints

import numpy as np
import pytest

from keras_preact.export.version import freeze
from keras_preact.serving import engines
from keras_preact.serving.settings import Settings
from tests.keras_preact.serving.server_process import random_images

#: Largest difference, times the largest value: of float32, and of bfloat16, which has 8 bits, after
#: some roundings.
TOLERANCE = {"float32": 1e-4, "bfloat16": 16 * 2.0**-8}


@pytest.fixture
def frozen(saved_model):
    return freeze(*saved_model.loaded.core.concrete_functions)


def images(number):
    return random_images(number, number).astype("float32")


def test_every_engine_is_a_choice_of_the_settings():
    assert get_args(get_type_hints(Settings)["engine"]) == tuple(engines.ENGINES)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("engine", engines.ENGINES)
def test_the_outputs_are_the_models_for_every_batch_size(
    engine, precision, frozen, saved_model, tmp_path
):
    pytest.importorskip(engine)
    run = engines.ENGINES[engine](frozen, Settings(tmp_path), precision)
    answers = {number: run(images(number)) for number in (1, 3, 4)}
    for number, outputs in answers.items():  # which later ones have not changed
        assert sorted(outputs) == ["features", "logits", "probabilities"]
        for name, wanted in saved_model.loaded.core(images(number)).items():
            assert outputs[name].dtype == np.float32
            tolerance = TOLERANCE[precision] * max(1, np.abs(wanted).max())
            np.testing.assert_allclose(outputs[name], wanted, rtol=0, atol=tolerance)
