"""Pre-activation residual networks on Keras 3: "Identity Mappings in Deep Residual Networks" (arXiv 1603.05027)."""

from keras_preact import (
    advice,
    analysis,
    arrangements,
    distribution,
    export,
    health,
    initializers,
    losses,
    models,
    optimizers,
    preprocessing,
    published,
    schedules,
    shortcuts,
)
from keras_preact.arrangements import ARRANGEMENTS, Arrangement
from keras_preact.health import TrainingHealth
from keras_preact.models.registry import create_model, list_models, model_entry
from keras_preact.recommend import Recommendation, recommend
from keras_preact.shortcuts import SHORTCUTS
from keras_preact.stacks import UnitStack
from keras_preact.transformer import TransformerUnit
from keras_preact.units import BLOCKS, ResidualUnit
