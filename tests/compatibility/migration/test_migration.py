"""Checkpoints of other strategies resume here, and those from here resume there, as if nothing had been interrupted."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_roundpipe import RoundPipeStrategy
from tests.compatibility.migration.other_strategies import Migrating, SavesAfter, rows
from tests.compatibility.versions import need
from tests.support.forks import Forks
from tests.support.parity import KINDS, assert_alike, make_trainer
from tests.support.rows import compat

ROOT = Path(__file__).resolve().parents[3]
EPOCHS, STEPS = 2, 6


@pytest.fixture(scope="module")
def written(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what DDP and FSDP have written on two processes; see :mod:`other_strategies`."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("needs a torch whose fully_shard runs on CPUs")
    folder = tmp_path_factory.mktemp("written")
    for head_first in (True, False):
        saves = SavesAfter(f"{folder}/begun-{head_first}.ckpt", (2,))
        make_trainer(callbacks=[saves]).fit(Migrating(head_first=head_first), rows())
    forks.run(ROOT / "tests" / "compatibility" / "migration" / "other_strategies.py", str(folder), folder=folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of a plain run on one device, after 2, 3 and all 6 steps."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    trainer = make_trainer("plain", max_epochs=EPOCHS, callbacks=[SavesAfter(f"{folder}/{{}}.ckpt", (2, 3))])
    trainer.fit(Migrating(), rows())
    assert trainer.global_step == STEPS
    trainer.save_checkpoint(folder / "end.ckpt")
    return folder


def content(path: Any) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def _sorted(value: Any) -> Any:
    return {key: _sorted(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


def training_of(path: Path) -> dict[str, Any]:
    """What decides how a training goes on; callbacks and the like left out."""
    saved = content(path)
    states = saved["optimizer_states"]
    return {
        "weights": _sorted(dict(saved["state_dict"])),
        "optimizers": [_sorted(state["state"]) for state in states],
        "groups": [[{"lr": g["lr"], "decay": g["weight_decay"]} for g in state["param_groups"]] for state in states],
        "schedulers": saved["lr_schedulers"],
        "steps": (saved["epoch"], saved["global_step"]),
    }


@pytest.fixture
def assert_goes_on(uninterrupted: Path, tmp_path: Path) -> Callable[..., L.Trainer]:
    """A run that goes on from a checkpoint ends like the plain one that was never interrupted."""

    def check(path: Any, kind: str = "roundpipe", module: Any = None, **settings: Any) -> L.Trainer:
        trainer = make_trainer(kind, max_epochs=EPOCHS, **settings.pop("trainer", {}))
        steps: list[int] = []
        module = module or Migrating()
        module.on_train_batch_start = lambda batch, batch_idx: steps.append(trainer.global_step)
        trainer.fit(module, rows(), ckpt_path=path, **settings)
        assert steps == list(range(STEPS))[-len(steps) :] != list(range(STEPS)), "it must go on, not start anew"
        del module.on_train_batch_start
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        assert_alike(training_of(tmp_path / "end.ckpt"), training_of(uninterrupted / "end.ckpt"))
        return trainer

    return check


@compat("Migration", "checkpoint of DDP, resumed here; checkpoint of FSDP in one file, resumed here")
@pytest.mark.parametrize("name", ["ddp-3", "full-2"])
def test_files_of_several_processes(written: Path, assert_goes_on: Any, name: str) -> None:
    """At the end of an epoch, and in the middle of one."""
    assert_goes_on(written / f"{name}.ckpt")


@compat("Migration", "checkpoint from here, resumed by DDP; checkpoint from here, resumed by FSDP")
@pytest.mark.parametrize("name", ["ddp", "full"])
def test_several_processes_go_on(written: Path, uninterrupted: Path, name: str) -> None:
    ended, expected = training_of(written / f"{name}-6.ckpt"), training_of(uninterrupted / "end.ckpt")
    assert ended.pop("steps")[1] == expected.pop("steps")[1] == STEPS  # the epoch is not over when this one is saved
    if name == "full":  # has another order of parameters
        ended, expected = ended["weights"], expected["weights"]
    assert_alike(ended, expected)


@pytest.fixture
def consolidate(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Runs the command in an error message, in this process; the file that it has written."""

    def run(message: str) -> Path:
        (_, module, folder) = re.findall(r"python -m (((?:\w+\.)+\w+)) (\S+)", message)[0][:3]
        monkeypatch.setattr(sys, "argv", [module, folder])
        runpy.run_module(module, run_name="__main__", alter_sys=False)
        return Path(f"{folder}.consolidated")

    return run


@compat(
    "Migration",
    "folder of FSDP",
    status="refused",
    note="Make one file of it: `python -m lightning.pytorch.utilities.consolidate_checkpoint`.",
)
@compat("Migration", "folder of FSDP that was made one file, resumed here")
@pytest.mark.filterwarnings("ignore:.*")  # of torch about its own format
@pytest.mark.parametrize("name", ["fsdp", "sharded"])
def test_folders_of_several_processes(written: Path, assert_goes_on: Any, consolidate: Any, name: str) -> None:
    """The error names two commands: the first is for FSDPStrategy, the second for ModelParallelStrategy."""
    folder = written / f"{name}-2"
    with pytest.raises(IsADirectoryError, match=r"parts of several processes.*consolidate_checkpoint") as caught:
        make_trainer(max_epochs=EPOCHS).fit(Migrating(), rows(), ckpt_path=folder)
    message = str(caught.value)
    file = consolidate(message if name == "fsdp" else message[message.index("or with") :])
    assert str(file) in message
    assert_goes_on(file)


# What Lightning's conversion keeps of a DeepSpeed folder: its own entries without weights and optimizers, and some of
# DeepSpeed's.
def as_converted_by_deepspeed(checkpoint: dict[str, Any], prefix: str) -> dict[str, Any]:
    kept = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    weights = {f"{prefix}{name}": value for name, value in checkpoint["state_dict"].items()}
    return {**kept, "ds_config": {}, "ds_version": "0.18", "buffer_names": [], "state_dict": weights}


@compat("Migration", "weights of DeepSpeed that were made one file")
@compat(
    "Migration",
    "training of DeepSpeed that was made one file, resumed here",
    status="refused",
    note="The file has no optimizer state: load its weights, and begin a new training.",
)
@pytest.mark.parametrize("prefix", ["_forward_module.", "module."])
def test_files_of_deepspeed(uninterrupted: Path, tmp_path: Path, prefix: str) -> None:
    path = tmp_path / "deepspeed.ckpt"
    original = content(uninterrupted / "3.ckpt")
    torch.save(as_converted_by_deepspeed(original, prefix), path)
    module = Migrating()
    make_trainer().validate(module, rows(), ckpt_path=path, verbose=False)
    assert_alike(dict(module.state_dict()), dict(original["state_dict"]), rtol=0, atol=0)
    with pytest.raises(L.fabric.utilities.exceptions.MisconfigurationException, match="no optimizer state") as caught:
        make_trainer(max_epochs=EPOCHS).fit(Migrating(), rows(), ckpt_path=path)
    assert str(path) in str(caught.value)


@compat(
    "Migration",
    "folder of DeepSpeed",
    status="refused",
    note="Make one file of it: `convert_zero_checkpoint_to_fp32_state_dict`.",
)
def test_folder_of_deepspeed(tmp_path: Path) -> None:
    folder = tmp_path / "run.ckpt"
    (folder / "checkpoint").mkdir(parents=True)
    torch.save({}, folder / "checkpoint" / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for has_tag in (False, True):
        if has_tag:
            (folder / "latest").write_text("checkpoint")
        with pytest.raises(IsADirectoryError, match=r"convert_zero_checkpoint_to_fp32_state_dict\('.*run\.ckpt'"):
            make_trainer().fit(Migrating(), rows(), ckpt_path=folder)


@compat(
    "Migration",
    "a folder, or a file that is no checkpoint",
    status="refused",
    note="The error says what is missing in it.",
)
def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(Migrating().state_dict(), weights)
    torch.save({"state_dict": Migrating().state_dict()}, tmp_path / "only.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    errors = L.fabric.utilities.exceptions.MisconfigurationException
    for path, error, message in (
        (tmp_path, IsADirectoryError, "is a folder: pass the path of a checkpoint file"),
        (weights, errors, r"weights.pt' is not a checkpoint.*module.load_state_dict"),
        (tmp_path / "list.ckpt", errors, "is not a checkpoint"),
        (tmp_path / "only.ckpt", errors, r"cannot go on from '.*only.ckpt'. It has no optimizer state"),
        (tmp_path / "nothing.ckpt", FileNotFoundError, "nothing.ckpt"),
    ):
        with pytest.raises(error, match=message):
            make_trainer().fit(Migrating(), rows(), ckpt_path=path)
    (found,) = make_trainer().validate(Migrating(), rows(), ckpt_path=tmp_path / "only.ckpt", verbose=False)
    assert found["val"] > 0


@compat(
    "Migration",
    "checkpoint from here, resumed by plain Lightning; checkpoint of plain Lightning, resumed here; "
    "checkpoint with another number of devices and micro-batches",
)
def test_there_and_back(uninterrupted: Path, assert_goes_on: Any, tmp_path: Path) -> None:
    """From the middle of an epoch (step 2), and from its end."""
    pattern = str(tmp_path / "ours-{}.ckpt")
    make_trainer(max_epochs=1, callbacks=[SavesAfter(pattern)]).fit(Migrating(), rows())
    ours = {step: Path(pattern.format(step)) for step in (2, 3)}
    for step, path in ours.items():
        plain = uninterrupted / f"{step}.ckpt"
        assert_alike(training_of(path), training_of(plain))
        assert content(path).keys() == content(plain).keys()
        assert_goes_on(path, "plain")
    assert_goes_on(uninterrupted / "3.ckpt")
    assert_goes_on(ours[2], trainer={"devices": 1, "num_microbatches": 1})
    assert_goes_on(ours[3], trainer={"devices": 3, "num_microbatches": 8})


@compat("Migration", "weights_only")
def test_weights_only(uninterrupted: Path, assert_goes_on: Any) -> None:
    need(L.Trainer.validate, "weights_only")
    fresh, path = Migrating(), uninterrupted / "2.ckpt"
    make_trainer().validate(fresh, rows(), ckpt_path=path, weights_only=True, verbose=False)
    assert_alike(dict(fresh.state_dict()), dict(content(path)["state_dict"]), rtol=0, atol=0)
    assert_goes_on(path, weights_only=True)


@compat("Migration", "checkpoint with the names of torch.compile or of a wrapper")
def test_names_of_wrappers(uninterrupted: Path, assert_goes_on: Any, tmp_path: Path) -> None:
    """A run with ``self.body = torch.compile(self.body)`` saves such names, and FSDP with checkpoints others."""
    saved = content(uninterrupted / "2.ckpt")
    for part, marked in (
        ("body.", "body._orig_mod."),
        ("head.", "head._fsdp_wrapped_module._checkpoint_wrapped_module."),
    ):
        saved["state_dict"] = {name.replace(part, marked): value for name, value in saved["state_dict"].items()}
        assert any(marked in name for name in saved["state_dict"])
    torch.save(saved, tmp_path / "wrapped.ckpt")
    assert_goes_on(tmp_path / "wrapped.ckpt")


class Compiled(Migrating):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(self.body, backend="eager")


def test_names_for_a_compiled_module(uninterrupted: Path) -> None:
    """The other way round: the module has the marks, the file has not; nothing is compiled to load it."""
    saved = content(uninterrupted / "2.ckpt")
    module, strategy = Compiled(), RoundPipeStrategy()
    assert "body._orig_mod.0.0.weight" in module.state_dict()
    strategy._lightning_module = module
    strategy.load_model_state_dict(saved)
    inner = module.body._orig_mod.state_dict(prefix="body.")
    assert_alike(dict(inner), {name: saved["state_dict"][name] for name in inner}, rtol=0, atol=0)


def test_states_of_metrics_in_a_wrapper() -> None:
    """They are neither parameters nor buffers, but in the file if they are persistent."""
    saving, loading = Migrating(), Migrating()
    for module in (saving, loading):
        module.seen = MeanMetric()
        module.seen.persistent(True)
    saving.seen.update(3.0)
    state = {f"_orig_mod.{name}": value for name, value in saving.state_dict().items()}
    strategy = RoundPipeStrategy()
    strategy._lightning_module = loading
    strategy.load_model_state_dict({"state_dict": state})
    assert_alike(dict(loading.state_dict()), dict(saving.state_dict()), rtol=0, atol=0)


@compat("Migration", "strict_loading=False")
def test_strict_and_not(uninterrupted: Path, tmp_path: Path) -> None:
    saved = content(uninterrupted / "3.ckpt")
    saved["state_dict"]["gone.weight"] = torch.ones(2)
    del saved["state_dict"]["head.bias"]
    torch.save(saved, tmp_path / "other.ckpt")
    found = []
    for kind in KINDS:
        with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias.*\n.*Unexpected key.*gone\.weight") as caught:
            make_trainer(kind).validate(Migrating(), rows(), ckpt_path=tmp_path / "other.ckpt", verbose=False)
        module = Migrating()
        module.strict_loading = False
        (metrics,) = make_trainer(kind).validate(module, rows(), ckpt_path=tmp_path / "other.ckpt", verbose=False)
        assert torch.equal(module.head.bias, Migrating().head.bias)
        assert torch.equal(module.head.weight, saved["state_dict"]["head.weight"])
        found.append((str(caught.value), pytest.approx(metrics["val"], rel=1e-5)))
    assert found[0] == found[1]


def named(optimizer: dict[str, Any], module: nn.Module, order: Callable[[list[str]], list[str]]) -> dict[str, Any]:
    """The state of an optimizer as a folder of FSDP has it, with the parameters of each group in another order."""
    own = {id(p): name for name, p in module.named_parameters()}
    groups = module.configure_optimizers()["optimizer"].param_groups
    names = [own[id(p)] for group in groups for p in group["params"]]
    state = {names[index]: value for index, value in optimizer["state"].items()}
    saved = [{**g, "params": order([names[i] for i in g["params"]])} for g in optimizer["param_groups"]]
    return {"state": state, "param_groups": saved}


def test_optimizer_state_by_name(uninterrupted: Path, assert_goes_on: Any, tmp_path: Path) -> None:
    """Order does not matter then: taken by number, states would silently go to other weights of the same shape."""
    saved = content(uninterrupted / "2.ckpt")
    (optimizer,) = saved["optimizer_states"]
    saved["optimizer_states"] = [named(optimizer, Migrating(), lambda names: names[::-1])]
    torch.save(saved, tmp_path / "named.ckpt")
    assert_goes_on(tmp_path / "named.ckpt")
    saved["optimizer_states"] = [named(optimizer, Migrating(), lambda names: [*names[1:], "other"])]
    torch.save(saved, tmp_path / "other.ckpt")
    with pytest.raises(L.fabric.utilities.exceptions.MisconfigurationException, match="other parameters than the one"):
        make_trainer(max_epochs=EPOCHS).fit(Migrating(), rows(), ckpt_path=tmp_path / "other.ckpt")


def test_plugins_may_read_folders(tmp_path: Path, uninterrupted: Path) -> None:
    """Only Lightning's own way of reading needs a file."""

    class Folders(L.pytorch.plugins.io.CheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            raise AssertionError("nothing is saved")

        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
            return content(Path(path) / "2.ckpt")

        def remove_checkpoint(self, path: Any) -> None:
            raise AssertionError("nothing is removed")

    (found,) = make_trainer(plugins=[Folders()]).validate(Migrating(), rows(), ckpt_path=uninterrupted, verbose=False)
    assert found["val"] > 0
