"""Do ten thousand layers train? Some steps on one batch of digits."""

import math
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from .. import backends, disk
from ..config import Data
from ..errors import check_positive, checking
from ..run import limits

#: Name of a network to its default number of layers and learning rate.
NETWORKS = {"preact": (10_001, 0.01), "released": (10_001, 0.01), "vanilla": (10_000, 0.001)}


def _build(network: str, layers: int, width: float, remat: int | bool):
    """Return a network. The weights of preact are scaled for the depth. With the released
    code's weights, the gradients grow towards the start. A vanilla network has no
    shortcuts and no normalisation.
    """
    import keras_preact as kp

    options: dict[str, Any] = {"input_shape": (8, 8, 1), "stacked": True, "remat": remat}
    if network == "vanilla":
        return kp.models.vanilla_cnn(layers, filters=max(1, int(16 * width)), **options)
    if network == "preact":
        options["kernel_initializer"] = kp.initializers.DepthScaledHe()
    return kp.models.resnet_cifar(layers, block="bottleneck", width_factor=width, **options)


def run(
    network: Annotated[Literal["preact", "released", "vanilla"], tyro.conf.Positional],
    /,
    layers: int | None = None,
    width: float = 1.0,
    batch: Annotated[int, tyro.conf.arg(aliases=["--batch-size"])] = 32,
    steps: int = 20,
    learning_rate: Annotated[float | None, tyro.conf.arg(aliases=["--lr"])] = None,
    remat: int = 0,
    seed: int = 0,
    output: Path | None = None,
) -> None:
    """Train a network of ten thousand layers for some steps on one batch of digits.

    Prints time, memory, the size of the gradients along the network and the losses.

    Args:
        network: Network: preact (weights scaled for the depth), released (the released code's
            weights) or vanilla (a plain CNN with tanh and delta-orthogonal weights, no
            shortcuts).
        layers: Number of layers. If not given: 10,001, or 10,000 for vanilla.
        width: Factor on the number of channels.
        batch: Images per step.
        steps: Number of steps.
        learning_rate: Learning rate. If not given: 0.01, or 0.001 for vanilla.
        remat: Recompute this many units together in the backward pass. 0: keep
            everything.
        seed: Seed of the weights.
        output: Write the figures to this JSON file.
    """
    check_positive(width=width, batch=batch, steps=steps, learning_rate=learning_rate)
    limits.check_one("seed", seed)
    disk.make_place(output, "--output")
    import keras

    import keras_preact as kp

    usual_layers, usual_rate = NETWORKS[network]
    rate = usual_rate if learning_rate is None else learning_rate
    keras.utils.set_random_seed(seed)
    images, labels = _digits(batch, seed)

    start = time.perf_counter()
    with checking():
        model = _build(network, usual_layers if layers is None else layers, width, remat or False)
    model.compile(
        kp.optimizers.CoupledSGD(rate, coupled_weight_decay=0.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    built = time.perf_counter() - start
    parameters = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    print(
        f"{model.name}: {parameters:,} trainable parameters, built in {built:.1f} s "
        f"({keras.backend.backend()})",
        flush=True,
    )
    losses, seconds, gradients = _train(model, images, labels, steps, rate)
    result = {
        "network": network,
        "name": model.name,
        "backend": keras.backend.backend(),
        "device": backends.device(),
        "cpu": backends.cpu(),
        "settings": {
            "width": width,
            "batch": batch,
            "learning_rate": rate,
            "remat": remat,
            "seed": seed,
        },
        "parameters": parameters,
        "build_seconds": built,
        "first_step_seconds": seconds[0],
        "step_seconds": statistics.median(seconds[1:] or seconds),
        "peak_resident_bytes": backends.peak_resident(),
        "gradient_norms": gradients,
        "losses": losses,
    }
    print(
        f"First step {seconds[0]:.1f} s, then {result['step_seconds']:.1f} s each (median), at "
        f"most {result['peak_resident_bytes'] / 1e9:.1f} GB of memory; loss {losses[0]:.4f} to "
        f"{losses[-1]:.4f}"
    )
    if output is not None:
        disk.write_json(output, result)
        print(f"Written: {output}")


def _digits(batch: int, seed: int):
    """Return a batch of training images, normalised, and their labels."""
    from .. import data

    digits = data.load(Data("digits"))
    stream = data.training_stream(digits, batch, "none", 8, seed).dataset()
    images, labels = next(stream.as_numpy_iterator())
    return digits.preprocessing.normalize(images).astype("float32"), labels


def _train(model, images, labels, steps: int, rate: float):
    """Train. Return the loss and the seconds of each step, and the norms of the gradients
    in the first step: path of a weight to the norms in the first, middle and last unit of
    its stack.
    """
    from keras import ops

    kernels = {
        weight.path: weight
        for weight in model.trainable_weights
        if weight.path.endswith("kernel")
        and ("_units/" in weight.path or weight.path.startswith(("stem", "head")))
    }
    before = {path: np.array(ops.convert_to_numpy(weight)) for path, weight in kernels.items()}
    losses, seconds = [], []
    gradients: dict[str, list[float]] = {}
    for step in range(1, steps + 1):
        start = time.perf_counter()
        losses.append(float(np.ravel(model.train_on_batch(images, labels))[0]))
        seconds.append(time.perf_counter() - start)
        print(f"step {step}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s", flush=True)
        if step > 1:
            continue
        print("Norms of the gradients (in a stack: first, middle and last unit)")
        for path, weight in kernels.items():
            # the first step of SGD moves a weight by its gradient times the rate
            moved = (before[path] - ops.convert_to_numpy(weight.value)) / rate
            units = moved if "_units/" in path else moved[None]
            norms = np.sqrt((units**2).reshape(len(units), -1).sum(1))
            gradients[path] = [float(norm) for norm in norms[[0, len(norms) // 2, -1]]]
            shown = gradients[path] if "_units/" in path else gradients[path][:1]
            print(f"  {path:40}{''.join(f' {norm:9.3g}' for norm in shown)}", flush=True)
    return losses, seconds, gradients
