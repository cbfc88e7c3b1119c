"""LightningCLI: the strategy by name and by class from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_roundpipe import RoundPipeAccelerator, RoundPipeStrategy, VirtualLink
from lightning_roundpipe.planning import CostProfile


@pytest.fixture
def run_cli(small: Any, make_loader: Any, tmp_path: Path) -> Any:
    """Runs ``fit`` with a trainer section of a YAML file; returns the CLI object."""

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return make_loader()

    def run(trainer: dict[str, Any], *arguments: str) -> LightningCLI:
        quiet = {
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": {**quiet, **trainer}}))
        return LightningCLI(small, Data, args=["fit", "--config", str(path), *arguments], save_config_callback=None)

    return run


BY_CLASS = {
    "class_path": "lightning_roundpipe.RoundPipeStrategy",
    "init_args": {"num_microbatches": 3, "loss_weight": "samples", "units": ["Linear"], "virtual_copies": True},
}


@pytest.fixture
def plain_weights(small: Any, make_trainer: Any, make_loader: Any) -> dict[str, Any]:
    module = small()
    make_trainer("plain").fit(module, make_loader())
    return dict(module.state_dict())


NAMES = ["roundpipe", "RoundPipeStrategy", "lightning_roundpipe.RoundPipeStrategy"]


@pytest.mark.parametrize("strategy", [*NAMES, BY_CLASS], ids=[*NAMES, "class and options"])
def test_fit(run_cli: Any, plain_weights: Any, assert_alike: Any, strategy: Any) -> None:
    cli = run_cli({"strategy": strategy})
    used = cli.trainer.strategy
    assert isinstance(used, RoundPipeStrategy)
    if strategy is BY_CLASS:
        assert used.options.num_microbatches == 3
        assert used.options.units == ["Linear"]
        assert used.options.virtual_copies
    assert cli.trainer.global_step == 3
    assert_alike(dict(cli.model.state_dict()), plain_weights)


def test_command_line_options(run_cli: Any) -> None:
    cli = run_cli({"strategy": BY_CLASS}, "--trainer.strategy.init_args.num_microbatches=auto", "--trainer.devices=1")
    assert cli.trainer.strategy.options.num_microbatches == "auto"
    assert len(cli.trainer.strategy.pool) == 1


def test_memory_and_links(run_cli: Any, plain_weights: Any, assert_alike: Any) -> None:
    link = {"class_path": "lightning_roundpipe.VirtualLink", "init_args": {"gb_per_s": 2.5}}
    for copies in (link, {"gb_per_s": 2.5}):
        arguments = {"num_microbatches": 3, "device_memory_limit": "1 MiB", "virtual_copies": copies}
        cli = run_cli({"strategy": {**BY_CLASS, "init_args": arguments}})
        options = cli.trainer.strategy.options
        assert options.virtual_copies == VirtualLink(gb_per_s=2.5)
        assert options.device_memory_bytes == cli.trainer.strategy.pool.memory_limit == 2**20
        assert_alike(dict(cli.model.state_dict()), plain_weights)


def test_memory_on_the_command_line(run_cli: Any) -> None:
    cli = run_cli({"strategy": BY_CLASS}, "--trainer.strategy.init_args.device_memory_limit=2GiB")
    assert cli.trainer.strategy.pool.memory_limit == 2 * 2**30
    cli = run_cli({"strategy": BY_CLASS}, "--trainer.strategy.init_args.device_memory_limit=65536")
    assert cli.trainer.strategy.pool.memory_limit == 65536


@pytest.mark.parametrize("name", ["roundpipe", "RoundPipeAccelerator", "lightning_roundpipe.RoundPipeAccelerator"])
def test_accelerator_by_name(run_cli: Any, name: str) -> None:
    cli = run_cli({"strategy": "roundpipe", "accelerator": name, "devices": "auto"})
    assert cli.trainer.global_step == 3
    assert type(cli.trainer.accelerator) is RoundPipeAccelerator


def test_print_config(run_cli: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_cli({"strategy": BY_CLASS}, "--print_config")
    assert stopped.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    strategy = printed["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_roundpipe.RoundPipeStrategy"
    assert strategy["init_args"]["num_microbatches"] == 3
    assert strategy["init_args"]["round_size"] is None


def test_files_and_callback(run_cli: Any, tmp_path: Path) -> None:
    first = {"save_profile": str(tmp_path / "costs.json"), "trace": str(tmp_path / "trace.json")}
    callback = {
        "class_path": "lightning_roundpipe.RoundPipeTimeline",
        "init_args": {"path": str(tmp_path / "other.json"), "first_step": 1, "num_steps": 2},
    }
    strategy = {"class_path": "lightning_roundpipe.RoundPipeStrategy", "init_args": first}
    run_cli({"strategy": strategy, "callbacks": [callback]})
    assert {"costs.json", "trace.json", "other.json"} <= {path.name for path in tmp_path.iterdir()}
    strategy["init_args"] = {"cost_profile": str(tmp_path / "costs.json")}
    used = run_cli({"strategy": strategy}).trainer.strategy
    assert used.options.cost_profile == CostProfile.load(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("--trainer.strategy.help", "RoundPipeStrategy", ("cost_profile", "plan training steps by these costs")),
        ("--trainer.strategy.help", "RoundPipeStrategy", ("save_profile", "when ``fit`` ends", "trace", "perfetto")),
        ("--trainer.strategy.help", "RoundPipeStrategy", ("device_memory_limit", "24GiB", "virtual_copies")),
        ("--trainer.callbacks.help", "RoundPipeTimeline", ("picture", "lightning-roundpipe[plot]", "log_metrics")),
    ],
)
def test_help(
    run_cli: Any, capsys: pytest.CaptureFixture[str], name: str, arguments: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_cli({}, f"{name}=lightning_roundpipe.{arguments}")
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for word in words:
        assert word in shown


def test_wrong_option_is_named(run_cli: Any, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {**BY_CLASS, "init_args": {"num_microbatch": 3}}
    with pytest.raises(SystemExit) as stopped:
        run_cli({"strategy": wrong})
    assert stopped.value.code != 0
    assert "num_microbatch" in capsys.readouterr().err
