"""What the tests of the server share: the condition for all of them, and one exported
model.
"""

import importlib.util

import keras
import pytest

# Nothing here depends on the backend of Keras: the server needs TensorFlow alone.
if keras.backend.backend() != "tensorflow" or importlib.util.find_spec("granian") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def directory(once_per_run):
    """A folder of models that holds one, in version 1."""
    from tests.keras_preact.serving.server_process import export

    return once_per_run("served_models", export)


@pytest.fixture(scope="session")
def version(directory):
    """The folder of that version; tests that change it copy it."""
    from tests.keras_preact.serving.server_process import NAME

    return directory / NAME / "1"


@pytest.fixture(scope="session")
def saved_model(version):
    from tests.keras_preact.serving.server_process import SavedModel

    return SavedModel(version)


@pytest.fixture(scope="module")
def server():
    """A server of the models of `fakes`, in a thread."""
    from tests.keras_preact.serving import fakes

    with fakes.serving() as running:
        yield running


@pytest.fixture
def anyio_backend():
    """Run tests with the marker `anyio` in asyncio's event loop."""
    return "asyncio"
