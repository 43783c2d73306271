"""Files and folders that a user may not read or search: a command names them in one line."""

import shutil
import sys

import pytest

from tests.rights import of_a_user
from tests.training.calls import error_of, words
from tests.training.images import write_folder
from training.cli import console
from training.commands.predict.named import Named, find
from training.data import broken

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the rights of Linux")


@pytest.fixture
def folder(run, tmp_path, monkeypatch):
    """A working directory with two runs, `begun` and `unreadable`, whose config.json nobody
    may read, a run in `secret`, a folder that nobody may search, and images in `photos`.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "secret/run")
    shutil.copytree(run, "unreadable")
    shutil.copytree(run, "begun")
    write_folder(tmp_path / "photos", images=2, size=(8, 8))
    (tmp_path / "secret").chmod(0)
    (tmp_path / "unreadable/config.json").chmod(0)
    with of_a_user():
        yield tmp_path
    (tmp_path / "secret").chmod(0o700)


#: Commands of a run, which read its config.json.
OF_A_RUN = (
    *("resume {}", "train --config {}", "compare {}", "evaluate {}", "export {} --name m"),
    *("analyze {}", "audit {}"),
    "train finetune --data.dir photos --data.size 8 --model.weights {}",
)


@pytest.mark.parametrize("line", OF_A_RUN)
def test_a_file(line, folder, capsys):
    message = error_of(capsys, console.main, words(line.format("unreadable")))
    assert message == "error: [Errno 13] Permission denied: 'unreadable/config.json'\n"


@pytest.mark.parametrize(
    "line",
    [
        *OF_A_RUN,
        *("predict {} a.png", "convert {}/model.keras a.keras", "convert a.keras {}/b.keras"),
        *("train digits --output {}", "train digits --seeds 2 --output {}"),
        *("sweep digits --output {}", "analyze unreadable --output {}"),
        *("train folder_small --data.dir {}", "train digits --data.name npz --data.dir {}/a.npz"),
        *("reproduce report --output {}", "reproduce claims --only gate-10 --output {}"),
        *("benchmark serve {}", "benchmark step --models dense_resnet6 --output {}/a.json"),
    ],
)
def test_in_a_folder(line, folder, capsys):
    """`Path.exists` raises the error, too."""
    message = error_of(capsys, console.main, words(line.format("secret/run")))
    assert message.startswith("error: [Errno 13] Permission denied: 'secret/run")


def test_images(folder):
    """One class lists its files and gives none of them, the other has a single such file."""
    photos = folder / "photos/train"
    (photos / "cat").chmod(0o400)
    (photos / "dog/0.png").chmod(0)
    files = [photos / name for name in ("cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png")]
    assert broken.faults(files) == dict.fromkeys(files[:3], "Permission denied")
    named, _ = find([photos])  # `predict` says so when it reads them
    assert named == [Named(str(path)) for path in files]
    (photos / "cat").chmod(0o700)


def test_a_run_that_cannot_be_resumed(folder, capsys):
    """Another --output would begin another run."""
    (folder / "begun/model.keras").unlink()
    (folder / "begun").chmod(0o500)
    message = error_of(capsys, console.main, words("resume begun"))
    assert message.startswith("error: Cannot write begun: [Errno 13] Permission denied: ")
    assert "--output" not in message
    (folder / "begun").chmod(0o700)
