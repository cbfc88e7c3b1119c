"""What a run needs on the host: compared with what torch really allocates, with what there is, and told to the user."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from lightning_roundpipe.planning import CallCost, CostProfile, Partition, Stage, StageKind, StepPlan
from lightning_roundpipe.reporting import host_report
from lightning_roundpipe.reporting.host_memory import (
    HostMemory,
    allocated_bytes,
    model_memory,
    optimizer_state_bytes,
)
from lightning_roundpipe.reporting.host_report import HostReport

MIB = 2**20


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[2].requires_grad_(False)
    return model


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.LBFGS, {"history_size": 3}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_guess_for_an_optimizer_is_what_its_state_becomes(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model = make_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = kind(trained, lr=1e-3, **options)
    optimizer.state.clear()  # some make theirs at once
    guess = optimizer_state_bytes(optimizer)
    optimizer = kind(trained, lr=1e-3, **options)
    x = torch.randn(16, 64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    if kind is torch.optim.LBFGS:  # keeps lists of tensors, which only its class tells
        state = optimizer.state[trained[0]]
        kept = [*state["old_dirs"], *state["old_stps"], state["d"], state["prev_flat_grad"]]
        assert guess == pytest.approx(sum(t.numel() * 4 for t in kept), rel=0.01)
    else:
        weight_bytes = sum(p.numel() * 4 for p in trained)
        # Step counters are tensors of one number.
        assert guess <= optimizer_state_bytes(optimizer) <= guess + 0.02 * weight_bytes


class Factored(torch.optim.Optimizer):
    """One number per row and one per column of a matrix, a moment in 16 bits, and a scale per 256 elements."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, {"rate": rate})

    @override
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["step"] = torch.zeros(())
                state["factors"] = [weight.sum(0, keepdim=True), weight.sum(-1, keepdim=True)]
                state["moment"] = weight.detach().bfloat16()
                state["scales"] = torch.rand(-(-weight.numel() // 256))


def test_any_optimizer_is_tried_without_a_trace() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    weights = [nn.Parameter(torch.zeros(512, 64)), nn.Parameter(torch.zeros(8, 16, 16))]
    optimizer = Factored(weights, rate=0.1)
    guess = optimizer_state_bytes(optimizer)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)
    optimizer.step()
    assert guess == pytest.approx(optimizer_state_bytes(optimizer), rel=0.01)


def test_options_of_a_group_and_types_of_weights_count() -> None:
    wide, narrow = (nn.Parameter(torch.zeros(100, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    groups = [{"params": [wide], "amsgrad": True}, {"params": [narrow]}]
    optimizer = torch.optim.AdamW(groups)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step
    assert optimizer_state_bytes(optimizer) == 3 * 400 + 2 * 200 + 2 * 4
    assert not optimizer.state


def test_an_optimizer_that_cannot_be_tried_counts_as_adam_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(torch.optim.Optimizer):
        @override
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("only at night\nand not alone")

    weights = [nn.Parameter(torch.zeros(100))]
    with caplog.at_level("INFO"):
        assert optimizer_state_bytes(Mine(weights, {})) == 800
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("what Mine keeps for its weights could not be tried on a small one (")
    assert message.endswith("): its state is counted as 2 tensors for each, as that of Adam.")


def test_a_model_is_counted_once_with_gradients_of_what_is_trained() -> None:
    model = make_model()
    model.append(model[0])  # shared
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=0.9)
    linear, norm = 4 * (64 * 64 + 64), 4 * 2 * 64
    statistics = 4 * 2 * 64 + 8
    memory = model_memory(model, [optimizer])
    assert memory == HostMemory(2 * linear + norm + statistics, linear + norm, linear + norm)
    assert allocated_bytes(model, [optimizer]) == memory.weights
    model(torch.randn(4, 64)).sum().backward()
    assert allocated_bytes(model, [optimizer]) == memory.weights + memory.gradients
    optimizer.step()
    assert allocated_bytes(model, [optimizer]) == memory.total


def test_the_report_names_what_takes_most_first() -> None:
    memory = HostMemory(weights=3 * MIB, gradients=2 * MIB, activations=5 * MIB)
    assert memory.total == 10 * MIB
    assert memory.describe() == "10.0 MiB (activations 5.00 MiB, weights 3.00 MiB, gradients 2.00 MiB)"
    assert HostMemory().describe() == "0 B (nothing)"


# --- what the user is told ------------------------------------------------------------------------------------------

COSTS = CostProfile(tuple(CallCost(f"call {i}", 1.0, 2.0, input_bytes=1000) for i in range(2)))
STAGES = Partition(
    2, (Stage(0, StageKind.FORWARD, 0, 1), Stage(1, StageKind.FUSED, 1, 2), Stage(2, StageKind.BACKWARD, 0, 1))
)
PLAN = StepPlan(STAGES, (2, 2, 1), 8, "r=1 to 2: because")


@pytest.fixture
def make_report(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], HostReport]:
    """On a host with so much left: weights of 440 bytes, which are there, gradients and AdamW state of 1328."""

    def make(num_bytes: int | None) -> HostReport:
        monkeypatch.setattr(host_report, "available_bytes", lambda: num_bytes)
        model = nn.Linear(10, 10)
        return HostReport(model, [torch.optim.AdamW(model.parameters())])

    return make


def test_the_host_is_checked_before_it_is_filled(make_report: Any, recwarn: pytest.WarningsRecorder) -> None:
    make_report(1328).check()
    make_report(None).check()
    assert not recwarn
    with pytest.warns(UserWarning, match=r"may need 1\.73 KiB \(optimizer state 888 B, weights 440 B, gradients 440 B"):
        make_report(1327).check()


def test_the_host_is_checked_again_when_activations_are_known(
    make_report: Any, recwarn: pytest.WarningsRecorder
) -> None:
    report = make_report(1328 + 5 * 2000)
    report.check()
    report.note_plan(PLAN, COSTS, 5)
    assert not recwarn
    with pytest.warns(UserWarning, match="activations 11.7 KiB.* still to be allocated, and 11.1 KiB are available"):
        report.note_plan(PLAN, COSTS, 6)
    before = len(recwarn)
    report.note_plan(PLAN, COSTS, 7)  # once is enough
    assert len(recwarn) == before


@pytest.mark.parametrize(("left", "room"), [(1328 + 220 + 1000, 500), (1328 + 220, 0), (1000, 0), (None, 0)])
def test_activations_may_take_half_of_what_is_left_besides_the_states(
    left: int | None, room: int, make_report: Any
) -> None:
    """Half of the weights may have working copies."""
    assert make_report(left).room_for_activations == room


def test_processes_on_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_report, "available_bytes", lambda: 2 * 1220)
    assert HostReport(nn.Linear(10, 10).requires_grad_(False), [], num_here=2).room_for_activations == 500


def test_memory_that_activations_have_had_is_not_missing(make_report: Any, recwarn: pytest.WarningsRecorder) -> None:
    report = make_report(1328 + 2 * 2000)
    report.note_plan(PLAN, COSTS, 2)
    report.note_step(working_copies=0)
    report.note_plan(PLAN, COSTS, 4)
    assert not recwarn
    with pytest.warns(UserWarning, match="may be killed"):
        report.note_plan(PLAN, COSTS, 5)


def test_what_the_host_needs_is_reported_once(make_report: Any, caplog: pytest.LogCaptureFixture) -> None:
    report = make_report(0)
    with caplog.at_level("INFO"):
        for _ in range(5):
            report.note_step(working_copies=220, plan=PLAN)
    assert [r.message for r in caplog.records if "dispatch" in r.message] == [
        "dispatch of training steps: r=1 to 2: because"
    ]
    (message,) = [record.message for record in caplog.records if "on the host" in record.message]
    assert message == (
        "this run needs up to 1.94 KiB (optimizer state 888 B, weights 440 B, gradients 440 B, working copies 220 B) "
        "on the host"
    )


@pytest.mark.parametrize(
    ("make_optimizer", "least_bytes", "is_noted"),
    [
        (torch.optim.AdamW, 440, True),
        (torch.optim.AdamW, 441, False),
        (partial(torch.optim.AdamW, fused=True), 440, False),
        (torch.optim.RMSprop, 440, False),  # has no such form
    ],
)
def test_an_optimizer_that_could_be_fused_is_named_where_that_matters(
    make_optimizer: Any,
    least_bytes: int,
    is_noted: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(host_report, "_NOTED_BYTES", least_bytes)
    model = nn.Linear(10, 10)
    report = HostReport(model, [make_optimizer(model.parameters())])
    with caplog.at_level("INFO"):
        for _ in range(2):
            report.note_step(working_copies=0)
    found = [record.message for record in caplog.records if "fused" in record.message]
    assert found == is_noted * [
        "AdamW updates 440 B of weights on the host. AdamW(..., fused=True) is several times faster there."
    ]
