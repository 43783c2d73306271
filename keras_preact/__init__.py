"""Pre-activation residual networks on Keras 3: "Identity Mappings in Deep Residual
Networks" (arXiv 1603.05027).

`import keras_preact` imports the networks, and with them every class that a .keras file
can name, so that `keras.saving.load_model` finds it. Only the classes of
`keras_preact.hub` need an import of their own. Modules that take longer to import are
imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

from keras_preact import (
    arrangements,
    blocks,
    initializers,
    models,
    optimizers,
    preprocessing,
    published,
    schedules,
    shortcuts,
    transfer,
)
from keras_preact.arrangements import ARRANGEMENTS, Arrangement
from keras_preact.blocks import BLOCKS
from keras_preact.dropout import DropoutSchedule, set_dropout
from keras_preact.models.registry import create_model, list_models, model_entry
from keras_preact.recommend import Recommendation, recommend
from keras_preact.shortcuts import SHORTCUTS
from keras_preact.stacks import LayerStack, UnitStack
from keras_preact.transformer import TransformerUnit
from keras_preact.units import ResidualUnit

if TYPE_CHECKING:
    from keras_preact import analysis, applications, distribution, export, health, hub, weights
    from keras_preact.health import TrainingHealth
else:
    #: Modules that are imported on first use; TrainingHealth is imported with `health`.
    _LATER = ("analysis", "applications", "distribution", "export", "health", "hub", "weights")

    def __getattr__(name: str):
        if name == "TrainingHealth":
            return importlib.import_module(f"{__name__}.health").TrainingHealth
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER, "TrainingHealth"})
