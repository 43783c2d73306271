"""Tune hyperparameters on digits with KerasTuner.

pip install keras-tuner
python docs/search_keras_tuner.py
"""

import keras
import keras_tuner
from sklearn.datasets import load_digits

import keras_preact as kp

EPOCHS, BATCH = 5, 64
digits = load_digits()
images, labels = digits.images[..., None] * (255 / 16), digits.target  # pixels from 0 to 255


def build(search):
    """Return a compiled network with the settings of a trial."""
    model = kp.create_model(
        "digits_resnet20_preact",
        include_preprocessing=True,
        arrangement=search.Choice("arrangement", ["original", "full_preactivation"]),
        dropout=search.Float("dropout", 0.0, 0.3, step=0.1),
    )
    rate = search.Float("learning_rate", 0.01, 0.5, sampling="log")
    steps = EPOCHS * (int(0.8 * len(images)) // BATCH + 1)
    model.compile(
        kp.optimizers.CoupledSGD(kp.schedules.cosine_schedule(rate, steps), momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


tuner = keras_tuner.RandomSearch(
    build, "val_accuracy", max_trials=8, seed=0, directory="runs/search", project_name="digits"
)
tuner.search(images, labels, batch_size=BATCH, epochs=EPOCHS, validation_split=0.2, verbose=0)
tuner.results_summary(3)
