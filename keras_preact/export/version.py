"""An exported version of a model: find it, read its card, check its files, load it.
Needs no Keras.

A model's folder holds versions: folders with a number for their name and a SavedModel
in them.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact.export import _warmup

#: The file that makes a folder a SavedModel.
GRAPH = "saved_model.pb"
#: The highest version: TensorFlow Serving keeps a version in 64 bits.
HIGHEST = 2**63 - 1
#: Start of the name of a hidden folder in which an export is built.
BUILT = ".export-"
#: Number of folders that are looked into if none is a version: a data set may have millions.
MOST = 100

#: Name of a model card. A model's folder has a copy of its highest version's card.
CARD = "model_card.json"
#: The card of a version, in the version's folder.
OWN_CARD = Path("assets.extra") / CARD
#: A version's network in 8 bits for OpenVINO, in the version's folder. Its weights are beside it in
#: a file that ends in .bin.
INT8 = Path("assets.extra") / "int8.xml"

_RULE = f"a folder with a whole number for its name, such as 1, and {GRAPH} in it"


class VersionError(ValueError):
    """An exported version cannot be found or used.

    Args:
        path: The version, or the folder in which it should be.
        problem: What is wrong and what to do, in sentences about "it" that name no
            other folder: a server shows them to clients.
    """

    def __init__(self, path: Path, problem: str):
        super().__init__(f"{path} cannot be used as an exported model. {problem}")
        # names of files may be no text, and clients get JSON
        self.problem = problem.encode(errors="backslashreplace").decode()


@dataclasses.dataclass(frozen=True)
class Version:
    """An exported version of a model.

    Args:
        path: Its folder, `.../NAME/VERSION`.
    """

    path: Path

    @property
    def number(self) -> int | None:
        """The number in its name, or in the name of the folder that it links to."""
        names = self.path.absolute().name, self.path.resolve().name
        return next((number for number in map(number_of, names) if number is not None), None)

    @contextlib.contextmanager
    def reading_card(self) -> Iterator[dict[str, Any]]:
        """Yield the model card. Whatever the context cannot read in it is a
        `VersionError`.
        """
        name, file = OWN_CARD.as_posix(), self.path / OWN_CARD
        if not file.is_file():  # a read of a pipe or a device may never end
            raise VersionError(
                self.path,
                f"It has no {name}: only exports of keras_preact.export.save can be used.",
            )
        try:
            yield dict(json.loads(file.read_bytes()))
        except VersionError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise VersionError(
                self.path,
                f"Its {name} cannot be read: {error!r}. Export it again with this release of "
                "keras-preact.",
            ) from error

    def class_names(self, card: dict[str, Any]) -> list[str]:
        """Return the names of the classes in the card.

        Raises:
            VersionError: if they do not name the model's outputs. A person may edit them:
                no hash protects the card itself.
        """
        names = card["classes"]
        outputs = card["signatures"]["serving_default"]["outputs"]["probabilities"]["shape"][-1]
        are_names = isinstance(names, list) and all(map(is_name, names))
        if are_names and len({*names}) == len(names) == outputs:
            return names
        if are_names and outputs == 1 and len({*names}) == len(names) == 2:
            return names  # the classes 0 and 1 of a binary classifier
        received = f"{len(names)} values" if isinstance(names, list) else type(names).__name__
        twice = [name for name in names if names.count(name) > 1] if are_names else []
        if twice:
            received += f", with {twice[0]!r} more than once"
        raise VersionError(
            self.path,
            f"Its {OWN_CARD.as_posix()} must have a unique name for each of its {outputs} outputs "
            f"under `classes`. Received: {received}. Correct it, or export the version again.",
        )

    def check_files(self) -> None:
        """Compare the files with the hashes in the card. Hidden files are ignored.

        Raises:
            VersionError: if a file is missing, damaged, unreadable, or not in the card.
        """
        with self.reading_card() as card:
            hashes = dict(card["files"])
        present = {path.relative_to(self.path).as_posix() for path in files(self.path)}
        for name in sorted(present - {OWN_CARD.as_posix(), *hashes}):
            raise VersionError(
                self.path,
                f"It holds {name}, which its model card does not list. Remove this file, or export "
                "the version again.",
            )
        for name, expected in hashes.items():
            # a name that leads out of the folder is not in `present`, and a pipe is not a file
            if name not in present or not (self.path / name).is_file():
                problem = f"Its {name} is missing, or not a regular file. Copy it again."
                raise VersionError(self.path, problem)
            try:
                found = sha256(self.path / name)
            except OSError as error:
                problem = f"Its {name} cannot be read: {error.strerror}."
                raise VersionError(self.path, problem) from error
            if found != expected:
                raise VersionError(
                    self.path,
                    f"Its {name} is damaged: the SHA-256 hash is not the one in the model card. "
                    "Copy it again.",
                )

    def functions(self) -> tuple["Frozen", Callable | None]:
        """Return the network with its weights in the graph, and the TensorFlow function from
        image files `(n,)` to the network's images, if there is one.
        """
        import tensorflow as tf

        loaded = tf.saved_model.load(str(self.path))
        int8 = self.path / INT8
        [core] = loaded.core.concrete_functions
        network = freeze(core, int8 if int8.is_file() else None)
        return network, getattr(loaded, "decode", None)

    def warm_up_requests(self) -> list[tuple[str, dict[str, np.ndarray]]]:
        """Return the requests that a server runs before the first client's: the name of a
        signature, and its inputs by name. Strings are arrays of bytes objects.

        Raises:
            VersionError: if the file is damaged, or holds other requests.
            ImportError: if tensorflow-serving-api is missing.
        """
        try:
            return _warmup.read(self.path)
        except ValueError as error:
            raise VersionError(self.path, f"{error}. Copy or export it again.") from error


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A network as a TensorFlow function with its weights as constants in the graph.

    Args:
        function: TensorFlow function from images to a list of tensors.
        outputs: Names of these tensors.
        int8: File of the same network in 8 bits for OpenVINO, if there is one.
    """

    function: Any
    outputs: tuple[str, ...]
    int8: Path | None = None

    def smallest(self, shape: Sequence[int | None]) -> tuple[int, ...]:
        """Return the smallest length of each axis of the images for which every tensor of the
        network has values. TensorFlow ends the process (SIGFPE) when it convolves a map
        without pixels, which smaller images leave after layers without padding.

        Args:
            shape: Lengths of the axes; `None` is any length. The first is the batch.
        """
        free = [axis for axis, length in enumerate(shape) if length is None and axis]
        ones = {axis: length or 1 for axis, length in enumerate(shape)}
        graph = self.function.graph.as_graph_def()

        def is_sound(lengths: dict[int, int]) -> bool:
            [images] = self.function.inputs
            return _has_values(graph, images, [*(ones | lengths).values()])

        for large in (2**n for n in range(12)):
            if is_sound(dict.fromkeys(free, large)):
                break
        else:
            return tuple(ones.values())
        smallest = dict.fromkeys(free, large)
        for axis in free:
            low = 0  # the smallest length is above it
            while smallest[axis] - low > 1:
                middle = (low + smallest[axis]) // 2
                if is_sound(dict.fromkeys(free, large) | {axis: middle}):
                    smallest[axis] = middle
                else:
                    low = middle
        return tuple((ones | smallest).values())

    def openvino_model(self) -> Any:
        """Return the network as OpenVINO's model, with the names of the outputs."""
        import openvino as ov

        # openvino.convert_model needs no file, but it reports its use over the network.
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "frozen.pb"
            graph = _with_constants_as_bytes(self.function.graph.as_graph_def())
            file.write_bytes(graph.SerializeToString())
            model = ov.Core().read_model(file)
        for name, tensor in zip(self.outputs, self.function.outputs, strict=True):
            model.output(tensor.name).get_tensor().add_names({name})
        return model


def freeze(core: Any, int8: Path | None = None) -> Frozen:
    """Return a function of a SavedModel with its variables turned into constants.

    Engines fold constants into the operations that use them. In TensorFlow, ResNet-50
    computes one image 1.1 times as fast, in bfloat16 1.5 times, and 32 images no faster
    (`training/benchmark/measured/exports_resnet50.json`).

    Args:
        core: A concrete function from images to outputs by name, the SavedModel's `core`.
        int8: File of the same network in 8 bits for OpenVINO.
    """
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    # The tensors of a dictionary come in the order of its sorted keys.
    outputs = tuple(sorted(core.structured_outputs))
    return Frozen(convert_variables_to_constants_v2(core), outputs, int8)


def is_name(name: Any) -> bool:
    """Whether a value is a text that an answer can hold."""
    try:
        return isinstance(name, str) and name.encode() is not None
    except UnicodeEncodeError:
        return False


def class_scores(probabilities: np.ndarray, classes: int) -> np.ndarray:
    """Return a score for each named class, `(n, classes)`.

    Args:
        probabilities: Outputs of the model, `(n, outputs)`.
        classes: Number of names. A binary classifier has one output, and may have two
            names, of the classes 0 and 1.
    """
    if probabilities.shape[-1] == 1 and classes == 2:
        return np.concatenate([1 - probabilities, probabilities], axis=-1)
    return probabilities


def sha256(path: Path) -> str:
    """Return the hash of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find(folder: Path, number: int | None = None) -> Version:
    """Return a version of the model in a folder. The folder of a version is that version.

    Args:
        folder: Folder of the model.
        number: Number of the version. None: the highest.

    Raises:
        VersionError: if there is none; the message says what the folder holds.
        OSError: if the folder cannot be read.
    """
    found = layout(folder)
    if not found.versions and (folder / GRAPH).is_file():
        one = Version(folder)
        if number in (None, one.number):
            return one
        problem = f"It is itself a version, but not version {number}. Use the folder above it."
    elif number is None and found.versions:
        return Version(found.versions[max(found.versions)])
    elif number in found.versions:
        return Version(found.versions[number])
    elif found.versions:
        problem = f"It has no version {number}. It has: {', '.join(map(str, found.versions))}."
    elif not folder.exists() and (beside := layout(folder.parent).models):
        problem = f"There is no such folder. Models beside it: {_listed(beside)}."
    else:
        problem = found.problem or "Its first version is being written. Try again later."
    raise VersionError(folder, problem)


def models(directory: Path) -> tuple[dict[str, Path], str]:
    """Return the folders that may hold versions of a model, by the model's name: the
    entries of `directory`, or `directory` itself if it has versions. Names that are not
    UTF-8 are left out. The text says what is wrong with `directory`, if anything.

    Raises:
        OSError: if `directory` exists and cannot be read.
    """
    directory = Path(os.path.abspath(directory))  # "." alone has no name
    found = layout(directory)
    names, problem = entries(directory), ""
    if found.versions:
        folders = {directory.name: directory}
    elif GRAPH in names:  # its folders belong to this version
        folders, problem = {path.name: path for path in found.models}, found.problem
    else:
        folders = {name: directory / name for name in names}
        if not any(folder.is_dir() for folder in folders.values()):
            problem = "It holds no folder of a model. Export a model into it, or serve another one."
    if nameless := [n for n, folder in folders.items() if not is_name(n) and folder.is_dir()]:
        problem = problem or (
            "No address can name a model whose folder has a name that is not UTF-8: "
            f"{_listed(nameless)}. Give it another name."
        )
    return {name: folder for name, folder in folders.items() if is_name(name)}, problem


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a folder holds.

    Args:
        versions: Paths of the versions by number, in ascending order. Leading zeros do
            not count: `0001` is version 1.
        models: Folders that hold versions themselves: the folder is no model, but holds
            models.
        problem: What is wrong and what to do, in sentences about "it" that name no
            other folder; empty for a model with versions.
    """

    versions: dict[int, Path]
    models: list[Path]
    problem: str


def number_of(name: str) -> int | None:
    """Return the version that a name means, if it is a whole number from 0 to
    `HIGHEST`: in ASCII digits, perhaps with leading zeros.
    """
    digits = name.lstrip("0")
    if not (name.isascii() and name.isdecimal() and len(digits) <= len(str(HIGHEST))):
        return None
    number = int(digits or "0")
    return number if number <= HIGHEST else None


def numbered(folder: Path) -> dict[int, Path]:
    """Return the entries of a folder that a version's number names, complete or not, in
    ascending order. Of several names of a number, the shortest counts.

    Raises:
        OSError: if the folder exists and cannot be read.
    """
    return _numbered(folder, entries(folder))


def name_problem(name: str) -> str:
    """Return what is wrong with a model's name, empty if nothing is."""
    if ":" in name:
        return "A colon ends a model's name in the addresses of /v1, TensorFlow Serving's."
    if not is_name(name):
        return "Folders whose names are not UTF-8 are not served."
    if name == "stats":
        return "The address /v2/models/stats is that of the statistics of all models, Triton's."
    return "Folders whose names start with a dot are not served." if name.startswith(".") else ""


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what `os.walk` yields, also for linked folders: a volume of
    Kubernetes links each entry of a version. A link to a folder above it is not followed.
    """
    above: dict[str, frozenset[str]] = {}
    for path, folders, names in os.walk(folder, followlinks=True):
        parents = above.get(os.path.dirname(path), frozenset())
        own = os.path.realpath(path)
        if own in parents:
            folders.clear()
            continue
        above[path] = parents | {own}
        yield path, folders, names


def files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without hidden ones."""
    for path, folders, names in walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(path, name) for name in names if not name.startswith("."))


def entries(folder: Path, hidden: bool = False) -> list[str]:
    """Return the names in a folder, sorted, without hidden ones. There are none in a
    file, or in a folder that does not exist.

    Raises:
        OSError: if the folder exists and cannot be read.
    """
    try:
        return sorted(name for name in os.listdir(folder) if hidden or not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def layout(folder: Path) -> Layout:
    """Return the versions in a folder, or what is wrong with it.

    Raises:
        OSError: if the folder exists and cannot be read, or changed while it was read.
    """
    names = entries(folder)
    complete = [
        name for name in names if number_of(name) is not None and GRAPH in entries(folder / name)
    ]
    versions = _numbered(folder, complete)
    models: list[Path] = []
    problem = ""
    if len(versions) < len(complete):
        ignored = sorted({*complete} - {path.name for path in versions.values()})
        problem = (
            f"It has two folders for one version: {_listed(ignored)} does not count. Remove it, or "
            "give it another number."
        )
    if not versions and not any(name.startswith(BUILT) for name in entries(folder, hidden=True)):
        some = [folder / name for name in names[:MOST]]
        models = [path for path in some if _holds_versions(path)]
        misnamed = [path for path in some if os.path.isfile(path / GRAPH)]
        problem = _obstacle(folder, names, models) or _problem(folder, names, misnamed)
    # If a version is replaced between the listing and the look into its folder, neither the old nor
    # the new one would be found.
    if entries(folder) != names:
        raise OSError(f"its entries changed while they were read: {folder}")
    return Layout(versions, models, problem)


def obstacle(folder: Path) -> str:
    """Return why no version can be added to a folder, in the words of `Layout.problem`;
    empty if one can.

    Raises:
        OSError: if the folder exists and cannot be read.
    """
    names = entries(folder)
    some = [] if _numbered(folder, names) else [folder / name for name in names[:MOST]]
    return _obstacle(folder, names, [path for path in some if _holds_versions(path)])


def _obstacle(folder: Path, names: list[str], models: list[Path]) -> str:
    if folder.is_file():
        return "It is a file, not a folder."
    if GRAPH in names and number_of(folder.name) is not None:
        return f"It is itself a version, {folder.name}. Use the folder above it, the model."
    if GRAPH in names:
        return (
            f"It holds {GRAPH} itself, but a version is {_RULE}. Move its content into a folder 1 "
            "inside it; or give it a number for its name, if it is a version."
        )
    if models:
        return (
            f"It holds models, not versions: {_listed(models)}. Use it as the folder of models, or "
            "one of them as the model."
        )
    return ""


def _problem(folder: Path, names: list[str], misnamed: list[Path]) -> str:
    """Return what is wrong with a folder that a version can be added to, and what to do.
    `misnamed` are its folders that are SavedModels.
    """
    if misnamed:
        return (
            f"It holds {GRAPH} in {_listed(misnamed)}, but a version is {_RULE}; the highest is "
            f"{HIGHEST}. Give it another name, 1 for example."
        )
    if incomplete := [name for name in names if number_of(name) is not None]:
        return f"There is no {GRAPH} in {_listed(incomplete)}. Copy or export the version again."
    if not folder.exists():
        return "There is no such folder. Export a model into it."
    found = _listed(names) or "nothing"
    return f"It has no version, which is {_RULE}. Found: {found}. Export a model into it."


def _holds_versions(folder: Path) -> bool:
    try:
        return any(GRAPH in entries(path) for path in numbered(folder).values())
    except OSError:  # nobody asked for this folder
        return False


def _numbered(folder: Path, names: list[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for name in sorted(names, key=len):
        number = number_of(name)
        if number is not None:
            found.setdefault(number, folder / name)
    return dict(sorted(found.items()))


def _listed(paths: Sequence[Path | str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(repr(os.path.basename(path)) for path in paths[:3]) + more


def _has_values(graph: Any, images: Any, shape: Sequence[int]) -> bool:
    """Whether every tensor of numbers in a graph has values, for images of a shape."""
    import tensorflow as tf

    with tf.Graph().as_default() as whole:
        given = tf.compat.v1.placeholder(images.dtype, shape)
        try:
            tf.graph_util.import_graph_def(graph, {images.name: given}, name="")
        except ValueError:  # a length would be negative
            return False
        tensors = (tensor for op in whole.get_operations() for tensor in op.outputs)
        return not any(
            tensor.dtype.is_floating and tensor.shape.rank and 0 in tensor.shape.as_list()
            for tensor in tensors
        )


def _with_constants_as_bytes(graph):
    """Return a GraphDef that stores constants of 16-bit numbers as bytes. OpenVINO does
    not read lists of such numbers.
    """
    import tensorflow as tf

    for node in graph.node:
        tensor = node.attr["value"].tensor
        if node.op == "Const" and tensor.half_val:
            content = tf.make_ndarray(tensor).tobytes()
            tensor.ClearField("half_val")
            tensor.tensor_content = content
    return graph
