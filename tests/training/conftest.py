"""The files whose code depends on no backend: they run on TensorFlow alone."""

from pathlib import Path

import pytest

ONCE = {
    "test_data_mixing.py",
    "test_data_rand_augment.py",
    "test_plans.py",
    "test_progress.py",
    "test_recipes.py",
    "test_runs.py",
}


@pytest.hookimpl(tryfirst=True)  # before the root's conftest.py, which looks for the marker
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in ONCE and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.once)
