"""The driver and the verdicts of the suite, on made-up projects: real ones are not run here."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.real_projects import page
from tests.real_projects.compare import ANNOUNCED, EQUAL, FAILS, REFUSED, RESULTS, WHOLE, judged
from tests.real_projects.environments import REQUIREMENTS, InstallError, LimitError, run_limited
from tests.real_projects.suite import RUNS, Suite

ENTRIES = Path(__file__).parent / "entries"


def outcome(num_microbatches: int = 2) -> dict[str, Any]:
    """Of one step that moves a weight by 0.1, and a bias whose gradient is rounding error by as much."""
    training = {
        "start": {"weight": torch.zeros(2), "bias": torch.zeros(1)},
        "weights": {"weight": torch.tensor([0.1, -0.1]), "bias": torch.tensor([0.1])},
        "gradients": [{"weight": torch.tensor([1.0, -2.0]), "bias": torch.tensor([1e-9])}],
        "steps": [{"outputs": torch.tensor(3.0), "logged": {"loss": torch.tensor(3.0)}}],
        "logged": [{"val": 1.0}],
        "outputs": [],
        "num_microbatches": [num_microbatches],
    }
    return {"trainings": [training], "kept": {"predictions": [torch.ones(3)]}}


def changed(where: str, value: Any, **more: Any) -> dict[str, Any]:
    """An outcome with another value, at ``trainings.0.weights.weight`` for instance."""
    found = outcome(**more)
    *way, last = (int(key) if key.isdigit() else key for key in where.split("."))
    place: Any = found
    for key in way:
        place = place[key]
    place[last] = value
    return found


def verdict(actual: Any, *said: str, error: Any = None, num_microbatches: int = 2) -> str:
    return judged(outcome(), actual, error, said, num_microbatches).outcome


SAID = "splitting the batch changes the loss: set num_microbatches=1"
OFF = {
    "gradient": ("trainings.0.gradients.0.weight", torch.tensor([1.0, -2.001])),
    "weight": ("trainings.0.weights.weight", torch.tensor([0.1, -0.101])),
    "weight before": ("trainings.0.start.weight", torch.tensor([0.0, 0.01])),
    "steps": ("trainings.0.gradients", []),
}
RESULTS_OFF = {
    "loss": ("trainings.0.steps.0.outputs", torch.tensor(3.01)),
    "logged": ("trainings.0.logged.0.val", 1.01),
    "prediction": ("kept.predictions.0", torch.tensor([1.0, 1.0, 1.01])),
    "not a number": ("kept.predictions.0", torch.tensor([1.0, 1.0, float("nan")])),
    "missing": ("kept", {}),
}


def test_equal_is_equal_to_rounding_and_whole_has_to_be_announced() -> None:
    assert verdict(outcome()) == EQUAL
    assert verdict(changed("kept.predictions.0", torch.ones(3) + 1e-5)) == EQUAL
    assert verdict(outcome(num_microbatches=1), SAID) == WHOLE
    assert verdict(outcome(num_microbatches=1)) == FAILS
    assert verdict(outcome(num_microbatches=1), num_microbatches=1) == EQUAL


@pytest.mark.parametrize("what", [*OFF, *RESULTS_OFF])
def test_differences_pass_only_with_a_warning_and_several_microbatches(what: str) -> None:
    actual = changed(*(OFF | RESULTS_OFF)[what])
    assert verdict(actual) == FAILS
    assert verdict(actual, SAID) == (ANNOUNCED if what in OFF else RESULTS)
    assert verdict(actual, SAID, num_microbatches=1) == FAILS
    assert verdict(actual, "verify=None: the step is not compared with plain autograd: too large") == FAILS


def test_weights_without_a_gradient_above_rounding_are_not_compared() -> None:
    """Adam moves them by a full step in any direction: see [Note: honest weights]."""
    assert verdict(changed("trainings.0.weights.bias", torch.tensor([-0.1]))) == EQUAL
    assert verdict(changed("trainings.0.weights.bias", torch.tensor([-0.3]))) == FAILS


def test_an_error_passes_if_it_is_ours_and_names_a_way_out() -> None:
    error = {"kind": "BatchSplitError", "text": "cannot split the batch: use split_batch", "is_ours": True}
    assert verdict(None, error=error) == REFUSED
    assert verdict(None, error={**error, "text": "cannot split the batch"}) == FAILS
    assert verdict(None, SAID, error={**error, "is_ours": False}) == FAILS


def test_no_warning_helps_where_this_package_finds_its_own_error_or_plain_does_not_run() -> None:
    assert verdict(outcome(), "the loss differs from plain autograd on the host with the same rows") == FAILS
    assert judged(None, outcome(), None, [SAID], 2).outcome == FAILS
    assert judged(outcome(), None, None, [SAID], 2).outcome == FAILS


class Made:
    """A runner of made-up projects with one case, which notes what it runs.

    Args:
        acts: by project and variant what is done instead of writing an outcome that is equal.
    """

    def __init__(self, acts: Mapping[tuple[str, str], Callable[[Path], None]] = {}) -> None:
        self.acts = acts
        self.ran: list[str] = []
        self.missing: set[str] = set()

    def prepare(self, name: str) -> Mapping[str, str]:
        if name in self.missing:
            raise InstallError("ERROR: No matching distribution found")
        return {name: "1.0"}

    def cases(self, name: str) -> Mapping[str, Mapping[str, str]]:
        return {"case": {"what": "training", "set": ""}}

    def attempt(self, name: str, case: str, variant: str, folder: Path) -> None:
        self.ran.append(f"{name} {variant}")
        if act := self.acts.get((name, variant)):
            act(folder)
            return
        torch.save(outcome(), folder / "outcome.pt")


def limit(folder: Path) -> None:
    raise LimitError("stopped after 1 s")


def dies(folder: Path) -> None:
    (folder / "log.txt").write_text("Segmentation fault")


def outcomes(suite: Suite, name: str) -> dict[str, str]:
    return {key: ended["outcome"] for key, ended in suite.results(name)["cases"]["case"]["variants"].items()}


def test_one_fails_and_the_others_go_on(tmp_path: Path) -> None:
    made = Made({("first", "two"): limit, ("first", "auto"): dies, ("second", "plain"): dies})
    made.missing.add("third")
    suite = Suite(tmp_path, made)
    suite.run(["third", "first", "second", "fourth"])
    assert outcomes(suite, "first") == {"plain": RUNS, "auto": FAILS, "one": EQUAL, "two": FAILS, "copies": EQUAL}
    assert set(outcomes(suite, "second").values()) == {FAILS}
    assert [name for name in made.ran if name.startswith("second")] == ["second plain"]
    assert set(outcomes(suite, "fourth").values()) == {RUNS, EQUAL}
    rows = [*page.failing({name: suite.results(name) for name in ("first", "second", "third", "fourth")})]
    assert rows[:2] == [
        "first case auto: the process has ended: Segmentation fault",
        "first case two: stopped after 1 s",
    ]
    assert rows[-1] == "third : ERROR: No matching distribution found"


def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    made = Made({("first", "two"): limit})
    suite = Suite(tmp_path, made)
    suite.run(["first"])
    made.acts = {}
    made.ran.clear()
    suite.run(["first"])
    assert made.ran == ["first two"]
    assert FAILS not in outcomes(suite, "first").values()
    made.ran.clear()
    suite.run(["first"])
    assert made.ran == []
    Suite(tmp_path, made, is_again=True).run(["first"])
    assert len(made.ran) == 5


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # A process that has ended and that its parent has not asked for yet is none.
    return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_process_ends_in_time_with_all_that_it_has_started(tmp_path: Path) -> None:
    code = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    with pytest.raises(LimitError, match="stopped after 2 s"):
        run_limited([sys.executable, "-c", code], 2, tmp_path / "log")
    until = time.monotonic() + 10
    child = int((tmp_path / "log").read_text())
    while is_alive(child) and time.monotonic() < until:
        os.sched_yield()
    assert not is_alive(child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs pidfd_open")
def test_a_fork_ends_in_time_and_its_exit_status_is_known(tmp_path: Path) -> None:
    code = (
        "import os, sys, threading; from pathlib import Path; from tests.real_projects.one_run import forked\n"
        "acts = [lambda: None, lambda: os._exit(3), lambda: threading.Event().wait()]\n"
        "print([forked(act, Path(sys.argv[1]), seconds) for act, seconds in zip(acts, (60, 60, 1))])"
    )
    log = tmp_path / "log"
    assert run_limited([sys.executable, "-c", code, str(tmp_path)], 100, log) == 0
    assert log.read_text().splitlines()[-1] == "[0, 3, None]"


def test_the_table_has_rows_for_what_fails_and_for_what_is_to_be_set() -> None:
    ended = {
        "plain": {"outcome": RUNS},
        "one": {"outcome": EQUAL},
        "two": {"outcome": REFUSED},
        "set": {"outcome": EQUAL},
    }
    cases = {"case": {"what": "training", "set": "units=[Block]", "variants": ended}}
    results = {"first": {"versions": {"first-lib": "1.0"}, "cases": cases}, "second": {"problem": "no wheel"}}
    text = page.text_of(results)
    assert "|first-lib 1.0|case: training||equal|refused||`units=[Block]`|" in text
    assert "|second|no wheel|" in text
    without = copy.deepcopy(results)
    without["first"]["cases"]["case"]["variants"]["set"]["outcome"] = FAILS
    assert "units" not in page.text_of(without)


def test_every_project_has_an_entry_and_exact_versions() -> None:
    names = {path.stem for path in REQUIREMENTS.glob("*.txt")}
    assert names == {path.stem for path in ENTRIES.glob("*.py")}
    lines = [line for path in REQUIREMENTS.glob("*.txt") for line in path.read_text(encoding="utf-8").split()]
    assert [line for line in lines if "==" not in line] == []
