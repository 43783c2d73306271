"""The run directory: nothing in it is ever half-written, and the best checkpoint is the best."""

import json
import signal
import threading
import weakref

import pytest

from tests.training.commands import files
from training import runs


class TestNewDirectory:
    def test_default_has_recipe_and_time(self):
        first = runs.new_directory(None, "digits")
        assert first.parent.name == "runs"
        assert first.name.startswith("digits-2")
        assert len(first.name) == len("digits-20260101-120000")

    def test_new_or_empty_is_taken_and_nothing_is_made(self, tmp_path):
        assert runs.new_directory(tmp_path / "new", "digits") == tmp_path / "new"
        assert not (tmp_path / "new").exists()
        assert runs.new_directory(tmp_path, "digits") == tmp_path

    def test_a_directory_with_anything_in_it_or_a_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        for taken in (tmp_path, tmp_path / "file"):
            with pytest.raises(ValueError, match=f"{taken} exists and is not empty. Give another --output"):
                runs.new_directory(taken, "digits")


class TestReplacing:
    def test_appears_complete(self, tmp_path):
        path = tmp_path / "a.json"
        path.write_text("old")
        with runs.replacing(path) as temporary:
            assert temporary.parent == tmp_path  # renaming works within one file system only
            assert temporary.suffix == ".json"  # Keras goes by it
            temporary.write_text("new")
            assert path.read_text() == "old"
        assert path.read_text() == "new"
        assert files(tmp_path) == ["a.json"]
        assert path.stat().st_mode & 0o777 == 0o644

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
    def test_a_failure_leaves_the_old_file_and_no_other(self, tmp_path, error):
        path = tmp_path / "a.json"

        def write_half():
            with runs.replacing(path) as temporary:
                temporary.write_text("ha")
                raise error

        with pytest.raises(error):
            write_half()
        assert files(tmp_path) == []
        path.write_text("old")
        with pytest.raises(error):
            write_half()
        assert path.read_text() == "old"
        assert files(tmp_path) == ["a.json"]

    def test_error_names_the_file_and_the_reason(self, tmp_path):
        with pytest.raises(ValueError, match=rf"Cannot write {tmp_path}/a: .*No space left"), runs.replacing(tmp_path / "a"):
            raise OSError(28, "No space left on device")
        assert files(tmp_path) == []


def test_write_json(tmp_path):
    runs.write_json(tmp_path / "a.json", {"path": tmp_path, "numbers": (1, 2.5, None)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"path": str(tmp_path), "numbers": [1, 2.5, None]}
    with pytest.raises(ValueError, match="Circular"):
        runs.write_json(tmp_path / "a.json", (loop := {}, loop.update(me=loop))[0])
    assert json.loads((tmp_path / "a.json").read_text())["path"] == str(tmp_path)
    assert files(tmp_path) == ["a.json"]


class TestReadConfig:
    def test_reads(self, tmp_path):
        runs.write_json(tmp_path / "config.json", {"config": {"seed": 3}})
        assert runs.read_config(tmp_path) == {"config": {"seed": 3}}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "is no run directory: it has no config.json"),
            ('{"config": {', "config.json is damaged"),
            ('{"architectures": []}', "is no run directory: its config.json was not written by training.train"),
            ("[]", "is no run directory: its config.json was not written by training.train"),
        ],
    )
    def test_errors_name_the_path(self, tmp_path, content, message):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            runs.read_config(tmp_path)
        assert str(tmp_path) in str(error.value)


class TestModelPath:
    FILES = (("final", "model.keras"), ("best", "checkpoints/best.keras"), ("last", "checkpoints/last.keras"))

    @pytest.mark.parametrize(("checkpoint", "file"), FILES)
    def test_each_is_where_it_should_be(self, tmp_path, checkpoint, file):
        (tmp_path / "checkpoints").mkdir()
        for _, name in self.FILES:
            (tmp_path / name).touch()
        assert runs.model_path(tmp_path, checkpoint) == tmp_path / file

    def test_error_names_those_that_are_there(self, tmp_path):
        (tmp_path / "checkpoints").mkdir()
        with pytest.raises(ValueError, match=r"was not finished: there is no .*model.keras. It has no model at all\."):
            runs.model_path(tmp_path)
        (tmp_path / "checkpoints" / "last.keras").touch()
        with pytest.raises(ValueError, match=r"there is no .*model.keras. It has: --checkpoint last\."):
            runs.model_path(tmp_path)
        (tmp_path / "checkpoints" / "best.keras").touch()
        with pytest.raises(ValueError, match=r"It has: --checkpoint best, --checkpoint last\."):
            runs.model_path(tmp_path)


class Epochs:
    """Stands for a model: the n-th save writes n; `fails` makes it write half and raise."""

    def __init__(self):
        self.saved = 0
        self.fails = False

    def save(self, path):
        self.saved += 1
        path.write_text("half" if self.fails else str(self.saved))
        if self.fails:
            raise OSError("No space left on device")


class TestCheckpoints:
    @pytest.mark.parametrize(
        ("higher_is_better", "scores", "best"),
        [
            (True, [0.5, 0.7, 0.6, 0.7, 0.8, 0.1], [1, 2, 2, 2, 5, 5]),  # the first of equals stays
            (False, [0.5, 0.7, 0.4, 0.4, 0.45, 0.1], [1, 1, 3, 3, 3, 6]),
            (True, [-3.0, -2.0], [1, 2]),
            (False, [float("nan"), 2.0, float("nan")], [None, 2, 2]),
        ],
    )
    def test_best_is_replaced_only_by_a_better_one(self, tmp_path, higher_is_better, scores, best):
        callback = runs.Checkpoints(tmp_path, "val_score", higher_is_better)
        callback.set_model(Epochs())
        for epoch, (score, expected) in enumerate(zip(scores, best, strict=True)):
            callback.on_epoch_end(epoch, {"val_score": score, "score": -score})
            assert (tmp_path / "last.keras").read_text() == str(epoch + 1)
            file = tmp_path / "best.keras"
            assert (file.read_text() if file.exists() else None) == (expected and str(expected))
        assert files(tmp_path) == ["best.keras", "last.keras"]

    def test_a_failed_save_leaves_the_checkpoints_before(self, tmp_path):
        callback = runs.Checkpoints(tmp_path, "loss", higher_is_better=False)
        model = Epochs()
        callback.set_model(model)
        callback.on_epoch_end(0, {"loss": 1.0})
        model.fails = True
        with pytest.raises(ValueError, match=r"Cannot write .*last.keras: No space left"):
            callback.on_epoch_end(1, {"loss": 0.5})
        assert files(tmp_path) == ["best.keras", "last.keras"]
        assert [(tmp_path / name).read_text() for name in files(tmp_path)] == ["1", "1"]


class TestInterruption:
    @pytest.fixture(autouse=True)
    def usual_handler(self):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    def test_is_not_lost_where_errors_are_and_comes_behind_the_batch(self):
        with runs.Interruption() as interruption:
            interruption.on_train_batch_end(0)
            weakref.finalize(Trained(), signal.raise_signal, signal.SIGINT)  # an error in there would go nowhere
            for end_of_batch in (interruption.on_train_batch_end, interruption.on_test_batch_end):
                with pytest.raises(KeyboardInterrupt):
                    end_of_batch(1)

    def test_the_second_comes_at_once(self):
        with runs.Interruption():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_leaves_the_handler_as_it_was(self):
        with runs.Interruption():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_a_process_that_ignores_the_signal_goes_on_doing_so(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with runs.Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            interruption.on_train_batch_end(0)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    def test_in_another_thread(self):
        def enter():
            with runs.Interruption() as interruption:
                interruption.on_train_batch_end(0)
                done.append(1)

        done = []
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert done == [1]


class Trained:
    stop_training = False


def test_stop_at():
    callback = runs.StopAt(3)
    callback.set_model(Trained())
    stopped = []
    for batch in range(4):
        callback.on_train_batch_end(batch)
        stopped.append(callback.model.stop_training)
    assert stopped == [False, False, True, True]


class TestStopOnNaN:
    @pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
    def test_message_names_epoch_and_remedy(self, loss):
        with pytest.raises(ValueError, match=rf"The loss is {loss} in epoch 3: .*--optimizer.learning-rate") as error:
            runs.StopOnNaN().on_epoch_end(2, {"loss": loss})
        assert "The checkpoints hold the epochs before." in str(error.value)

    def test_no_checkpoint_in_the_first_epoch(self):
        with pytest.raises(ValueError, match=r"in epoch 1: .*There is no checkpoint\."):
            runs.StopOnNaN().on_epoch_end(0, {"loss": float("nan")})

    def test_finite_losses_pass(self):
        runs.StopOnNaN().on_epoch_end(0, {"loss": 1e30, "val_loss": float("nan")})
