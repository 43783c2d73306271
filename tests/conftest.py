"""Strict settings for every test: fixed seeds, full float32 precision, warnings are errors (pyproject.toml)."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch on shared cores is several times slower with more

import keras
import pytest

if keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(0)
