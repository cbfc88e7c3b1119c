"""Plugins: checkpoint IO, synchronization of layers, cluster environments and the launchers they stand for."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import (
    AsyncCheckpointIO,
    CheckpointIO,
    LayerSync,
    TorchCheckpointIO,
    XLACheckpointIO,
)
from lightning.pytorch.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    XLAEnvironment,
)
from lightning.pytorch.profilers import XLAProfiler
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core import rank_zero as rank_zero_of_utilities
from torch import nn

from lightning_roundpipe import RoundPipeStrategy
from tests.compatibility.versions import known
from tests.support.parity import assert_alike, both, both_refuse, compare, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small

# --- checkpoint IO ----------------------------------------------------------------------------------------------------


class OwnIO(CheckpointIO):
    """Writes files of its own kind, and notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.calls.append(("save", Path(path).name, sorted(checkpoint), storage_options))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"wrapped": checkpoint}, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        self.calls.append(("load", Path(path).name))
        return torch.load(path, weights_only=False)["wrapped"]

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", Path(path).name))
        Path(path).unlink()

    def teardown(self) -> None:
        self.calls.append(("teardown",))


@compat("Plugin", "CheckpointIO")
@compat("Trainer argument", "plugins")
def test_an_own_checkpoint_io_gets_the_calls_of_plain(tmp_path: Path) -> None:
    """As a plugin of the Trainer, and as an argument of the strategy."""

    def act(kind: str, by: str) -> Any:
        io, weights, folder = OwnIO(), [], tmp_path / f"{kind}-{by}"
        given = {"plugins": [io]} if by == "trainer" else {"options": {"checkpoint_io": io}}
        for epochs, path in ((1, None), (2, folder / "last.ckpt")):
            saving = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True, save_top_k=1)
            settings = {"callbacks": [saving], "enable_checkpointing": True, "max_epochs": epochs, **given}
            trainer, module = make_trainer(kind, **settings), Small()
            trainer.fit(module, make_loader(), ckpt_path=path, **known(trainer.fit, weights_only=False))
            trainer.save_checkpoint(folder / "own.ckpt", storage_options={"option": 1})
            weights.append(dict(module.state_dict()))
        return io.calls, weights

    plain = act("plain", "trainer")
    assert {call[0] for call in plain[0]} == {"save", "load", "remove", "teardown"}
    for by in ("trainer", "strategy"):
        assert_alike(act("roundpipe", by), plain)


class Late(TorchCheckpointIO):
    """Writes nothing before it is allowed to: training goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.may_write.wait(120)
        super().save_checkpoint(*args, **kwargs)


@compat("Plugin", "AsyncCheckpointIO; TorchCheckpointIO")
def test_what_is_written_later_is_what_was_saved(tmp_path: Path) -> None:
    """Steps that are made before the file is written do not change what is in it."""

    def act(kind: str) -> Any:
        class Allows(Small):
            def on_train_end(self) -> None:
                late.may_write.set()

        late, folder = Late(), tmp_path / kind
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(
            kind, plugins=[AsyncCheckpointIO(late)], callbacks=[saving], enable_checkpointing=True, max_epochs=2
        )
        trainer.fit(Allows(), make_loader())
        files = sorted(folder.iterdir())
        checkpoints = [torch.load(file, weights_only=False) for file in files]
        num_different = len({float(c["state_dict"]["head.weight"].norm()) for c in checkpoints})
        if kind == "plain" and num_different == 1:
            pytest.skip("this Lightning itself writes what the weights are by then")
        assert num_different == len(files) == 6
        return [[c["state_dict"], c["optimizer_states"], c["global_step"]] for c in checkpoints]

    both(act)


# --- synchronization of layers ----------------------------------------------------------------------------------------


class OwnSync(LayerSync):
    """Would put something else in the place of layers."""

    def apply(self, model: nn.Module) -> nn.Module:
        raise AssertionError("there is one process, and nothing to synchronize")

    revert = apply


SYNCS: list[dict[str, Any]] = [{"sync_batchnorm": True}, {"plugins": [OwnSync()]}]


@pytest.mark.parametrize("settings", SYNCS)
@compat("Trainer argument", "sync_batchnorm", note="A warning: no effect, as on one device.")
@compat("Plugin", "TorchSyncBatchNorm; LayerSync", note="A warning: no effect, as on one device.")
def test_layers_of_one_process_are_not_synchronized(settings: dict[str, Any]) -> None:
    class Normed(Small):
        def __init__(self) -> None:
            super().__init__()
            self.body.append(nn.BatchNorm1d(6))

    with pytest.warns(UserWarning, match=r"no effect with strategy='roundpipe'.*num_microbatches=1"):
        runs = compare(Normed, ours={"num_microbatches": 1}, **settings)
    assert {type(run.module.body[4]) for run in runs} == {nn.BatchNorm1d}


# --- cluster environments and launchers -------------------------------------------------------------------------------

MASTER = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29400", "RANK": "0", "WORLD_SIZE": "1"}
TORCHRUN = {**MASTER, "TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
SLURM = {f"SLURM_{name}": "1" for name in ("NTASKS", "NTASKS_PER_NODE", "NNODES")}
SLURM |= {f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID")}
SLURM |= {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1234"}
KUBEFLOW = {**MASTER, "KUBERNETES_PORT": "tcp://127.0.0.1:443"}
LSF = {"LSB_JOBID": "1", "JSM_NAMESPACE_LOCAL_RANK": "0", "JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1"}
# All that a launcher may have set around the tests themselves.
VARIABLES = {*TORCHRUN, *SLURM, *KUBEFLOW, *LSF, "LSB_DJOB_RANKFILE", "NODE_RANK"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, str]], None]:
    """Sets the variables of a launcher, and no others."""

    def launch(variables: dict[str, str]) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if "LSB_JOBID" in variables:
            host = socket.gethostname()
            (tmp_path / "rankfile").write_text(f"launcher\n{host}\n")
            monkeypatch.setenv("LSB_DJOB_RANKFILE", str(tmp_path / "rankfile"))

    return launch


class Own(LightningEnvironment):
    """A cluster of the user's own."""

    num_processes = 1

    def world_size(self) -> int:
        return self.num_processes


class OwnOfThree(Own):
    """One that has started 3 processes."""

    num_processes = 3


@pytest.mark.parametrize("variables", [{}, TORCHRUN], ids=["python", "torchrun"])
def test_one_launched_process_trains_alone(launched: Any, variables: dict[str, str]) -> None:
    launched(variables)
    _, ours = compare(Small)
    assert ours.trainer.strategy.launcher is None


@compat("Plugin", "SLURMEnvironment")
def test_a_job_is_saved_and_queued_again_on_a_signal(
    launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes in the middle of a step, from which Lightning saves a checkpoint, and the next job goes on."""

    class Signalled(Small):
        is_sent = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if batch_idx == 1 and not self.is_sent:
                self.is_sent = True
                os.kill(os.getpid(), signal.SIGUSR1)
            return loss

    launched(SLURM)
    asked: list[Any] = []
    monkeypatch.setattr(signal_connector, "call", lambda command: asked.append(command) or 0)

    def act(kind: str) -> Any:
        folder = tmp_path / kind
        make_trainer(kind, default_root_dir=folder).fit(Signalled(), make_loader())
        (path,) = folder.glob("hpc_ckpt_*.ckpt")
        saved = torch.load(path, weights_only=False)
        trainer, module = make_trainer(kind, default_root_dir=folder, max_epochs=2), Small()
        trainer.fit(module, make_loader(), **known(trainer.fit, weights_only=False))
        assert trainer.global_step == 6
        return saved["global_step"], saved["state_dict"], saved["optimizer_states"], dict(module.state_dict())

    assert both(act)[0] == 1
    assert asked == [["scontrol", "requeue", SLURM["SLURM_JOB_ID"]]] * 2


SRUN = dict(SLURM, SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", SLURM_PROCID="1", SLURM_LOCALID="1")
ALONE = (0, 1, 0)
# Variables of a launcher, a plugin if it is to be given, and: rank, number of ranks, rank on the machine.
LAUNCHES: dict[str, tuple[dict[str, str], type[ClusterEnvironment] | None, tuple[int, int, int]]] = {
    "alone, own": ({}, Own, ALONE),
    "alone, python, given": ({}, LightningEnvironment, ALONE),
    "alone, torchrun": (TORCHRUN, None, ALONE),
    "alone, torchrun, given": ({}, TorchElasticEnvironment, ALONE),
    "alone, slurm": (SLURM, None, ALONE),
    "alone, slurm, given": (SLURM, SLURMEnvironment, ALONE),
    "alone, kubeflow": (KUBEFLOW, KubeflowEnvironment, ALONE),
    "alone, lsf": (LSF, None, ALONE),
    "torchrun": (dict(TORCHRUN, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2"), None, (1, 2, 1)),
    "torchrun, first": (dict(TORCHRUN, WORLD_SIZE="4"), None, (0, 4, 0)),
    "srun": (SRUN, None, (1, 2, 1)),
    "jsrun": (dict(LSF, JSM_NAMESPACE_RANK="3", JSM_NAMESPACE_SIZE="8"), None, (3, 8, 0)),
    "by hand": ({"LOCAL_RANK": "1", "WORLD_SIZE": "3"}, None, (1, 3, 1)),
    "own": ({}, OwnOfThree, (0, 3, 0)),
    "kubeflow": (dict(KUBEFLOW, WORLD_SIZE="3", RANK="2"), KubeflowEnvironment, (2, 3, 0)),
}


@pytest.fixture
def rank_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning keeps the rank of the process beside Trainers."""
    for only in (rank_zero_only, rank_zero_of_utilities.rank_zero_only):
        monkeypatch.setattr(only, "rank", 0)


@pytest.mark.parametrize("name", LAUNCHES)
@compat(
    "Plugin",
    "ClusterEnvironment; TorchElasticEnvironment; SLURMEnvironment; KubeflowEnvironment; LSFEnvironment",
    note="The processes train together, as with DDP.",
)
@compat("Plugin", "LightningEnvironment")
@compat("Library", "rank_zero_only")
def test_launched_processes_are_ranks(launched: Any, rank_kept: None, name: str) -> None:
    """The trainings themselves are in ``tests/ranks``."""
    variables, environment, place = LAUNCHES[name]
    launched(variables)
    trainer = make_trainer(**({} if environment is None else {"plugins": [environment()]}))
    assert (trainer.global_rank, trainer.world_size, trainer.local_rank) == place
    assert (trainer.strategy.launcher is None) == (place == ALONE)
    assert trainer.is_global_zero == (place[0] == 0)
    assert rank_zero_only.rank == place[0]
    sampled = None if place == ALONE else {"num_replicas": place[1], "rank": place[0]}
    assert trainer.distributed_sampler_kwargs == sampled


WRONG: list[Any] = [
    pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, {}, r"process 1 of 2.*is set to 1", id="no local rank"),
    pytest.param({"LOCAL_RANK": "1"}, {}, r"process 1 of 1", id="a process of DDP"),
    pytest.param(SRUN, {"ranks_per_node": 4}, r"ranks_per_node=4 do not make the 2 processes", id="ranks per node"),
    pytest.param(TORCHRUN, {"num_nodes": 2}, r"num_nodes=2.*do not make the 1 processes", id="machines"),
]


@compat("Misuse", "processes that do not agree about their number", "refused", "The error comes with the Trainer.")
@pytest.mark.parametrize(("variables", "settings", "match"), WRONG)
def test_processes_that_do_not_agree_are_refused(
    launched: Any, rank_kept: None, variables: dict[str, str], settings: dict[str, Any], match: str
) -> None:
    launched(variables)
    ours = dict(settings)
    options = {name: ours.pop(name) for name in ("ranks_per_node",) if name in ours}
    with pytest.raises(MisconfigurationException, match=match):
        make_trainer(options=options, **ours)


@compat("Plugin", "MPIEnvironment", "refused", "Lightning's own error without `mpi4py`.")
@compat("Plugin", "XLAEnvironment; XLACheckpointIO", "refused", "Lightning's own error without `torch_xla`.")
@compat("Profiler", "XLAProfiler", "refused", "Lightning's own error without `torch_xla`.")
@pytest.mark.filterwarnings("ignore:Exception ignored in.*Profiler.__del__")
@pytest.mark.parametrize("kind", [MPIEnvironment, XLAEnvironment, XLACheckpointIO, XLAProfiler])
def test_what_needs_a_package(kind: type) -> None:
    with pytest.raises(ModuleNotFoundError, match="mpi4py" if kind is MPIEnvironment else "torch_xla"):
        kind()


@compat("Library", "Jupyter")
def test_a_notebook_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies with a launcher for scripts are refused there; this one has none."""
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match="not compatible with an interactive"):
        make_trainer("plain", strategy="ddp", devices=2)

    trainer = make_trainer()
    trainer.fit(Small(), make_loader())
    assert trainer.global_step == 3


@compat("Misuse", "unknown plugins", "refused", "The error comes with the Trainer.")
def test_what_is_no_plugin_is_refused_as_in_plain() -> None:
    for plugins, match in (
        (["slurm"], "invalid type for plugin"),
        ([TorchCheckpointIO(), TorchCheckpointIO()], "multiple values for CheckpointIO"),
    ):
        both_refuse(partial(make_trainer, plugins=plugins), MisconfigurationException, match)
    assert isinstance(L.Trainer(strategy="roundpipe", logger=False, barebones=True).strategy, RoundPipeStrategy)
