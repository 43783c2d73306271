"""What the tests of faults share: one exported model."""

import pytest


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A folder of models that holds one, in version 1."""
    from tests.keras_preact.serving.server_process import export

    directory = tmp_path_factory.mktemp("models")
    export(directory)
    return directory


@pytest.fixture(scope="session")
def saved_model(directory):
    from tests.keras_preact.serving.server_process import NAME, SavedModel

    return SavedModel(directory / NAME / "1")
