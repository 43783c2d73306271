"""What can be measured: registered models with options of their builders, and peers from
other packages.
"""

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras_preact as kp
from keras_preact.models.registry import MODELS

from ..config import read_option
from ..errors import UserError, lookup
from . import peers

BACKENDS = ("tensorflow", "jax", "torch")

#: Options that every candidate takes in place of --precision and --jit-compile: name to the words
#: for it in a candidate, and what each sets.
SETTINGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "dtype": {policy: {"dtype": policy} for policy in ("float32", "mixed_bfloat16")},
    "compile": {"true": {"jit_compile": "on"}, "false": {"jit_compile": "off"}},
}

#: Options that the benchmark sets itself, and what sets them.
_SET_ELSEWHERE = {
    "input_shape": "--image-size",
    "name": "the candidate",
    "data_format": "Keras' setting",
}


@dataclasses.dataclass(frozen=True)
class Peer:
    """A network of another package, or in plain PyTorch.

    Args:
        build: Function that takes the height and width of the images, one number, and
            returns a Keras model or a torch module that computes logits.
        backends: Backends it runs on.
        package: Name for pip of the package that it needs; None if it needs no other.
        options: Names of options of `subjects.TorchSubject`, each true or false.
        image_size: Height and width of the images if none are given.
        classes: Outputs of its classifier.
    """

    build: Callable[[int], Any]
    backends: tuple[str, ...] = BACKENDS
    package: str | None = None
    options: tuple[str, ...] = ()
    image_size: int = 224
    classes: int = 1000


#: Options of networks that are torch modules.
_TORCH_OPTIONS = ("channels_last",)

#: Name to `Peer`: pre-activation ResNet-50s for ImageNet, and the paper's networks for CIFAR.
PEERS: Mapping[str, Peer] = {
    "keras_applications_resnet50v2": Peer(
        functools.partial(peers.applications_resnet50v2, "keras")
    ),
    "kp_applications_resnet50v2": Peer(
        functools.partial(peers.applications_resnet50v2, "keras_preact")
    ),
    "keras_hub_resnet50v2": Peer(peers.keras_hub_resnet50v2, package="keras-hub"),
    "timm_resnetv2_50": Peer(
        peers.timm_resnetv2_50, backends=("torch",), package="timm", options=_TORCH_OPTIONS
    ),
} | {
    f"torch_resnet_cifar{depth}": Peer(
        functools.partial(peers.torch_resnet_cifar, depth),
        backends=("torch",),
        options=_TORCH_OPTIONS,
        image_size=32,
        classes=10,
    )
    for depth in (20, 56, 110)
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One network on one backend.

    Args:
        backend: Keras backend.
        name: A registered model or a peer.
        options: Options of the model's builder, or of the peer, and `SETTINGS`.
    """

    backend: str
    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """`BACKEND/NAME:option=value,...`, as `parse` reads it."""
        words = (f"{key}={_word(value)}" for key, value in self.options.items())
        return f"{self.backend}/{':'.join(filter(None, (self.name, ','.join(words))))}"

    def split(self) -> tuple["Candidate", dict[str, Any]]:
        """Return the candidate without its `SETTINGS`, and what they set in a question."""
        set_here: dict[str, Any] = {}
        for key in self.options.keys() & SETTINGS.keys():
            set_here |= SETTINGS[key][_word(self.options[key])]
        rest = {key: value for key, value in self.options.items() if key not in SETTINGS}
        return dataclasses.replace(self, options=rest), set_here


def _word(value: Any) -> str:
    """Return a value as `parse` reads it."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of `NAME[:option=value,...]`.

    Raises:
        ValueError: for an unknown name or option; the message suggests the nearest one.
    """
    name, _, assignments = text.partition(":")
    lookup(dict.fromkeys([*MODELS, *PEERS]), name, "candidate")
    options = dict(map(read_option, filter(None, assignments.split(","))))
    for key, words in SETTINGS.items():
        if key in options and _word(options[key]) not in words:
            raise UserError(f"{key} must be {' or '.join(words)}. Received: {text!r}")
    if name in PEERS:
        elsewhere, known = {}, {*PEERS[name].options, *SETTINGS}
    else:
        arguments = inspect.signature(MODELS[name].builder).parameters
        elsewhere = _SET_ELSEWHERE
        known = {*kp.models.option_names(), *arguments, *SETTINGS}
        known -= {"options", "kwargs", *elsewhere}
    for key, value in options.items():
        if key in elsewhere:
            raise UserError(f"{key} is set by {elsewhere[key]}. Received: {text!r}")
        lookup(dict.fromkeys(sorted(known)), key, f"option of {name}")
        if name in PEERS and key not in SETTINGS and not isinstance(value, bool):
            raise UserError(f"{key} of {name} must be true or false. Received: {text!r}")
    return name, options


def expand(models: Iterable[str], backends: Iterable[str]) -> list[Candidate]:
    """Return every model on every backend that runs it, backend by backend.

    Raises:
        ValueError: for an unknown model, one that no chosen backend runs, or a package
            that is not installed.
    """
    backends = list(dict.fromkeys(backends))
    parsed = [parse(model) for model in models]
    for backend in backends:
        _check_installed(backend, backend, f"The backend {backend}")
    for name, _ in parsed:
        if name in PEERS:
            peer = PEERS[name]
            if not set(peer.backends) & set(backends):
                raise UserError(
                    f"{name} runs on {', '.join(peer.backends)}. Received: --backends "
                    f"{' '.join(backends)}"
                )
            if peer.package is not None:
                _check_installed(peer.package, "benchmark", name)
    rows: dict[str, Candidate] = {}
    for backend in backends:
        for name, options in parsed:
            if name in PEERS and backend not in PEERS[name].backends:
                continue
            candidate = Candidate(backend, name, options)
            rows.setdefault(candidate.label, candidate)
    return list(rows.values())


def _check_installed(package: str, extra: str, needed_by: str) -> None:
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise UserError(
            f"{needed_by} needs {package}, which is not installed: pip install "
            f"-c constraints/tested.txt -e '.[{extra}]'"
        )


def build(name: str, options: Mapping[str, Any], image_size: int | None):
    """Build a network that computes logits: a Keras model, or a torch module.

    Args:
        name: A registered model or a peer.
        options: Options of a registered model's builder. The options of a peer are not
            used here: they say how it is run.
        image_size: Height and width; None for the network's default.
    """
    if name in PEERS:
        peer = PEERS[name]
        return peer.build(image_size or peer.image_size)
    shape = kp.model_entry(name).input_shape
    arguments = dict(options)
    if image_size is not None:
        if len(shape) != 3:
            raise UserError(f"{name} takes no images. Received: --image-size {image_size}")
        arguments["input_shape"] = (image_size, image_size, shape[-1])
    return kp.create_model(name, data_format="channels_last", **arguments)
