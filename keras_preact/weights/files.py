"""Read and write state files: the names and arrays of a network's weights, as other
libraries write them. Nothing in them is executed.
"""

import argparse
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from keras_preact import atomic

State = dict[str, np.ndarray]

#: Keys of a training checkpoint that may hold the weights. The first one found is read: averaged
#: weights first, as in timm. The last one is pytorch-cifar's.
NESTED = ("state_dict_ema", "model_ema", "state_dict", "model", "net")
#: Prefixes that torch.nn.DataParallel and torch.compile add to all names.
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")
#: Torch's name for the number of updates of a batch normalisation. No network computes with it.
COUNTER = "num_batches_tracked"

#: Errors that Torch raises for files that are damaged or of another kind.
_DAMAGED = (EOFError, RuntimeError, OSError, ValueError, LookupError, TypeError, AttributeError)


def read_state(path: str | os.PathLike) -> State:
    """Read a file of weights.

    Args:
        path: A .safetensors, .npz, .pth, .pt or .bin file; the last three need torch. A
            training checkpoint may hold the weights as `state_dict`, `model`, `net`, or
            averaged as `state_dict_ema`.

    Returns:
        Name to array, without the `module.` of torch.nn.DataParallel and the
        `_orig_mod.` of torch.compile. Half-precision values are float32.

    Raises:
        ValueError: for another path, a damaged file, and a file with Python objects
            other than arrays.
        ImportError: if safetensors or torch is missing.

    Example:

    >>> import pathlib, tempfile
    >>> import numpy as np
    >>> import keras_preact as kp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "w.safetensors")
    ...     kp.weights.write_state(path, {"fc.bias": np.zeros(2, "float32")})
    ...     kp.weights.read_state(path)
    {'fc.bias': array([0., 0.], dtype=float32)}
    """
    path = Path(path)
    if path.suffix not in READERS:
        raise ValueError(
            f"A file of weights ends in {' or '.join(READERS)}. Received: {str(path)!r}"
        )
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"A file of weights was expected: {str(path)!r} {what}.")
    state = READERS[path.suffix](path)
    if not state:
        raise ValueError(f"{str(path)!r} holds no weights.")
    return {_WRAPPERS.sub("", name): as_array(array) for name, array in state.items()}


def write_state(path: str | os.PathLike, state: Mapping[str, np.ndarray]) -> None:
    """Write weights to a .safetensors file, completely or not at all. An existing file
    is replaced.

    Args:
        path: Path that ends in .safetensors, in a folder that exists.
        state: Name to array.

    Raises:
        ValueError: for another ending, and arrays that do not hold numbers.
        OSError: if the file cannot be written.
        ImportError: if safetensors is missing.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"Weights are written to a .safetensors file. Received: {str(path)!r}")
    safetensors = _safetensors()
    contiguous = {name: np.array(array, order="C") for name, array in state.items()}
    if others := [name for name, array in contiguous.items() if array.dtype.kind not in "iubf"]:
        raise ValueError(
            f"Weights are arrays of numbers. Received: {others[0]!r} of the type "
            f"{contiguous[others[0]].dtype}"
        )
    with atomic.replacing(path) as temporary:
        try:
            safetensors.numpy.save_file(contiguous, temporary, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # for example when the disk is full
            raise OSError(f"Cannot write {path}: {error}") from error


def torch_state(source: str | os.PathLike | Mapping[str, Any]) -> State:
    """Return the weights in a file, in a mapping of names to arrays or Torch tensors, or
    in a training checkpoint, as `read_state` does, without the counters of batch
    normalisations.
    """
    if isinstance(source, str | os.PathLike):
        state = read_state(source)
    elif isinstance(source, Mapping):
        state = {
            _WRAPPERS.sub("", name): as_array(value) for name, value in _nested(source).items()
        }
    else:
        raise ValueError(
            f"`source` must be a file or a mapping of names to arrays. Received: source={source!r}"
        )
    return {name: array for name, array in state.items() if name.rsplit(".", 1)[-1] != COUNTER}


def with_counters(state: State) -> State:
    """Return the weights with a counter of 0 for each Torch batch normalisation."""
    prefixes = [name.removesuffix("running_var") for name in state if name.endswith(".running_var")]
    return state | {prefix + COUNTER: np.zeros((), "int64") for prefix in prefixes}


def _safetensors():
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "Files of weights need safetensors: pip install 'keras-preact[weights]'"
        ) from error
    return safetensors


def _read_safetensors(path: Path) -> State:
    import ml_dtypes  # noqa: F401  # adds bfloat16 to NumPy; Keras needs it too

    safetensors = _safetensors()
    try:
        return safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is damaged or is no safetensors file: {error}") from error
    except AttributeError as error:  # safetensors looks for the type in NumPy
        raise ValueError(
            f"{str(path)!r} holds weights of a type that NumPy lacks. Write them as float32, "
            f"float16 or bfloat16. safetensors says: {error}"
        ) from error


def _read_npz(path: Path) -> State:
    try:
        with path.open("rb") as file:  # NumPy leaves it open if it fails
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("it is one array without a name")
            with arrays:
                return {name: arrays[name] for name in arrays.files}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{str(path)!r} is damaged or is no archive of plain arrays: {error}"
        ) from error


def _read_torch(path: Path) -> State:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{path.suffix} files need torch: pip install 'keras-preact[torch]'"
        ) from error
    from pickle import UnpicklingError

    try:
        # Training scripts keep their options in a Namespace, which runs no code.
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # about the pickle's version
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"{str(path)!r} holds Python objects other than tensors, or is no Torch file. It was "
            "not unpickled, because that can run any code. To write the weights alone, call "
            "torch.save(model.state_dict(), PATH) where the file was made."
        ) from error
    except _DAMAGED as error:
        raise ValueError(
            f"{str(path)!r} is damaged or is no Torch file: {error or type(error).__name__}"
        ) from error
    tensors = _nested(content if isinstance(content, Mapping) else {})
    others = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if others or not tensors:
        held = ", ".join(map(str, others[:5])) if others else type(content).__name__
        raise ValueError(
            f"{str(path)!r} holds no mapping of names to tensors, at the top or as "
            f"{', '.join(NESTED)}. It holds: {held}"
        )
    return {str(name): tensor for name, tensor in tensors.items()}


def _nested(content: Mapping) -> Mapping:
    """Return the weights in a training checkpoint, or else `content` itself."""
    return next((content[key] for key in NESTED if isinstance(content.get(key), Mapping)), content)


def as_array(value: Any) -> np.ndarray:
    """Return an array or a Torch tensor as a NumPy array. Its type is one of NumPy's
    own, and floats have at least 32 bits.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    array = np.asarray(value)
    is_kept = array.dtype.kind in "iub" or array.dtype in ("float32", "float64")
    return array if is_kept else array.astype("float32")


#: Ending of a file to its reader.
READERS: Mapping[str, Callable[[Path], State]] = MappingProxyType(
    {
        ".safetensors": _read_safetensors,
        ".npz": _read_npz,
        ".pth": _read_torch,
        ".pt": _read_torch,
        ".bin": _read_torch,
    }
)
