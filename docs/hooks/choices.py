"""The tables of docs/choose.md: which network, how long, how good. This file names runs,
recipes and commands; every number comes from results/, the weights' cards in
keras_preact/models/trained/ and training/benchmark/measured/.
"""

import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import benchmarks

import keras_preact as kp
from keras_preact.models.registry import TRAINED
from training.cli.terminal import duration, markdown
from training.config import Config, Model, from_json
from training.ranks import spread
from training.recipes import RECIPES
from training.reproduce import results

ROOT = Path(__file__).parents[2]
NOTHING = "not measured"


class Choice(NamedTuple):
    """A command, and where its numbers are.

    Args:
        command: Command line after `keras-preact`.
        trial: The trial in results/ whose runs it trains.
        device: The device of these runs, `CPU` or the beginning of the name of another one.
        speed: File and candidate in training/benchmark/measured/ with the speed of its train
            step, if no run was measured.
    """

    command: str
    trial: str = ""
    device: str = ""
    speed: tuple[str, str] | None = None


#: Group to its choices.
GROUPS = {
    "cpu_minutes": (
        Choice("train cifar10_fast", "cifar10/fast_resnet8", "CPU"),
        Choice(
            "reproduce digits --rows resnet110-full_preactivation --seeds 1",
            "digits/resnet110-full_preactivation",
            "CPU",
        ),
        Choice("reproduce advice --rows ResNet-20 --seeds 1", "digits/resnet20-preact", "CPU"),
        Choice("train digits"),
    ),
    "cpu_night": (
        Choice(
            "reproduce eighth2 --rows resnet56-full_preactivation-eighth --seeds 1",
            "cifar10/resnet56-full_preactivation-eighth",
            "CPU",
        ),
        Choice(
            "train cifar10 --model.name cifar_resnet20_original",
            "cifar10/resnet20-original",
            "CPU",
        ),
        Choice(
            "train cifar10",
            "cifar10/resnet20-full_preactivation",
            "CPU",
        ),
    ),
    "gpu": (
        Choice("train cifar10_fast", "cifar10/fast_resnet8", "NVIDIA"),
        Choice(
            "reproduce eighth2 --rows resnet56-full_preactivation-eighth --seeds 1",
            "cifar10/resnet56-full_preactivation-eighth",
            "NVIDIA",
        ),
        Choice(
            "train cifar10 --model.name cifar_resnet32_preact",
            "cifar10/resnet32-full_preactivation",
            "NVIDIA",
        ),
        Choice(
            "train cifar10_modern",
            speed=("step_resnet110_h200", "jax/cifar_resnet110_preact"),
        ),
        Choice("train cifar10_batch64"),
        Choice("train cifar100"),
        Choice("train imagenet", speed=("step_resnet50_h200", "jax/imagenet_resnet50_preact")),
    ),
    "photos": (
        Choice("train folder_small --data.dir PHOTOS --data.test 0.2"),
        Choice("train folder --data.dir PHOTOS --data.test 0.2"),
        Choice("train finetune --model.weights RUN --data.dir PHOTOS --data.test 0.2"),
    ),
    "deep": (
        Choice(
            "reproduce deep --rows resnet1001-full_preactivation --seeds 1",
            "digits/resnet1001-full_preactivation",
            "CPU",
        ),
        Choice(
            "reproduce deep --rows resnet10001-full_preactivation --seeds 1",
            "digits/resnet10001-full_preactivation",
            "CPU",
        ),
        Choice("reproduce plain --rows plain10000-muon --seeds 1", "digits/plain10000-muon", "CPU"),
    ),
}
HEAD = ["command", "network and data", "device", "time of a run", "test accuracy"]


def runs_of(choice: Choice) -> list[results.Record]:
    """Return the runs of a choice, those on its device."""
    records = [
        results.read_one(file)
        for file in sorted((ROOT / "results" / choice.trial).glob("seed-*.json"))
    ]
    found = results.by_setting(records)
    [chosen] = [each for setting, each in found.items() if setting.device.startswith(choice.device)]
    return chosen


def _about(config: Config, iterations: int | None = None) -> str:
    model, data = config.model, config.data.name
    words = [f"`{_registered(model)}`" if model.name else "the one of `--model.weights`"]
    if model.width_factor not in (None, 1):
        words.append(f"{model.width_factor:g} times the channels")
    words.append(f"`{data}`" if data != "folder" else "your images")
    if iterations:
        words.append(f"{iterations:,} iterations")
    return ", ".join(words)


def _registered(model: Model) -> str:
    """Return the name of the registered network with the arrangement of a run."""
    if model.arrangement is None:
        return model.name
    wanted = dict(kp.model_entry(model.name).arguments) | {"arrangement": model.arrangement}
    names = kp.list_models()
    return next(name for name in names if dict(kp.model_entry(name).arguments) == wanted)


def cells(choice: Choice) -> list[str]:
    command = f"`keras-preact {choice.command}`"
    if not choice.trial:
        config = RECIPES[shlex.split(choice.command)[1]]()
        if choice.speed is None:
            return [command, _about(config), NOTHING, NOTHING, NOTHING]
        file, candidate = choice.speed
        content = benchmarks.read(file)
        speed = content["summary"][candidate]["images_per_second"]["median"]
        batch = content["settings"]["batch"]
        time = f"{NOTHING}; a train step with {batch} images: {speed:,.0f} images/s"
        return [command, _about(config), content["candidates"][candidate]["device"], time, NOTHING]
    records = runs_of(choice)
    first = from_json(Config, records[0].config)
    if first.model.dtype == "mixed_bfloat16":  # others may get float32
        command = f"{command[:-1]} --precision mixed_bfloat16`"
    about = _about(first, records[0].curves["iteration"][-1])
    devices = " and ".join(dict.fromkeys(map(_device, records)))
    return [command, about, devices, _time(records), _accuracy(records)]


def _device(record: results.Record) -> str:
    if record.device["name"] != "CPU":
        return record.device["name"]
    cores = record.device["cpu"].rpartition(", ")[2]
    return f"{benchmarks.cpu(record.device)}, {cores}"


def _time(records: Sequence[results.Record]) -> str:
    """Return the median time of a run with the least and the most, and how many runs shared
    the device.
    """
    seconds = [record.cost["seconds"] for record in records]
    time = duration(statistics.median(seconds))
    if len(seconds) > 1:
        time += f" ({duration(min(seconds))} to {duration(max(seconds))})"
    together = sorted({record.cost.get("together", 1) for record in records})
    if together == [1]:
        return time
    return f"{time}, {' or '.join(map(str, together))} at once"


def _accuracy(records: Sequence[results.Record]) -> str:
    """Return the median accuracy with the least and the most, and the number of runs."""
    accuracies = [100 - record.final["test_error"] for record in records]  # none diverged
    runs = f"{len(records)} run{'s' * (len(records) > 1)}"
    median, *ends = spread(accuracies, ".2f").split(" ", 1)
    return f"{' '.join([f'{median} %', *ends])}, {runs}"


def choices(group: str) -> str:
    """Return the table of a group."""
    return markdown([HEAD, *map(cells, GROUPS[group])])


def ready_weights() -> str:
    """Return the weights in the package with their test accuracy."""
    rows = [["in Python", "network and data", "test accuracy"]]
    for path in sorted(TRAINED.glob("*.json")):
        card = json.loads(path.read_text())
        name, _, weights = card["model"].partition(":")
        measured = f"{100 * card['accuracy']:.2f} %, 1 network, {card['images']:,} images"
        code = f'`kp.create_model("{name}", weights="{weights}")`'
        rows.append([code, f"`{name}`, `{card['data']}`", measured])
    return markdown(rows)


def deep_memory() -> str:
    """Return time and peak memory of train steps of very deep networks."""
    rows = [["command", "network and data", "time of a step", "peak memory"]]
    for file in ("very_deep_preact_jax", "very_deep_vanilla_tensorflow"):
        run = benchmarks.read(file)
        settings = run["settings"]
        remat = f" --remat {settings['remat']}" if settings["remat"] else ""
        line = (
            f"keras-preact benchmark very-deep {run['network']} --batch {settings['batch']}{remat}"
        )
        rows.append(
            [
                f"`KERAS_BACKEND={run['backend']} {line}`",
                f"`{run['name']}`, {settings['batch']} digits, {benchmarks.NAMES[run['backend']]}",
                f"{run['step_seconds']:.1f} s",
                f"{run['peak_resident_bytes'] / 1e9:.1f} GB",
            ]
        )
    content = benchmarks.read("memory_resnet1001")
    for candidate, figures in content["summary"].items():
        backend, _, network = candidate.partition("/")
        rows.append(
            [
                f"`keras-preact benchmark memory --backends {backend} --batch "
                f"{content['settings']['batch']} --models {network}`",
                f"`{network.partition(':')[0]}`, {content['settings']['batch']} random images, "
                f"{benchmarks.NAMES[backend]}",
                NOTHING,
                f"{figures['peak_resident_bytes']['median'] / 1e9:.1f} GB",
            ]
        )
    return markdown(rows)
