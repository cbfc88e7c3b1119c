"""LightningCLI, and the command ``roundpipe-lightning``: everything from YAML, with the results of plain Lightning."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning_utilities.core.imports import RequirementCache

from lightning_roundpipe import RoundPipeStrategy, VirtualLink, lightning_cli
from lightning_roundpipe.options import LOSS_WEIGHTS
from lightning_roundpipe.planning import CostProfile
from tests.support.forks import Forks
from tests.support.parity import assert_alike
from tests.support.rows import compat

ROOT = Path(__file__).resolve().parents[3]

# What a user has in the current folder. It does not import lightning_roundpipe.
PROJECT = '''
import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    """Some blocks.

    Args:
        num_blocks: how many.
        classes: what it can tell apart.
    """

    def __init__(self, num_blocks: int = 3, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(num_blocks)))
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 8, rows: int = 20) -> None:
        super().__init__()
        self.batch_size, self.rows = batch_size, rows

    def train_dataloader(self):
        g = torch.Generator().manual_seed(self.rows)
        x, y = torch.randn(self.rows, 6, generator=g), torch.randint(3, (self.rows,), generator=g)
        return DataLoader(TensorDataset(x, y), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Writer(L.pytorch.callbacks.BasePredictionWriter):
    def __init__(self, path: str) -> None:
        super().__init__("epoch")
        self.path = path

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices) -> None:
        torch.save(predictions, self.path)
'''

BY_CLASS = {"class_path": "lightning_roundpipe.RoundPipeStrategy", "init_args": {"num_microbatches": 3}}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of a user, which is the current one; the name of the module in it."""
    name = f"project_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["roundpipe-lightning"])
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything writes them; this puts them back
        monkeypatch.setenv(variable, "0")
    return name


@pytest.fixture
def config(project: str, tmp_path: Path) -> Callable[..., Path]:
    """Writes a configuration with some of its sections changed."""

    def write(trainer: dict[str, Any] | None = None, **sections: Any) -> Path:
        logger = {
            "class_path": "CSVLogger",
            "init_args": {"save_dir": str(tmp_path / "logs"), "name": "", "version": ""},
        }
        quiet = {
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": logger,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "default_root_dir": str(tmp_path),
        }
        content = {
            "seed_everything": 1,
            "trainer": {**quiet, **(trainer or {})},
            "model": {"class_path": f"{project}.Net"},
            "data": {"class_path": f"{project}.Data"},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}},
            **sections,
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return path

    return write


def run_all(config: Callable[..., Path], project: str, folder: Path, trainer: dict[str, Any]) -> dict[str, Any]:
    """``fit``, ``validate``, ``test`` and ``predict`` by the command; what they left behind."""
    folder.mkdir()
    writer = {"class_path": f"{project}.Writer", "init_args": {"path": str(folder / "predictions.pt")}}
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": "", "version": "logs"}}
    own = {"logger": logger, "callbacks": [writer], **trainer}
    schedule = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.5}}
    assert lightning_cli.main(["fit", "-c", str(config(own, lr_scheduler=schedule))]) == 0
    (checkpoint,) = folder.rglob("*.ckpt")
    metrics = {"fit": (folder / "logs" / "metrics.csv").read_text()}
    for command in ("validate", "test", "predict"):
        logger["init_args"]["version"] = command
        evaluated = str(config(own, optimizer=None))
        assert lightning_cli.main([command, "-c", evaluated, f"--ckpt_path={checkpoint}"]) == 0
        if command != "predict":
            metrics[command] = (folder / command / "metrics.csv").read_text()
    content = torch.load(checkpoint, weights_only=False)
    return {
        "metrics": {name: numbers_of(text) for name, text in metrics.items()},
        "weights": dict(content["state_dict"]),
        "optimizer": content["optimizer_states"],
        "scheduler": content["lr_schedulers"],
        "predictions": torch.load(folder / "predictions.pt"),
    }


def numbers_of(table: str) -> list[Any]:
    return [[float(x) if re.fullmatch(r"[-+.\de]+", x) else x for x in line.split(",")] for line in table.splitlines()]


@compat(
    "LightningCLI",
    "`fit`, `validate`, `test`, `predict` from YAML; `strategy: roundpipe`, without an import of the package; "
    "subclass mode: model and data by `class_path`; `optimizer` and `lr_scheduler` from YAML; "
    "command `roundpipe-lightning`",
)
@pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_all_commands_from_yaml(config: Any, project: str, tmp_path: Path) -> None:
    plain = run_all(config, project, tmp_path / "plain", {"strategy": "auto", "devices": 1})
    assert plain["scheduler"][0]["last_epoch"] == 2
    assert len(plain["metrics"]["fit"]) == 1 + 2 * 5
    assert_alike(run_all(config, project, tmp_path / "ours", {"strategy": "roundpipe", "devices": 2}), plain)


def instantiate(config: Path, *arguments: str) -> LightningCLI:
    """Everything is made, and nothing is run."""
    return LightningCLI(save_config_callback=None, args=["--config", str(config), *arguments], run=False)


@compat(
    "LightningCLI",
    "`run=False`; options of the strategy on the command line (`--trainer.strategy.num_microbatches=4`); "
    "`VirtualLink`, sizes with units, names of `loss_weight`, classes of `units`",
)
def test_options_of_the_strategy(config: Any, project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.getcwd())
    option = "--trainer.strategy."
    link = {"class_path": "lightning_roundpipe.VirtualLink", "init_args": {"gb_per_s": 2.5, "latency_us": 1}}
    in_yaml = {
        "num_microbatches": "auto",
        "device_memory_limit": "64 MiB",
        "virtual_copies": link,
        "units": ["torch.nn.Linear", "Tanh"],
        "loss_weight": "label_tokens",
        "compile_units": {"backend": "eager"},
    }
    strategy = {"class_path": "lightning_roundpipe.RoundPipeStrategy", "init_args": in_yaml}
    cli = instantiate(
        config({"strategy": strategy}),
        f"{option}num_microbatches=4",
        f"{option}round_size=3",
        f"{option}threads_per_device=1",
        f"{option}split_batch=torch.chunk",
    )
    assert type(cli.model).__name__ == "Net"
    options = cli.trainer.strategy.options
    assert (options.num_microbatches, options.round_size, options.threads_per_device) == (4, 3, 1)
    assert options.device_memory_bytes == 64 * 2**20
    assert options.virtual_copies == VirtualLink(gb_per_s=2.5, latency_us=1.0)
    assert options.units == [torch.nn.Linear, "Tanh"]
    assert options.split_batch is torch.chunk
    assert options.compile_arguments == {"backend": "eager"}
    allowed = get_args(get_type_hints(RoundPipeStrategy.__init__)["loss_weight"])
    assert set(LOSS_WEIGHTS) == {name for names in map(get_args, allowed) for name in names if isinstance(name, str)}
    others = (f"{option}loss_weight=sum", f"{option}device_memory_limit=70000", f"{option}split_batch=packed")
    options = instantiate(config({"strategy": BY_CLASS}), *others).trainer.strategy.options
    assert (options.loss_weight, options.device_memory_bytes, options.split_batch) == ("sum", 70000, "packed")


@compat("LightningCLI", "`--trainer.strategy` and `--trainer.accelerator` by the name or path of the class, no options")
@pytest.mark.parametrize(("path", "separate"), [("", False), ("lightning_roundpipe.", True)], ids=["name", "path"])
def test_classes_without_options(config: Any, project: str, path: str, separate: bool) -> None:
    sys.path.insert(0, os.getcwd())
    given = {"strategy": f"{path}RoundPipeStrategy", "accelerator": f"{path}RoundPipeAccelerator"}
    pairs = [(f"--trainer.{name}", value) for name, value in given.items()]
    arguments = [part for pair in pairs for part in (pair if separate else ["=".join(pair)])]
    cli = instantiate(config({"devices": 2, "max_epochs": 1}), *arguments)
    cli.trainer.fit(cli.model, cli.datamodule)
    assert type(cli.trainer.strategy) is RoundPipeStrategy
    assert len(cli.trainer.strategy.pool) == 2
    assert cli.config["trainer"]["accelerator"] == given["accelerator"]


# What the parser refuses; the strategy refuses values by itself.
WRONG = {
    "num_microbatches=four": ("num_microbatches", "<class 'int'>", "'auto'", "four"),
    "loss_weight=tokens": ("loss_weight", "'causal_label_tokens'", "tokens"),
    "split_batch=no.such.function": ("split_batch", "no.such.function"),
    "num_microbatch=3": ("num_microbatch",),
}


@compat("LightningCLI", "wrong options", "refused", "The error names the option, the value and what is allowed.")
def test_wrong_options(config: Any, project: str, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, os.getcwd())
    path = config({"strategy": BY_CLASS})
    for argument, words in WRONG.items():
        with pytest.raises(SystemExit) as stopped:
            instantiate(path, f"--trainer.strategy.{argument}")
        assert stopped.value.code == 2
        shown = capsys.readouterr().err
        for word in words:
            assert word in shown, argument


@compat("LightningCLI", "help of the strategy: type and explanation of every option")
def test_help(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help of each option: its name, what the docstring says, its type and default."""
    with pytest.raises(SystemExit) as stopped:
        lightning_cli.main(["fit", "--trainer.strategy.help=lightning_roundpipe.RoundPipeStrategy"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    names = list(inspect.signature(RoundPipeStrategy).parameters)
    assert len(names) >= 15
    # What stands for the value is the name, or the choices there are; Python 3.13 says it once for both spellings.
    values = {name: rf"--trainer\.strategy\.{name}(?:, \S+)? ({name.upper()}|{{[^}}]*}})" for name in names}
    starts = [[found.start() for found in re.finditer(values[name], shown)][-1] for name in names]
    for name, start in zip(names, starts, strict=True):
        ends = [other for other in starts if other > start]
        entry = shown[start : min(ends, default=None)]
        explanation, found, rest = re.sub(values[name], "", entry, count=1).partition("(type: ")
        assert len(explanation.split()) >= 4, f"{name} is not explained: {entry}"
        assert found, f"{name} has no type: {entry}"
        assert "default: " in rest, entry


@compat("LightningCLI", "`strategy: {class_path: ..., init_args: ...}`; `--print_config`; `SaveConfigCallback`")
def test_configurations_can_be_read_again(
    config: Any, project: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that is printed, from which a run is made that writes files; and the one that this run saves."""
    timeline = {"path": str(tmp_path / "other.json"), "first_step": 1, "num_steps": 2}
    callback = {"class_path": "lightning_roundpipe.RoundPipeTimeline", "init_args": timeline}
    path = str(config({"devices": 2, "max_epochs": 1, "callbacks": [callback]}))
    values = ["num_microbatches=3", "virtual_copies.gb_per_s=50", "save_profile=costs.json", "trace=trace.json"]
    arguments = [f"--trainer.strategy.{value}" for value in values]
    with pytest.raises(SystemExit) as stopped:
        lightning_cli.main(["fit", "-c", path, *arguments, "--print_config"])
    assert stopped.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    strategy = yaml.safe_load(printed.read_text())["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_roundpipe.RoundPipeStrategy"
    assert strategy["init_args"]["num_microbatches"] == 3
    assert strategy["init_args"]["virtual_copies"] == {"gb_per_s": 50.0, "latency_us": 10.0}

    assert lightning_cli.main(["fit", "-c", str(printed)]) == 0
    assert {"costs.json", "trace.json", "other.json"} <= {path.name for path in tmp_path.iterdir()}
    cli = instantiate(config({"strategy": BY_CLASS}), "--trainer.strategy.cost_profile=costs.json")
    assert cli.trainer.strategy.options.cost_profile == CostProfile.load("costs.json")
    saved = tmp_path / "logs" / "config.yaml"
    assert yaml.safe_load(saved.read_text()) == yaml.safe_load(printed.read_text())
    with pytest.raises(SystemExit):
        lightning_cli.main(["fit", "-c", str(saved), "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(printed.read_text())


@compat("LightningCLI", "`link_arguments`, `subclass_mode_model`, `subclass_mode_data`")
def test_linked_arguments(config: Any, project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.getcwd())
    classes = importlib.import_module(project)

    class Linked(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.link_arguments("data.init_args.rows", "model.init_args.classes")

    path = config({"strategy": "roundpipe", "devices": 2, "max_epochs": 1, "logger": False}, optimizer=None)
    cli = Linked(
        classes.Net,
        classes.Data,
        subclass_mode_model=True,
        subclass_mode_data=True,
        args=["fit", "-c", str(path), "--data.rows=9", "--optimizer=Adam"],
        save_config_callback=None,
    )
    assert cli.model.head.out_features == cli.datamodule.rows == 9
    assert cli.trainer.global_step == 2
    assert isinstance(cli.trainer.strategy, RoundPipeStrategy)


@compat("LightningCLI", "command `roundpipe-lightning` (modules of the current folder)")
def test_the_command_in_a_process_of_its_own(forks: Forks, tmp_path: Path) -> None:
    """The files and the command of docs/how-to/lightning-cli.md."""
    page = (ROOT / "docs" / "how-to/lightning-cli.md").read_text(encoding="utf-8")
    files = re.findall(r'```\w+ title="(.+?)"\n(.*?)```', page, flags=re.DOTALL)
    assert [name for name, _ in files] == ["mynet.py", "config.yaml"]
    for name, content in files:
        (tmp_path / name).write_text(content, encoding="utf-8")
    command = next(line for line in page.splitlines() if line.startswith("$ roundpipe-lightning fit -c config.yaml"))
    # What an installer makes of [project.scripts]. The current folder is not on its path: only its own is.
    script = tmp_path / "bin" / "roundpipe-lightning"
    script.parent.mkdir()
    script.write_text("import sys\nfrom lightning_roundpipe.lightning_cli import main\nsys.exit(main())\n")
    printed = forks.run(script, *command.split()[2:], "--trainer.max_epochs=1", folder=tmp_path)
    assert "`Trainer.fit` stopped: `max_epochs=1` reached" in printed
    (saved,) = tmp_path.rglob("lightning_logs/*/config.yaml")
    assert yaml.safe_load(saved.read_text())["trainer"]["strategy"] == "roundpipe"


def test_options_on_the_page_of_the_docs(project: str, tmp_path: Path, config: Any) -> None:
    page = (ROOT / "docs" / "how-to/lightning-cli.md").read_text(encoding="utf-8")
    (options,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    sys.path.insert(0, str(tmp_path))
    cli = instantiate(config(yaml.safe_load(options)["trainer"]), "--trainer.strategy.compile_units.mode=default")
    made = cli.trainer.strategy.options
    assert made.units == [torch.nn.TransformerEncoderLayer]
    assert (made.num_microbatches, made.loss_weight, made.device_memory_bytes) == (16, "label_tokens", 20 * 2**30)
    assert made.compile_arguments == {"mode": "default"}


@compat("LightningCLI", "jsonargparse is not installed", "refused", "The error says what to install.")
def test_missing_parser(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lightning_cli, "_PARSER", RequirementCache("jsonargparse>=999"))
    assert lightning_cli.main(["fit"]) == 2
    assert "pip install 'lightning-roundpipe[cli]'" in capsys.readouterr().err
