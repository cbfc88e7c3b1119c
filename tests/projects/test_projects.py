"""Two complete projects, by plain Lightning and here: the same sources, only arguments of the trainer differ.

Neither project knows of RoundPipe. Dropout is switched off for the comparison by an option of the project, and the GAN
gets its latent vectors with the batch, because random numbers that a step draws are not those of plain Lightning
(docs/explanation/limits.md).

[Note: what the order of summation allows]
Micro-batches add up the same terms in another order, and so does plain Lightning when the rows of every batch come in
reverse order. A second plain run does just that. The largest relative deviation between the two plain runs, times
``ROOM``, is what a run here may deviate: ``ROOM`` because one other order is one draw, and there are several here. The
deviation of a tensor is the largest of its entries, relative to its largest entry.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor

from lightning_roundpipe import RoundPipeStrategy
from tests.projects.gan import main as gan
from tests.projects.gan.data import Drawings
from tests.projects.summarisation import main as summarisation
from tests.projects.summarisation.data import DocstringData
from tests.support.rows import compat

FOLDER = Path(__file__).parent
ROOM = 8.0
# What the deviation of the two plain runs is at most, or the comparison would say little.
LARGEST_DEVIATION = 1e-4
SMALLEST_DEVIATION = torch.finfo(torch.float32).eps


@dataclass
class Outcome:
    """What a run left behind: figures of the log by row, checkpoints by name, weights, and other files."""

    log: list[dict[str, str]]
    checkpoints: dict[str, Any]
    weights: dict[str, Tensor]
    files: dict[str, bytes]
    trainer: L.Trainer


def read_outcome(folder: Path, trainer: L.Trainer) -> Outcome:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    (log,) = (text for name, text in files.items() if name.endswith("metrics.csv"))
    checkpoints = {
        name: torch.load(io.BytesIO(content), weights_only=False)
        for name, content in files.items()
        if name.endswith(".ckpt")
    }
    weights = {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}
    rows = list(csv.DictReader(io.StringIO(log.decode())))
    others = {name: text for name, text in files.items() if not name.endswith(("metrics.csv", ".ckpt"))}
    return Outcome(rows, checkpoints, weights, others, trainer)


# Running the projects ------------------------------------------------------------------------------------------------


def run_summarisation(*trainer: str) -> L.Trainer:
    """By the command line, with the configuration file of the project and little data."""
    smaller = ["--data.limit=60", "--data.vocab_size=384"]
    arguments = ["--config", str(FOLDER / "summarisation" / "config.yaml"), "--model.dropout=0", *smaller]
    return summarisation.main(["fit", *arguments, *trainer]).trainer


def run_gan(**trainer: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, **quiet, **trainer}
    return gan.train(num_images=28, batch_size=8, **settings)


def strategy_arguments(devices: int, **options: Any) -> list[str]:
    start = "--trainer.strategy"
    settings = [f"{start}.{name}={value}" for name, value in options.items()]
    return [f"--trainer.devices={devices}", f"{start}=lightning_roundpipe.RoundPipeStrategy", *settings]


RUNS: dict[str, dict[str, Callable[[], L.Trainer]]] = {
    "summarisation": {
        "plain": run_summarisation,
        # The loss is a mean over the tokens of all labels: see docs/explanation/exactness.md.
        "2 devices": lambda: run_summarisation(*strategy_arguments(2, num_microbatches=3, loss_weight="label_tokens")),
    },
    "gan": {
        "plain": run_gan,
        "2 devices": lambda: run_gan(strategy="roundpipe", devices=2),
        "3 devices": lambda: run_gan(strategy=RoundPipeStrategy(num_microbatches=3, virtual_copies=True), devices=3),
    },
}


def reverse_rows(self: Any, batch: Any, dataloader_idx: int) -> Any:
    return type(batch)({name: value.flip(0) for name, value in batch.items()})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Outcome]]:
    """Runs a project in a folder of its own; the result of a run is kept for the tests that follow."""
    known: dict[tuple[str, str], Outcome] = {}

    def get(project: str, kind: str) -> Outcome:
        if project == "summarisation" and not hasattr(L.pytorch.callbacks, "EMAWeightAveraging"):
            pytest.skip("the project needs Lightning 2.6: EMAWeightAveraging")
        if (project, kind) not in known:
            folder = tmp_path_factory.mktemp(project)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                patch.setattr("sys.argv", ["main.py"])
                if kind == "reversed":
                    for data in (DocstringData, Drawings):
                        patch.setattr(data, "on_after_batch_transfer", reverse_rows)
                torch.set_num_threads(1)
                trainer = RUNS[project]["plain" if kind == "reversed" else kind]()
                known[project, kind] = read_outcome(folder, trainer)
        return known[project, kind]

    yield get
    known.clear()


# Comparing them ------------------------------------------------------------------------------------------------------


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from leaves(entry, f"{path}/{index}")
    else:
        yield path, value


def figures_and_facts(outcome: Outcome) -> tuple[dict[str, Any], dict[str, Any]]:
    """What may deviate (floating-point numbers and tensors), and what must be equal, both by name and in order."""
    figures: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for index, row in enumerate(outcome.log):
        for name, text in row.items():
            is_figure = text != "" and name not in ("epoch", "step")
            (figures if is_figure else facts)[f"row {index}/{name}"] = float(text) if is_figure else text
    for name, value in leaves({"checkpoints": outcome.checkpoints, "weights": outcome.weights}, ""):
        is_figure = isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
        is_whole = isinstance(value, Tensor) and not is_figure
        (figures if is_figure else facts)[name] = value.tolist() if is_whole else value
    return figures, facts


def deviation(left: Any, right: Any) -> float:
    """See [Note: what the order of summation allows]."""
    left, right = (torch.as_tensor(value, dtype=torch.float64) for value in (left, right))
    if torch.equal(left, right):
        return 0.0
    assert left.shape == right.shape
    found = float((left - right).abs().max() / right.abs().max())
    return math.inf if math.isnan(found) else found


def largest_deviation(left: Outcome, right: Outcome) -> tuple[float, str]:
    """Also the name of the figure; everything that is no floating-point number is equal."""
    (ours, our_facts), (theirs, their_facts) = figures_and_facts(left), figures_and_facts(right)
    assert list(our_facts.items()) == list(their_facts.items())
    assert list(ours) == list(theirs)
    return max((deviation(ours[name], value), name) for name, value in theirs.items())


def allowed_deviation(reordered: Outcome, plain: Outcome) -> float:
    """See [Note: what the order of summation allows]."""
    noise, name = largest_deviation(reordered, plain)
    assert 0.0 < noise < LARGEST_DEVIATION, name
    return ROOM * max(noise, SMALLEST_DEVIATION)


def assert_same_files(ours: Outcome, plain: Outcome) -> None:
    """Texts are equal, but for the settings of the trainer; grey values differ by a rounding at most."""
    assert list(ours.files) == list(plain.files)
    for name, expected in plain.files.items():
        if name.endswith(".pgm"):
            assert len(ours.files[name]) == len(expected)
            assert max(abs(a - b) for a, b in zip(ours.files[name], expected, strict=True)) <= 1, name
        elif not name.endswith("config.yaml"):
            assert ours.files[name] == expected, name


PROJECTS = [
    pytest.param(
        "summarisation",
        "2 devices",
        marks=[
            compat("Library", "transformers encoder-decoder models (generate in validation_step, warm-up schedule)"),
            compat("LightningCLI", "link_arguments, after_fit"),
        ],
    ),
    pytest.param("gan", "2 devices", marks=compat("Library", "GAN (two optimizers, schedulers and clipping by hand)")),
    ("gan", "3 devices"),
]


@pytest.mark.parametrize(("project", "devices"), PROJECTS)
def test_same_as_plain_lightning(run: Callable[..., Outcome], project: str, devices: str) -> None:
    plain, ours = run(project, "plain"), run(project, devices)
    allowed = allowed_deviation(run(project, "reversed"), plain)
    found, name = largest_deviation(ours, plain)
    assert found <= allowed, name
    assert_same_files(ours, plain)
    strategy = ours.trainer.strategy
    assert isinstance(strategy, RoundPipeStrategy)
    assert len(strategy.pool) == int(devices[0])
    assert strategy.last_step is not None
    assert strategy.last_step.num_microbatches > 1


def test_only_arguments_of_the_trainer_differ(run: Callable[..., Outcome]) -> None:
    settings = []
    for kind in ("plain", "2 devices"):
        (text,) = (text for name, text in run("summarisation", kind).files.items() if name.endswith("config.yaml"))
        settings.append(yaml.safe_load(text))
    changed = {name for name, value in settings[1]["trainer"].items() if settings[0]["trainer"][name] != value}
    assert changed == {"devices", "strategy"}
    assert {**settings[0], "trainer": None} == {**settings[1], "trainer": None}


def test_the_projects_do_what_they_are_to_show(run: Callable[..., Outcome]) -> None:
    """Or equal runs would prove less than they seem to."""
    plain = run("summarisation", "plain")
    assert plain.trainer.current_epoch < plain.trainer.max_epochs, "nothing was stopped early"
    scores = [float(row["val_rouge_l"]) for row in plain.log if row["val_rouge_l"]]
    assert len(set(scores)) > 1
    assert len(plain.checkpoints) == 3  # the best two and the last one
    (report,) = (json.loads(text) for name, text in plain.files.items() if name.endswith("summaries.json"))
    assert len({entry["written"] for entry in report}) > 1

    plain = run("gan", "plain")
    first, last = (plain.checkpoints[f"runs/gan/version_0/checkpoints/epoch={epoch}.ckpt"] for epoch in (0, 1))
    assert all(
        (value != last["state_dict"][name]).any() for name, value in first["state_dict"].items() if "layers" in name
    )
    rates = {name: {row[name] for row in plain.log if row[name]} for name in ("generator_lr", "discriminator_lr")}
    assert [len(values) for values in rates.values()] == [2, 8]


@compat("Migration", "checkpoints of manual optimization, both ways")
def test_the_gan_goes_on_from_checkpoints_of_either(
    run: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = allowed_deviation(run("gan", "reversed"), run("gan", "plain"))
    outcomes = []
    for number, (written_by, devices) in enumerate([("plain", 1), ("2 devices", 1), ("plain", 2)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        checkpoints = run("gan", written_by).checkpoints
        torch.save(checkpoints["runs/gan/version_0/checkpoints/last.ckpt"], folder / "start.ckpt")
        arguments = {"strategy": "roundpipe"} if devices > 1 else {}
        trainer = run_gan(resume="start.ckpt", devices=devices, max_epochs=3, **arguments)
        (folder / "start.ckpt").unlink()
        outcomes.append(read_outcome(folder, trainer))
    for outcome in outcomes[1:]:
        found, name = largest_deviation(outcome, outcomes[0])
        assert found <= allowed, name
        assert_same_files(outcome, outcomes[0])


@pytest.mark.parametrize("project", ["summarisation", "gan"])
def test_the_sources_know_nothing_of_this_strategy(project: str) -> None:
    files = [path for path in (FOLDER / project).iterdir() if path.suffix in (".py", ".yaml")]
    assert len(files) >= 5
    assert [path.name for path in files if "roundpipe" in path.read_text(encoding="utf-8").lower()] == []
