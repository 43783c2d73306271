"""Tune hyperparameters on digits with Ray Tune, which stops bad trials early.

pip install 'ray[tune]'
python docs/search_ray.py
"""

from ray import tune
from ray.tune.schedulers import ASHAScheduler

EPOCHS, BATCH = 5, 64


def train(settings):
    """Train a network with the settings of a trial, in a process of its own."""
    import keras
    from sklearn.datasets import load_digits

    import keras_preact as kp

    digits = load_digits()
    images, labels = digits.images[..., None] * (255 / 16), digits.target  # pixels from 0 to 255
    model = kp.create_model(
        "digits_resnet20_preact",
        include_preprocessing=True,
        arrangement=settings["arrangement"],
        dropout=settings["dropout"],
    )
    steps = EPOCHS * (int(0.8 * len(images)) // BATCH + 1)
    rate = kp.schedules.cosine_schedule(settings["learning_rate"], steps)
    model.compile(
        kp.optimizers.CoupledSGD(rate, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    report = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: tune.report({"val_accuracy": logs["val_accuracy"]})
    )
    model.fit(
        images,
        labels,
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_split=0.2,
        callbacks=[report],
        verbose=0,
    )


tuner = tune.Tuner(
    train,
    param_space={
        "arrangement": tune.choice(["original", "full_preactivation"]),
        "dropout": tune.quniform(0.0, 0.3, 0.1),
        "learning_rate": tune.loguniform(0.01, 0.5),
    },
    tune_config=tune.TuneConfig(
        metric="val_accuracy", mode="max", num_samples=8, scheduler=ASHAScheduler(max_t=EPOCHS)
    ),
)
best = tuner.fit().get_best_result()
print(best.config, best.metrics["val_accuracy"])
