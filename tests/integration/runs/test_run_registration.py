"""Names, devices and options: what the Trainer accepts, and what it is told when it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_roundpipe import RoundPipeAccelerator, RoundPipeStrategy
from lightning_roundpipe.planning import CostProfile
from tests.support.parity import compare, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


def test_accelerator_alone_is_rejected() -> None:
    """``accelerator="roundpipe"`` leaves the choice of the strategy to Lightning, which knows nothing of pipelines."""
    if torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    with pytest.raises(MisconfigurationException, match="strategy='roundpipe'"):
        L.Trainer(accelerator="roundpipe", devices=1, **QUIET).fit(Small(), make_loader())


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("devices", ["auto", -1, "-1"])
def test_all_devices(devices: Any) -> None:
    trainer = L.Trainer(strategy="roundpipe", accelerator="roundpipe", devices=devices, **QUIET)
    assert len(trainer.strategy.pool) == RoundPipeAccelerator.auto_device_count() >= 1


# option: (value, type of the error, what the message must contain beside the option's name)
WRONG_OPTIONS: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("num_microbatches", 0, ValueError, ("0", "positive integer", "'auto'")),
    ("num_microbatches", 2.5, ValueError, ("2.5", "positive integer")),
    ("num_microbatches", True, ValueError, ("True", "positive integer")),
    ("num_microbatches", "4", ValueError, ("'4'", "'auto'")),
    ("round_size", 0, ValueError, ("0", "None")),
    ("threads_per_device", 0, ValueError, ("0", "None")),
    ("threads_per_device", 100000, ValueError, ("100000", "use at most", "None", "cores")),
    ("loss_weight", "tokens", ValueError, ("'tokens'", "'samples'", "'label_tokens'", "function")),
    ("split_batch", "rows", TypeError, ("'rows'", "function", "or 'packed'")),
    ("units", "Linear", TypeError, ("'Linear'", "list")),
    ("units", [], TypeError, ("[]", "non-empty")),
    ("units", [torch.nn.Linear(1, 1)], TypeError, ("Linear(", "class")),
    ("units", torch.nn.Linear, TypeError, ("Linear", "list")),
    ("device_memory_limit", 24, ValueError, ("24 bytes", "'24GiB'")),
    ("device_memory_limit", "24", ValueError, ("'24'", "unit", "24GiB")),
    ("device_memory_limit", "24Gb", ValueError, ("'24Gb'", "bits")),
    ("device_memory_limit", 24.0, TypeError, ("24.0", "'24GiB'", "None")),
    ("device_memory_limit", True, TypeError, ("True", "'24GiB'")),
    ("virtual_copies", 25.0, TypeError, ("25.0", "True", "VirtualLink(gb_per_s=")),
    ("compile_units", "inductor", TypeError, ("'inductor'", "True", "dict of arguments of torch.compile")),
    ("compile_units", {"fullgraph": False}, ValueError, ("fullgraph cannot be given", "backend, dynamic, mode")),
    ("compile_units", {"mode": "reduce-overhead"}, ValueError, ("CUDA graphs", "'max-autotune-no-cudagraphs'")),
    ("compile_units", {"options": {"triton.cudagraphs": True}}, ValueError, ("CUDA graphs",)),
    ("compile_units", {"options": 5}, TypeError, ("options must be a dict",)),
    ("compile_units", {"dynamic": "x"}, TypeError, ("dynamic must be True, False or None",)),
    ("compile_units", {"mode": "default", "options": {"a": 1}}, ValueError, ("either mode or options",)),
    ("cost_profile", 3, TypeError, ("3", "CostProfile")),
    ("cost_profile", "missing.json", ValueError, ("'missing.json'", "No such file", "save_profile")),
    ("save_profile", "missing/costs.json", ValueError, ("'missing/costs.json'", "no folder 'missing'")),
    ("save_profile", ".", ValueError, ("'.'", "is a folder")),
    ("save_profile", True, TypeError, ("True", "path")),
    ("trace", "missing/trace.json", ValueError, ("'missing/trace.json'", "no folder 'missing'")),
    ("optimizer_overlap", "late", ValueError, ("'late'", "'exact', 'off', 'stale'")),
    ("stale_after_steps", -1, ValueError, ("-1", "an integer >= 0")),
    ("stale_after_steps", 10, ValueError, ("10", "with optimizer_overlap='stale' alone")),
]


@compat(
    "Misuse",
    "options of a wrong type, or that contradict each other",
    status="refused",
    note="The error comes with the strategy.",
)
@pytest.mark.parametrize(("option", "value", "kind", "parts"), WRONG_OPTIONS)
def test_wrong_options_name_option_value_and_remedy(
    option: str, value: Any, kind: type[Exception], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        RoundPipeStrategy(**{option: value})
    for part in (option, *parts):
        assert part in str(caught.value)


def test_given_costs_are_not_saved_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"save_profile='.*costs\.json'.*cost_profile.*give one of the two"):
        RoundPipeStrategy(cost_profile=CostProfile(()), save_profile=tmp_path / "costs.json")


class Linears(torch.nn.Linear):
    """Of no model."""


@pytest.mark.parametrize(
    ("units", "match"),
    [
        (["DecoderLayer"], r"units='DecoderLayer': no module of this class in Small\. Classes .* there: Linear, Sequ"),
        (["Linear", "Linera"], r"units='Linera'.*Did you mean 'Linear'\? Classes"),
        (["Tahn"], r"units='Tahn'.*Did you mean 'Tanh'"),
        ([Linears], r"units='Linears'.*Did you mean 'Linear'"),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("run", ["fit", "validate"])
def test_unknown_unit_classes_are_found_before_the_run(units: Any, match: str, run: str) -> None:
    class Counts(Small):
        num_hooks = 0

        def on_fit_start(self) -> None:
            self.num_hooks += 1

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.num_hooks += 1

    module = Counts()
    with pytest.raises(ValueError, match=match.replace("Small", "Counts")):
        getattr(make_trainer(options={"units": units}), run)(module, make_loader())
    assert module.num_hooks == 0


@pytest.mark.parametrize("units", [["Linear"], [torch.nn.Sequential]])
def test_chosen_units(units: Any) -> None:
    compare(Small, ours={"options": {"units": units}})


def test_arguments_of_torch_compile() -> None:
    assert RoundPipeStrategy().options.compile_arguments is None
    assert RoundPipeStrategy(compile_units=True).options.compile_arguments == {}
    given = {"mode": "max-autotune-no-cudagraphs", "dynamic": True}
    assert RoundPipeStrategy(compile_units=given).options.compile_arguments == given


def test_an_unknown_backend_of_torch_compile_is_an_error() -> None:
    trainer = make_trainer(options={"compile_units": {"backend": "nonsense"}})
    with pytest.raises(RuntimeError, match="nonsense"):
        trainer.fit(Small(), make_loader())


def test_fp16_on_gpus_keeps_the_scaler_of_the_user() -> None:
    """What ``precision="16-mixed"`` on GPUs comes to, without a GPU at hand."""
    strategy = RoundPipeStrategy()
    strategy.parallel_devices = [torch.device("cuda", 0)]
    plugin = MixedPrecision("16-mixed", "cuda", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    strategy.precision_plugin = plugin
    strategy._configure_launcher()
    assert strategy.precision_plugin is plugin
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 4.0


def test_foreign_devices_are_rejected() -> None:
    strategy = RoundPipeStrategy()
    strategy.parallel_devices = [torch.device("meta")]
    with pytest.raises(ValueError, match=r"meta.*streams, events"):
        _ = strategy.pool


def test_devices_of_different_types_are_rejected() -> None:
    strategy = RoundPipeStrategy()
    strategy.parallel_devices = [torch.device("cpu"), torch.device("meta")]
    with pytest.raises(ValueError, match="different types: cpu, meta"):
        _ = strategy.pool
