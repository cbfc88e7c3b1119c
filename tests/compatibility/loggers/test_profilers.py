"""Profilers: what the Trainer and the user's code profile, in steps that run on several threads."""

from __future__ import annotations

import pickle
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from torch import Tensor

from lightning_roundpipe.integration import profiling
from lightning_roundpipe.integration.profiling import RecordsByThread, adapt, restore
from tests.support.parity import KINDS, assert_alike, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small

LAYERS = 5
MICROBATCHES = 3
PROFILER = PyTorchProfiler()
adapt(PROFILER)
SEES_THREADS = pytest.mark.skipif(
    "experimental_config" not in PROFILER._profiler_kwargs, reason="needs a torch whose profiler sees all threads"
)


class Profiles(Small):
    """Profiles a part of its own steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.trainer.profiler.profile("my loss"):
            return self.my_loss(batch)

    def my_loss(self, batch: Any) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.profiler.profile("my loss"):
            self.log("val", self.my_loss(batch))


def profiled(kind: str, profiler: Any) -> Any:
    """The module after a training with validation."""
    module = Profiles()
    settings = {"roundpipe": {"options": {"check_split": "off"}}}.get(kind, {})  # profilers see what is tried
    make_trainer(kind, profiler=profiler, **settings).fit(module, make_loader(20, 8), make_loader(12, 4))
    return module


class Recorder(Profiler):
    """A profiler of the user's own: keeps the actions, and on which thread they began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.open: dict[str, int] = {}
        self.stages: list[str] = []

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.stages.append(stage)

    def start(self, action_name: str) -> None:
        assert action_name not in self.open
        self.open[action_name] = threading.get_ident()
        self.calls.append(("start", self.named(action_name)))

    def stop(self, action_name: str) -> None:
        assert self.open.pop(action_name) == threading.get_ident()
        self.calls.append(("stop", self.named(action_name)))

    @staticmethod
    def named(action_name: str) -> str:
        return re.sub(r"\[Strategy\]\w+\.", "[Strategy].", action_name)


@compat("Profiler", "Profiler", "differs", "What a step profiles is recorded for the first micro-batch.")
@compat("Trainer argument", "profiler")
def test_an_own_profiler_gets_the_calls_of_plain() -> None:
    recorders = [Recorder(), Recorder()]
    modules = [profiled(kind, recorder) for kind, recorder in zip(KINDS, recorders, strict=True)]
    plain, ours = recorders
    assert ("start", "[Strategy].training_step") in plain.calls
    assert plain.calls.count(("start", "my loss")) == 6
    assert ours.calls == plain.calls
    assert ours.stages == plain.stages == ["fit"]
    assert not ours.open
    assert vars(ours).keys() == vars(plain).keys(), "nothing is left on the profiler"
    assert_alike(dict(modules[1].state_dict()), dict(modules[0].state_dict()))


@compat(
    "Profiler",
    "SimpleProfiler",
    "differs",
    "What a step profiles is recorded for the first micro-batch.",
)
@compat("Trainer argument", "profiler")
def test_simple_profiler() -> None:
    counts = []
    for kind in KINDS:
        module = profiled(kind, "simple")
        durations = module.trainer.profiler.recorded_durations
        counts.append({Recorder.named(name): len(times) for name, times in durations.items()})
        assert all(time >= 0 for times in durations.values() for time in times)
    assert counts[0] == counts[1]
    assert counts[0]["my loss"] == 6
    assert "my loss" in module.trainer.profiler.summary()


@compat(
    "Profiler",
    "AdvancedProfiler",
    "differs",
    "Functions of a step: those of the first micro-batch, under actions that the step itself profiles.",
)
@compat("Trainer argument", "profiler")
def test_advanced_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the profiler makes folders there for a while
    found = []
    for kind in KINDS:
        folder = tmp_path / kind
        profiled(kind, AdvancedProfiler(dirpath=folder, filename="profile", dump_stats=True))
        text = (folder / "fit-profile.txt").read_text()
        sections = re.split(r"Profile stats for: ", text)[1:]
        own = next(section for section in sections if section.startswith("my loss"))
        assert "(my_loss)" in own
        files = {Recorder.named(path.name) for path in folder.iterdir()}
        found.append([{Recorder.named(section.splitlines()[0]) for section in sections}, files])
    assert found[0] == found[1]
    assert len(found[0][1]) > 10


def calls_in(table: str) -> dict[str, int]:
    """Names and numbers of calls in a table of the profiler of torch."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    return {row[0]: int(row[-1]) for row in rows if len(row) > 3 and row[-1].isdigit()}


@compat(
    "Profiler",
    "PyTorchProfiler",
    "differs",
    "Operators count once per micro-batch, and again where a forward is repeated.",
)
@compat("Trainer argument", "profiler")
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden")
@SEES_THREADS
def test_the_profiler_of_torch_sees_all_micro_batches(tmp_path: Path) -> None:
    found, weights = [], []
    for kind in KINDS:
        folder = tmp_path / kind
        profiler = PyTorchProfiler(
            dirpath=folder,
            filename="profile",
            row_limit=-1,
            export_to_chrome=True,
            table_kwargs={"max_name_column_width": 200},
        )
        module = profiled(kind, profiler)
        weights.append(dict(module.state_dict()))
        found.append(calls_in((folder / "fit-profile.txt").read_text()))
        assert list(folder.glob("*.json"))
    plain, ours = found
    assert_alike(weights[1], weights[0])
    # Recording begins at the end of the first of 3 training steps: in plain Lightning its backward comes after that.
    assert plain["AddmmBackward0"] == 3 * LAYERS
    assert ours["AddmmBackward0"] == 2 * MICROBATCHES * LAYERS
    modules = {name for name in plain if name.startswith("[pl][module]")}
    assert modules
    assert {name: ours[name] for name in modules} == {name: MICROBATCHES * plain[name] for name in modules}
    assert ours["aten::addmm"] > MICROBATCHES * plain["aten::addmm"], "some forwards are run again for the backward"


@compat("Profiler", "PassThroughProfiler")
def test_no_profiler_is_left_alone() -> None:
    module = profiled("roundpipe", None)
    assert type(module.trainer.profiler) is PassThroughProfiler
    assert not {"start", "stop"} & vars(module.trainer.profiler).keys()


# --- the adapter ------------------------------------------------------------------------------------------------------


def test_an_adapted_profiler_pickles_and_is_restored() -> None:
    profiler = SimpleProfiler()
    for _ in range(2):  # a run that ended without its teardown
        adapt(profiler)
    other = pickle.loads(pickle.dumps(profiler))
    with other.profile("action"):
        pass
    assert len(other.recorded_durations["action"]) == 1
    assert not profiler.recorded_durations
    restore(profiler)
    assert not {"start", "stop"} & vars(profiler).keys()


@SEES_THREADS
def test_a_configuration_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = torch.profiler._ExperimentalConfig(verbose=True)
    own, default, old = PyTorchProfiler(experimental_config=config), PyTorchProfiler(), PyTorchProfiler()
    for profiler in (own, default):
        adapt(profiler)
    assert own._profiler_kwargs["experimental_config"] is config
    assert isinstance(default._profiler_kwargs["experimental_config"], torch.profiler._ExperimentalConfig)

    def without_threads(**kwargs: Any) -> None:
        raise TypeError("profile_all_threads")

    monkeypatch.setattr(profiling, "_ExperimentalConfig", without_threads)
    adapt(old)
    assert "experimental_config" not in old._profiler_kwargs


def test_records_are_kept_by_thread() -> None:
    records: Any = RecordsByThread()
    records["head"] = "mine"

    def in_another_thread() -> None:
        with pytest.raises(KeyError):
            records["head"]
        records["head"] = "its own"

    thread = threading.Thread(target=in_another_thread)
    thread.start()
    thread.join()
    assert records["head"] == "mine"
    assert len(records) == 2
