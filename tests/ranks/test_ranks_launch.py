"""Processes of a run: their places, their devices, and what Lightning's interface says on each."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_roundpipe import RoundPipeTimeline
from lightning_roundpipe.ranks import environment
from lightning_roundpipe.ranks.environment import Place, connect, own_devices
from lightning_roundpipe.ranks.failures import RankError
from tests.ranks.test_ranks_group import connected
from tests.support.forks import Forks
from tests.support.parity import make_loader, make_trainer
from tests.support.rank_runs.launch import values_of_ranks
from tests.support.small import Small

SCRIPT = Path(__file__).with_name("plain_script.py")
NUM_STEPS = 6  # of its first training
RESTARTED = Path(__file__).parents[1] / "support" / "rank_runs" / "restarted.py"


class Telling(Small):
    """Keeps what it can see of its ranks during a training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def on_train_start(self) -> None:
        trainer, strategy = self.trainer, self.trainer.strategy
        self.seen["ranks"] = (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size)
        self.seen["zero"] = trainer.is_global_zero
        self.seen["devices"] = len(strategy.pool)
        self.seen["reduced"] = [
            strategy.reduce(torch.tensor(float(self.global_rank)), reduce_op=op) for op in ("mean", "sum")
        ]
        self.seen["gathered"] = self.all_gather({"a": torch.tensor([self.global_rank, 7])})["a"]
        mine = f"from {self.global_rank}"
        self.seen["broadcast"] = strategy.broadcast(mine), strategy.broadcast(mine, 1)
        self.seen["all"] = strategy.reduce_boolean_decision(self.global_rank == 0, all=True)
        self.seen["any"] = strategy.reduce_boolean_decision(self.global_rank == 0, all=False)
        loader = trainer.train_dataloader
        assert isinstance(loader, DataLoader)
        assert isinstance(loader.sampler, DistributedSampler)
        self.seen["sampler"] = (loader.sampler.num_replicas, loader.sampler.rank)
        strategy.barrier("here")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("rank", float(self.global_rank), sync_dist=True)


def seen_by_a_rank(rank: int | None = None, num_nodes: int = 1) -> dict[str, Any]:
    torch.manual_seed(int(os.environ["RANK"]) if rank is None else rank)  # other weights on each
    module = Telling()
    trainer = make_trainer(devices=4 // num_nodes, num_nodes=num_nodes)
    trainer.fit(module, make_loader())
    module.seen["logged"] = float(trainer.callback_metrics["rank"])
    module.seen["state"] = dict(module.state_dict())
    module.seen["after"] = trainer.strategy.broadcast(module.global_rank, 1)
    return module.seen


def seen_by_a_task(num_nodes: int) -> dict[str, Any]:
    """What a rank sees that knows what SLURM's srun sets, in place of what torchrun does."""
    rank, port = os.environ.pop("RANK"), os.environ["MASTER_PORT"]
    for name in ("LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    place = {"PROCID": rank, "LOCALID": "0" if num_nodes == 2 else rank, "NODEID": rank if num_nodes == 2 else "0"}
    step = {"NTASKS": "2", "NTASKS_PER_NODE": str(2 // num_nodes), "NNODES": str(num_nodes)}
    job = {"JOB_ID": port, "JOB_NAME": "train", "NODELIST": "127.0.0.1"}
    os.environ.update({f"SLURM_{name}": value for name, value in {**place, **step, **job}.items()})
    seen = seen_by_a_rank(int(rank), num_nodes=num_nodes)
    seen["environment"] = os.environ["MASTER_ADDR"]  # set by Lightning's environment for SLURM alone
    return seen


@pytest.mark.parametrize("num_nodes", [None, 1, 2], ids=["torchrun", "SLURM, one machine", "SLURM, two machines"])
def test_every_rank_sees_what_ddp_would_show(forks: Forks, tmp_path: Path, num_nodes: int | None) -> None:
    arguments = () if num_nodes is None else (num_nodes,)
    found = values_of_ranks(forks, tmp_path, 2, seen_by_a_task if arguments else seen_by_a_rank, *arguments)
    for rank, seen in enumerate(found):
        assert seen["ranks"] == ((rank, 0, rank, 2) if num_nodes == 2 else (rank, rank, 0, 2))
        assert seen.get("environment") == (None if num_nodes is None else "127.0.0.1")
        assert seen["zero"] == (rank == 0)
        assert seen["devices"] == 2
        assert [float(value) for value in seen["reduced"]] == [0.5, 1.0]
        assert torch.equal(seen["gathered"], torch.tensor([[0, 7], [1, 7]]))
        assert seen["broadcast"] == ("from 0", "from 1")
        assert (seen["all"], seen["any"]) == (False, True)
        assert seen["sampler"] == (2, rank)
        assert seen["logged"] == 0.5
        assert seen["after"] == 1


def recorded() -> None:
    rank = os.environ["RANK"]
    options = {"trace": f"trace-{rank}.json", "save_profile": f"profile-{rank}.json"}
    timeline = RoundPipeTimeline(f"timeline-{rank}.json")
    make_trainer(devices=2, options=options, callbacks=[timeline], max_epochs=2).fit(Small(), make_loader(40))


def test_rank_0_alone_writes_recordings(forks: Forks, tmp_path: Path) -> None:
    values_of_ranks(forks, tmp_path, 2, recorded)
    names = {path.name for path in tmp_path.glob("*-?.json")}
    assert names == {"trace-0.json", "profile-0.json", "timeline-0.json"}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """What both ranks have trained in the plain script."""
    found = [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]
    assert [(size, devices) for size, devices, _ in found] == [(2, 2)] * 2
    for name, value in found[0][2].items():
        assert torch.equal(value, found[1][2][name])
    return dict(found[0][2])


@pytest.fixture(scope="module")
def trained(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the plain script has trained, which has started its other rank itself, before that one has failed."""
    folder = tmp_path_factory.mktemp("plain")
    status, output = forks.end(SCRIPT, str(folder), "2", str(NUM_STEPS), folder=folder)
    assert status == 1
    assert re.search(r"RankError: .*rank 1 \(.*\) has failed: ValueError: boom", output), output
    return folder


def test_a_plain_script_starts_its_other_rank_and_ends_with_its_error(trained: Path) -> None:
    assert weights_in(trained)


def test_a_plain_script_ends_when_its_other_rank_has_ended(forks: Forks, tmp_path: Path) -> None:
    status, output = forks.end(SCRIPT, str(tmp_path), "2", "-1", folder=tmp_path)
    assert status == 1
    assert re.search(r"RankError: .*ended with status 3 before it", output), output


def test_ranks_that_torchrun_starts_again_go_on(trained: Path, forks: Forks, tmp_path: Path) -> None:
    """As if nothing had happened; the step that fails is in the second epoch."""
    status, output = forks.end(RESTARTED, "1", str(SCRIPT), str(tmp_path), "0", "3", folder=tmp_path)
    assert status == 0, output
    assert "ValueError: boom" in output
    torch.testing.assert_close(weights_in(tmp_path), weights_in(trained))


def has_own_devices() -> Any:
    group = connected()
    place = Place(group.rank, group.size, group.rank, 0)
    mine = [torch.device("cuda", 0), torch.device("cuda", 1)]
    all_of = [torch.device("meta", index) for index in range(5)]
    found = own_devices(group, place, all_of), own_devices(group, replace(place, node_rank=group.rank), all_of)
    few = own_devices(group, place, [torch.device("cpu")])
    with pytest.raises(ValueError, match="2 ranks of this machine share 1 devices"):
        own_devices(group, place, all_of[:1])
    # A launcher may let each rank see its own.
    seen = own_devices(group, place, mine if group.rank else all_of)
    group.close()
    return [[str(device) for device in devices] for devices in (*found, few, seen)]


def test_ranks_of_a_machine_divide_the_devices_that_they_all_see(forks: Forks, tmp_path: Path) -> None:
    one, other = values_of_ranks(forks, tmp_path, 2, has_own_devices)
    everything = [f"meta:{index}" for index in range(5)]
    assert one == [everything[:2], everything, ["cpu"], everything]
    assert other == [everything[2:], everything, ["cpu"], ["cuda:0", "cuda:1"]]


def waits_in_vain() -> str:
    timeout = timedelta(seconds=1)
    place = Place(int(os.environ["RANK"]), 3, 0, 0)
    try:
        connect(place, "127.0.0.1", int(os.environ["MASTER_PORT"]), "gloo", timeout, lambda: None)
    except RankError as error:
        return str(error)
    return "no error"


def comes_too_early() -> int:
    """Rank 0 comes when the other one has tried in vain."""
    place, tried = Place(int(os.environ["RANK"]), 2, 0, 0), Path("tried")
    environment._CONNECT = timedelta(seconds=0.1)
    while place.rank == 0 and not tried.exists():
        threading.Event().wait(0.05)
    timeout = timedelta(seconds=60)
    group = connect(place, "127.0.0.1", int(os.environ["MASTER_PORT"]), "gloo", timeout, tried.touch)
    group.barrier("both")
    group.close()
    return group.size


def test_a_rank_waits_for_one_that_starts_later_and_keeps_the_store(forks: Forks, tmp_path: Path) -> None:
    assert values_of_ranks(forks, tmp_path, 2, comes_too_early) == [2, 2]
    assert (tmp_path / "tried").exists()


def test_ranks_that_never_start_are_named(forks: Forks, tmp_path: Path) -> None:
    first, _ = values_of_ranks(forks, tmp_path, 2, waits_in_vain)
    # On a busy machine the other one may be late as well.
    assert re.search("rank 0 has waited for ranks? (1, )?2 of 3 to start for 1 s", first)
