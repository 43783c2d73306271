"""Strict settings for every test: fixed seeds, full float32 precision, warnings are
errors (pyproject.toml).
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # torch on shared cores is several times slower with more

import keras
import pytest

if keras.backend.backend() == "jax":
    import jax

    # Nearly all of the time is compiling, and what runs for milliseconds need not be fast. XLA
    # reads it at the first array.
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    )
    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(0)


def pytest_collection_modifyitems(items):
    """Put files with slow tests first: the last file that workers take should not be a
    long one.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
