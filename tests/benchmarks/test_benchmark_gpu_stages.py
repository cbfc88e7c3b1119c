"""Every stage of ``make gpu``, with toys on this machine: all of it that needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import compiled, facts, full, models, processes, suite
from benchmarks.gpu.contenders import CONTENDERS
from benchmarks.gpu.measuring import Job
from benchmarks.gpu.models import FULL, LORA, Size, make_model
from benchmarks.gpu.results import MEASURED, NOT_RUN, Options, Progress, Results, Step

TINY = Options(scale="tiny", steps=2)
LIMIT_S = 800.0


def figures_of(steps: list[Step], folder: Path, not_run: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Runs all steps; all but ``not_run`` must have been measured."""
    results = Results(folder, "stage", "how", TINY)
    results.run(steps, LIMIT_S)
    states = {name: record["state"] for name, record in results.steps.items()}
    reasons = {name: record["reason"] for name, record in results.steps.items()}
    assert states == {step.name: NOT_RUN if step.name in not_run else MEASURED for step in steps}, reasons
    return {name: record["figures"] for name, record in results.steps.items()}


@pytest.mark.parametrize("is_huge", [False, True])
def test_memory_to_page_lock_is_written_and_outlives_its_maker(is_huge: bool) -> None:
    tensor, huge_bytes = facts._memory(2**21, is_huge=is_huge)
    assert tensor.numel() == 2**21
    assert bool((tensor == 1).all())
    if huge_bytes is not None and not is_huge:
        assert huge_bytes <= 0


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    """By training, what came of it: several stages have the same one."""
    return {}


@pytest.fixture
def once(in_this_process: list[list[str]], measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that was measured is not measured again."""
    train = processes.train

    def train_once(job: Job, *more: Any) -> dict[str, Any]:
        if repr(job) not in measured:
            measured[repr(job)] = train(job, *more)
        return measured[repr(job)]

    monkeypatch.setattr(processes, "train", train_once)


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="FSDP2 of torch 2.6 does not run on cores")
@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("make_steps", [full.steps, full.lora_steps])
def test_contenders_train_the_same(make_steps: Any, tmp_path: Path) -> None:
    missing = frozenset({"deepspeed", "roundpipe_library"})
    steps = [step for step in make_steps(TINY) if step.name != "roundpipe, round_size=8"]  # as with 2
    found = figures_of(steps, tmp_path, missing)
    variants = ["roundpipe, round_size=2"] if make_steps is full.steps else []
    assert list(found) == [*CONTENDERS, *variants]
    losses = torch.tensor([found[name]["losses"] for name in CONTENDERS if name not in missing])
    # Three of warm-up, two that count, one that is profiled where there is a GPU.
    assert losses.shape == (3, 6)
    torch.testing.assert_close(losses, losses[:1].expand(3, -1), rtol=1e-2, atol=0.0)
    for name in set(found) - missing:
        assert found[name]["tokens_per_second"]["num"] == 2
        assert found[name]["first_step_s"] > 0
        assert found[name]["peak_host_bytes"] > 0
        assert 0 <= found[name]["interpreter_lock"]["share_taken"] <= 1
    for name in variants:
        torch.testing.assert_close(found[name]["losses"], found["roundpipe"]["losses"], rtol=1e-2, atol=0.0)
    timeline = found["roundpipe"]["timeline"]
    assert 0 < timeline["busy_share"] <= 1
    assert timeline["num_microbatches"] == models.TINY.microbatches
    assert timeline["bytes_up"] > 0
    assert timeline["bytes_down"] > 0


@pytest.mark.usefixtures("once")
def test_compiled_units_and_a_resident_training(tmp_path: Path) -> None:
    found = figures_of(compiled.steps(TINY), tmp_path)
    times = {name: found[name]["seconds_per_step"]["median"] for name in ("compiled", "eager", "resident")}
    for one, other in (("compiled", "eager"), ("eager", "resident")):
        assert found[f"{one}_over_{other}"]["ratio"] == pytest.approx(times[one] / times[other], rel=1e-3)
        torch.testing.assert_close(found[one]["losses"], found[other]["losses"], rtol=1e-2, atol=0.0)


def test_a_ratio_needs_both_sides(tmp_path: Path) -> None:
    results = Results(tmp_path, "stage", "how", TINY)
    *_, ratio = compiled.steps(TINY)
    results.run([ratio], LIMIT_S)
    assert results.steps["compiled_over_eager"]["reason"] == "'compiled' was not measured"


def test_options_change_the_large_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(full.processes, "train", lambda job, *args: asked.append(job) or {})
    options = Options(cap_gib=10.0, sequence=512, rows=1, microbatches=3, steps=7)
    Results(tmp_path, "full", "how", options).run(full.steps(options), LIMIT_S)
    assert {(job.size.sequence, job.size.rows, job.size.microbatches, job.steps) for job in asked} == {(512, 1, 3, 7)}
    assert {job.contender: job.cap_bytes for job in asked} == {
        name: None if name == "resident" else 10 * 2**30 for name in CONTENDERS
    }


@pytest.mark.parametrize("size", [FULL, LORA], ids=["full", "lora"])
def test_the_large_models_do_not_fit_the_default_limit(size: Size) -> None:
    with torch.device("meta"):
        model = make_model(size)
    parameters = list(model.parameters())
    # Trained: the weight, its gradient, and two moments.
    resident = sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in parameters)
    assert resident > Options().cap_gib * 2**30
    frozen = {p.dtype for p in parameters if not p.requires_grad}
    assert frozen == ({torch.bfloat16} if size.lora else set())


def test_flops_count_the_weights_that_multiply() -> None:
    size = Size(2, 8, 2, 12, 5, sequence=4, rows=1, microbatches=1)
    model = make_model(size)
    matrices = [p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name]
    attention = size.layers * size.width * size.sequence
    assert size.flops == size.tokens * (6 * sum(matrices) + 6 * attention)


def test_outcomes_of_tests(tmp_path: Path) -> None:
    path = tmp_path / "test_of_all_kinds.py"
    path.write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2, f'because of {pytest.__file__}'\n"
        "def test_is_skipped(): pytest.skip('no reason')\n"
        "@pytest.fixture\n"
        "def leaves(): yield; raise RuntimeError('left')\n"
        "def test_fails_afterwards(leaves): pass\n",
        encoding="utf-8",
    )
    results = Results(tmp_path, "tests", "how", TINY)
    found = suite.run_tests(path, None, Progress("it", results, float("inf")))
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert [name.rpartition("::")[2] for name in found["failures"]] == ["test_fails", "test_fails_afterwards"]
    assert "because of lib" in next(iter(found["failures"].values())), "no folder of this machine"
    assert "no reason" in found["reasons"][0]
    assert found["began"] == []


def test_a_test_that_ends_the_process_is_named(tmp_path: Path) -> None:
    path = tmp_path / "test_that_ends.py"
    path.write_text("import os\ndef test_passes(): pass\ndef test_ends(): os._exit(9)\n", encoding="utf-8")
    results = Results(tmp_path, "tests", "how", TINY)
    step = Step("it", lambda progress: suite.run_tests(path, "compute", progress))
    results.run([step], LIMIT_S)
    record = results.steps["it"]
    assert record["state"] == "incomplete"
    assert record["reason"].startswith("pytest ended with code 9")
    assert record["figures"]["passed"] == 1
    assert [name.rpartition("::")[2] for name in record["figures"]["began"]] == ["test_ends"]


def test_what_needs_gpus_is_run_as_it_is_and_with_everything_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str | None]] = []
    monkeypatch.setattr(suite, "run_tests", lambda path, late, *rest: ran.append((path.name, late)) or {})
    steps = [*suite.steps(Options()), *suite.late_steps(Options())]
    Results(tmp_path, "tests", "how", Options()).run(steps, LIMIT_S)
    assert ran == [("gpu", None), ("parity", None), ("gpu", "compute"), ("gpu", "h2d"), ("gpu", "d2h")]
