"""The table at the end of a training: what it says, when it is printed, and what it does not change."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_roundpipe import RoundPipeTimeline
from lightning_roundpipe.engine.requests import StepResult
from lightning_roundpipe.planning import Partition, Span, Stage, StageKind, Timeline, round_robin
from lightning_roundpipe.reporting import summary
from lightning_roundpipe.reporting.host_memory import HostMemory
from lightning_roundpipe.reporting.summary import Summary
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times at which steps end, in seconds, the next one first."""
    times: list[float] = []
    monkeypatch.setattr(summary, "perf_counter", lambda: times.pop(0))
    return times


def planned(peaks: tuple[int | None, ...] = (None, None)) -> StepResult:
    plan = Partition(1, (Stage(0, StageKind.FUSED, 0, 1),))
    timeline = Timeline((Span(0, "compute", 0, 10), Span(1, "compute", 5, 10)), 2)
    return StepResult(
        [],
        {},
        lambda: timeline,
        schedule=round_robin(1, 4, 2),
        partition=plan,
        num_microbatches=4,
        peak_memory_bytes=peaks,
    )


def rows_of(table: str) -> dict[str, str]:
    return dict(re.findall(r"^ +(\S.*?)  (\S.*)$", table, flags=re.MULTILINE))


def test_figures_are_medians_of_steps(clock: list[float]) -> None:
    clock += [0.0, 9.0, 9.5, 10.5]  # the step after the first one takes long
    noted = Summary()
    for _ in range(4):
        noted.note(planned(peaks=(None, 3 * 2**20)), 100, HostMemory(weights=2**20))
    rows = rows_of(noted.format(2, are_virtual=False, num_ranks=3))
    assert rows["devices"] == "2 GPUs in each of 3 ranks"
    assert rows["step"] == "1.00 s, the median of the last 3"
    assert rows["tokens/s"] == "300"
    assert rows["micro-batches"] == "4 per step"
    assert rows["bubble"] == "25.0% of the devices' time (fill 25.0%, drain 0.0%, inside 0.0%)"
    assert rows["device memory"] == "3.00 MiB at most on the fullest device"
    assert rows["host memory"] == "1.00 MiB (weights 1.00 MiB)"


def test_what_is_not_known_says_so(clock: list[float]) -> None:
    clock += [0.0]
    noted = Summary()
    noted.note(replace(planned(), schedule=None), None, None)  # has only recorded
    rows = rows_of(noted.format(2, are_virtual=True))
    assert rows["devices"] == "2 virtual"
    assert all(rows[name].startswith("not known yet") for name in ("stages", "step", "bubble"))
    assert rows["host memory"] == "not known"
    assert "tokens/s" not in rows


def test_old_steps_are_forgotten(clock: list[float]) -> None:
    clock += [*range(0, 1000, 10), *range(1000, 1102)]
    noted = Summary()
    for _ in range(202):
        noted.note(planned(), None, None)
    assert rows_of(noted.format(1, are_virtual=True))["step"] == "1.00 s, the median of the last 100"


def test_printed_once_after_each_fit(capsys: pytest.CaptureFixture[str]) -> None:
    callback = RoundPipeTimeline(summary=True, tokens_of=len)
    trainer = make_trainer(callbacks=[callback])
    trainer.fit(Small(), make_loader(rows=32))
    printed = capsys.readouterr().out
    assert printed.count("What the steps took:") == 1
    rows = rows_of(printed)
    assert rows["stages"].endswith(trainer.strategy.last_step.partition.format())
    assert {"step", "tokens/s", "bubble"} <= rows.keys()
    assert rows["host memory"].startswith(tuple("123456789"))
    trainer.fit_loop.max_epochs += 1
    trainer.fit(trainer.lightning_module, make_loader(rows=32))
    assert rows_of(capsys.readouterr().out)["step"].endswith("the median of the last 3"), "counted anew"


def test_summary_logs_nothing(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path)
    make_trainer(callbacks=[RoundPipeTimeline(summary=True)], logger=logger).fit(Small(), make_loader(rows=16))
    assert logger.experiment.metrics == []


@pytest.mark.parametrize("arguments", [{"picture": "step.svg"}, {"summary": False, "log_metrics": True}])
def test_tokens_are_counted_for_a_summary_alone(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="together with summary=True"):
        RoundPipeTimeline(tokens_of=len, **arguments)
