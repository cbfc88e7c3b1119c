"""Costs from and to files: ``save_profile`` writes what a fit has measured, ``cost_profile`` plans by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_roundpipe import RoundPipeStrategy, VirtualLink
from lightning_roundpipe.cli import main
from lightning_roundpipe.engine.runner import Engine
from lightning_roundpipe.planning import CallCost, CostProfile, DeviceTraits, Machine, plan_training
from lightning_roundpipe.reporting.tracing import Recordings
from tests.support.parity import compare, make_loader, make_trainer
from tests.support.small import Small

NAMES = ["body.0.0", "body.1.0", "body.2.0", "body.3.0", "head"]


LINEAR = {"units": ["Linear"]}


def profile_of(*forward_ms: float) -> CostProfile:
    return CostProfile(tuple(CallCost(name, ms, 2 * ms) for name, ms in zip(NAMES, forward_ms, strict=True)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    make_trainer(options={**LINEAR, "save_profile": path}, max_epochs=2).fit(Small(), make_loader())
    return path


def test_saved_after_fit(saved: Path) -> None:
    profile = CostProfile.load(saved)
    assert [call.name for call in profile.calls] == NAMES
    modules = dict(Small().named_modules())
    for call in profile.calls:
        assert call.forward_ms > 0
        weights = sum(p.numel() * p.element_size() for p in modules[call.name].parameters())
        assert (call.weight_bytes, call.gradient_bytes) == (weights, weights)
    assert max(call.backward_ms for call in profile.calls) > 0


def test_the_machine_is_saved_beside_the_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, link = tmp_path / "costs.json", VirtualLink(1000.0, 3.0)
    options = {**LINEAR, "save_profile": path, "virtual_copies": link, "device_memory_limit": "1MiB"}
    make_trainer(options=options).fit(Small(), make_loader())
    arguments = ["--devices", "2", "--microbatches", "3", "--json"]
    assert main(["plan", "--profile", str(path), "--machine", str(path), *arguments]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert (machine["num_devices"], machine["device_memory_bytes"]) == (2, 2**20)
    assert (machine["h2d_bytes_per_ms"], machine["transfer_latency_ms"]) == (link.bytes_per_ms, link.latency_ms)


def test_devices_that_differ_are_saved_as_json_that_others_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON has no word for a link without limit: what is unlimited stays away."""
    path = tmp_path / "costs.json"
    differ = Machine(2, devices=(DeviceTraits(2.0), DeviceTraits(1.0)))
    engine = SimpleNamespace(machine=differ, costs=lambda kind: profile_of(1, 1, 5, 1, 1))
    Recordings(None, path).finish(cast(Engine, engine))
    written = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert [device["speed"] for device in written["machine"]["devices"]] == [2.0, 1.0]
    arguments = ["--devices", "2", "--microbatches", "3", "--json"]
    assert main(["plan", "--profile", str(path), "--machine", str(path), *arguments]) == 0
    devices = json.loads(capsys.readouterr().out)["machine"]["devices"]
    assert [(device["speed"], device["h2d_bytes_per_ms"]) for device in devices] == [(2.0, None), (1.0, None)]


def test_saved_profile_is_planned_by(saved: Path) -> None:
    _, ours = compare(Small, ours={"options": {**LINEAR, "cost_profile": str(saved)}}, max_epochs=2)
    assert ours.trainer.strategy.options.cost_profile == CostProfile.load(saved)


def test_plans_are_made_from_it(tmp_path: Path) -> None:
    """Twelve steps with measured costs, which would give other plans, change nothing."""
    path = tmp_path / "costs.json"
    for costs, given in [((1, 1, 5, 1, 1), profile_of(1, 1, 5, 1, 1)), ((1, 1, 1, 5, 5), path)]:
        profile = profile_of(*costs)
        profile.save(path)
        trainer = make_trainer(options={**LINEAR, "cost_profile": given}, max_epochs=4)
        trainer.fit(Small(), make_loader())
        expected = plan_training(profile, Machine(2), num_microbatches=3, round_size=4).partition
        assert len({stage.kind for stage in expected.stages}) == 3
        assert trainer.strategy.last_step.partition == expected


def test_profile_of_another_model() -> None:
    profile = profile_of(1, 1, 1, 1, 1)
    short = CostProfile(profile.calls[1:])
    with pytest.raises(ValueError, match=r"has 4 calls and a micro-batch made 5: call 0 is 'body.0.0'"):
        make_trainer(options={**LINEAR, "cost_profile": short}).fit(Small(), make_loader())
    other = CostProfile((*profile.calls[:4], replace(profile.calls[4], name="tail")))
    with pytest.raises(ValueError, match=r"call 4 is 'head', the profile has 'tail'"):
        make_trainer(options={**LINEAR, "cost_profile": other}).fit(Small(), make_loader())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            None,
            r"cost_profile='.*costs\.json' cannot be used: .*No such file.*: '.*'\. Such a file is written by",
        ),
        ("stages", r"cost_profile='.*costs\.json' cannot be used: .*not JSON"),
        ('{"version": 1, "calls": [{"name": "a"}]}', r"costs\.json.*calls\[0\].*lacks"),
    ],
)
def test_bad_files_fail_at_once(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        RoundPipeStrategy(cost_profile=path)


@pytest.mark.parametrize(
    ("error", "raised", "step"),
    [(RuntimeError, RuntimeError, 0), (RuntimeError, RuntimeError, 2), (KeyboardInterrupt, SystemExit, 2)],
)
def test_saved_when_training_fails(
    tmp_path: Path, error: type[BaseException], raised: type[BaseException], step: int
) -> None:
    class Fails(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == step:
                raise error("no more")
            return super().training_step(batch, batch_idx)

    path = tmp_path / "costs.json"
    with pytest.raises(raised):
        make_trainer(options={**LINEAR, "save_profile": path}).fit(Fails(), make_loader())
    assert path.exists() == (step > 0), "written if anything was measured"
    if step:
        assert [call.name for call in CostProfile.load(path).calls] == NAMES


def test_evaluation_saves_nothing(tmp_path: Path) -> None:
    class Validates(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    path = tmp_path / "costs.json"
    make_trainer(options={"save_profile": path}).validate(Validates(), make_loader(), verbose=False)
    assert not path.exists()
