"""The parts of a run, in the order in which they are made: data, schedule, batches,
network. A network that is fine-tuned comes with the data, since its file decides the
preprocessing and the size of the images.

An iteration is an update of the weights. With `--accumulate` it takes several steps of
`fit`, each on a micro-batch.
"""

import dataclasses
import math
import platform

import keras
import numpy as np
import tensorflow as tf

import keras_preact as kp

from .. import backends
from .. import data as datasets
from ..cli.terminal import between_words
from ..config import Config, from_json
from ..data.crops import pad
from ..data.resident import Cut
from ..directory import runs
from . import callbacks, finetune, networks, plans
from .on_device import OnDevice

#: Number of training images from which a whitening stem is computed.
ADAPTED_IMAGES = 5000


class Run:
    """A run of a configuration, with its network compiled for a distribution.

    Args:
        config: Configuration of the run.
        recipe: Name of its recipe.
        distribution: The active distribution. The caller has entered it and seeded Keras.

    Attributes:
        data: Images of the run.
        plan: Length of the run.
        rate: Learning rate, a number or a schedule.
        network: Network that is saved, measured and exported.
        model: Model that is compiled and fitted: the network, or with `data.on_device`
            a lookup of its training images and then the network.
        monitored: Name of the images whose accuracy the run reports: "held-out" if there
            are any, which also choose the best epoch, else "test".
        split: The same images, if they are measured after every epoch, else None.
        rows: Slice of every batch that this process feeds to the model.
        precision: The policy that `--precision auto` chose and why, else None.

    Raises:
        ValueError: for options that do not fit together.
    """

    def __init__(self, config: Config, recipe: str, distribution: kp.distribution.Distribution):
        self.recipe = recipe
        self.distribution = distribution
        config, self.precision = _with_policy(config)

        # --- Data
        self.data = datasets.load(config.data)
        pretrained = None
        if config.model.weights is not None:
            config, self.data, pretrained = finetune.begin(config, self.data)
        self.config = config
        self.size = networks.image_size(config, self.data)
        self.monitored = "held-out" if self.data.holdout else "test"
        self.split = self.data.holdout or (self.data.test if config.data.watch_test else None)

        # --- Schedule
        self.plan = plans.plan(config, self.data.train.size)
        for warning in (*self.data.notes, plans.check_warmup(config, self.plan)):
            if warning is not None:
                self.say(f"Warning: {warning}")
        self.rate = plans.learning_rate(config, self.plan)

        # --- Batches
        self.rows = distribution.rows(config.micro_batch_size)
        self.stream = datasets.training_stream(
            self.data,
            config.micro_batch_size,
            config.data.augmentation,
            self.size,
            config.seed,
            config.data.padding,
            border=config.data.border,
            flip=config.data.flip,
            rand_augment=config.data.rand_augment,
            mixup=config.data.mixup,
            cutmix=config.data.cutmix,
            on_device=config.data.on_device,
        )
        # After all checks that are fast. Before the training:
        self.data.check()  # a broken test image must not end the run after its first epoch

        # --- Network
        self.network = (
            networks.build(config, self.data, self.size) if pretrained is None else pretrained
        )
        # a network of a person may have no such arguments
        stem = getattr(self.network, "arguments", {}).get("stem")
        if pretrained is None and stem == "whitening":
            self.network.adapt(self.plain_images(ADAPTED_IMAGES))
        self.model = self._with_images() if config.data.on_device else self.network
        distribution.compile(
            self.model,
            optimizer=networks.optimizer(config, self.rate, self.network),
            loss=networks.loss(config),
            # weighted: without the rows that fill the last batch of an evaluation
            weighted_metrics=["accuracy"],
            jit_compile=backends.jit_compile(config.jit_compile, self.model),
            steps_per_execution=config.steps_per_execution,
        )

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.distribution.is_chief

    def say(self, message: str) -> None:
        """Print a message, in the process that writes."""
        if self.is_chief:
            print(between_words(message), flush=True)

    # --- Images

    def _with_images(self) -> OnDevice:
        assert self.data.in_memory is not None
        options = self.config.data
        images, mean = self.data.in_memory.images, self.data.preprocessing.mean
        padded = pad(images, mean, options.padding, options.border)
        return OnDevice(self.network, Cut(padded, options.border))

    def training_data(self, step: int = 0):
        """Return the batches from a step on, as a tf.data.Dataset."""
        return self._labelled(self.stream.dataset(step, self.rows))

    def _labelled(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Return batches whose labels have the form that the loss takes."""
        if not self.config.has_soft_labels or batches.element_spec[1].shape.rank == 2:
            return batches
        classes = len(self.data.classes)
        return batches.map(lambda images, labels: (images, tf.one_hot(labels, classes)))

    def plain_images(self, count: int) -> np.ndarray:
        """Return at most `count` training images of all classes, not augmented."""
        images, _ = datasets.sample(self.data, self.data.train, count, self.size)
        return images

    def evaluation_data(self, split: datasets.Reader):
        """Return the images of a split as an input of `evaluate`."""
        config = self.config
        batches = datasets.evaluation_batches(
            self.data, split, config.micro_batch_size, config.data.size, self.rows
        )
        return self.distribution.evaluation_data(
            self._labelled(batches), config.micro_batch_size, split.size
        )

    # --- Descriptions of the run

    @property
    def class_weights(self) -> dict[int, float] | None:
        """Weights of the classes in training, if they differ."""
        return self.data.class_weights if self.config.data.class_weights == "balanced" else None

    @property
    def parameters(self) -> int:
        """Number of parameters that are trained."""
        return sum(math.prod(weight.shape) for weight in self.network.trainable_weights)

    def seeds(self, count: callbacks.Count) -> callbacks.TorchSeeds | None:
        """Return the callback for the random numbers of a step, if the backend needs
        one.
        """
        if keras.backend.backend() != "torch":
            return None
        return callbacks.TorchSeeds(self.config.seed, self.distribution.process, count)

    def describe_step(self, step: int) -> str:
        """Return a step of `fit` in words."""
        iteration, epoch = step // self.plan.micro_batches + 1, step // self.plan.per_epoch + 1
        return f"iteration {iteration:,} (epoch {epoch})"

    def described_data(self) -> dict:
        """Return the part of config.json by which a resumed run recognises its images."""
        data = self.data
        splits = {"train": data.train, "holdout": data.holdout, "test": data.test}
        return {
            "classes": list(data.classes),
            "images": {name: split.size if split else 0 for name, split in splits.items()},
            "hashes": {name: split.hash if split else None for name, split in splits.items()},
            "preprocessing": data.preprocessing.for_size(self.size).to_dict(),
        }

    def described(self) -> dict:
        """Return the content of config.json: the configuration, and the data and
        software that a later command needs.
        """
        return {
            "recipe": self.recipe,
            "config": dataclasses.asdict(self.config),
            **self.described_data(),
            "iterations": self.plan.iterations,
            "trainable_parameters": self.parameters,
            "code": backends.code(),
            "device": {"name": backends.device(), "cpu": backends.cpu()},
            "versions": {
                "python": platform.python_version(),
                "keras": keras.__version__,
                "backend": keras.backend.backend(),
                "tensorflow": tf.__version__,
                "numpy": np.__version__,
            },
        }


def _with_policy(config: Config) -> tuple[Config, str | None]:
    """Return the configuration with the policy that `auto` chooses, and the reason. A
    resumed run keeps its policy, also on another machine.
    """
    if config.model.dtype != "auto":
        return config, None
    if config.resume and config.output and (config.output / "config.json").is_file():
        policy = from_json(Config, runs.read_config(config.output)["config"]).model.dtype
        why = f"{policy or 'float32'}, as at the start of the run"
    else:
        policy, reason = backends.faster_policy()
        why = f"{policy}: {reason}"
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=policy)), why
