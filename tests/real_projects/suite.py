"""The suite: each project with each case and variant, whatever becomes of the others, and what is kept of it.

::

    .projects/NAME/env/                    the environment
    .projects/NAME/runs/CASE/VARIANT/      log, outcome, error and warnings of a process
    .projects/NAME/results.json            how each variant ended: what is there and passes is not run again
    docs/measurements/projects.json        all results, from which :mod:`page` makes the page
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tests.real_projects.cases import VARIANTS
from tests.real_projects.compare import FAILS, NOT_PLAIN, PASSING, Verdict, judged
from tests.real_projects.environments import (
    REQUIREMENTS,
    ROOT,
    SETTINGS,
    InstallError,
    LimitError,
    end_group,
    interpreter,
    last_line,
    run_limited,
)

ENTRIES = Path(__file__).parent / "entries"
RUNS = "runs"  # of plain Lightning, which is not compared
_DONE = (*PASSING, RUNS)


class Runner(Protocol):
    """What the suite asks of a project, by name."""

    def prepare(self, name: str) -> Mapping[str, str]:
        """Makes its environment, and returns versions by distribution, its own first. Raises InstallError."""

    def cases(self, name: str) -> Mapping[str, Mapping[str, str]]:
        """Its cases with "what" and "set". Raises LimitError or RuntimeError."""

    def attempt(self, name: str, case: str, variant: str, folder: Path) -> None:
        """Runs a variant, which leaves its files in the folder. Raises LimitError."""


class Processes:
    """Every variant in a process of its own, a fork of one that has imported the project; see :mod:`one_run`."""

    def __init__(self, folder: Path, install_seconds: float, run_seconds: float) -> None:
        self._folder = folder
        self._install_seconds = install_seconds
        self._run_seconds = run_seconds
        self._importers: dict[str, Importer] = {}

    def prepare(self, name: str) -> Mapping[str, str]:
        """See :class:`Runner`."""
        python = interpreter(name, self._folder / name, self._install_seconds)
        log = self._folder / name / "versions.log"
        if run_limited([python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"], 120, log):
            raise InstallError(last_line(log))
        lines = log.read_text(encoding="utf-8").splitlines()
        found = json.loads(next(line for line in lines if line.startswith("[")))
        installed = {canonical(entry["name"]): entry["version"] for entry in found}
        top = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").split()
        names = [line.partition("==")[0] for line in top] + ["lightning", "pytorch-lightning", "torch"]
        return {n: installed[canonical(n)] for n in dict.fromkeys(names) if canonical(n) in installed}

    def cases(self, name: str) -> Mapping[str, Mapping[str, str]]:
        """See :class:`Runner`."""
        for other in [*self._importers]:
            self._importers.pop(other).close()
        python = interpreter(name, self._folder / name, self._install_seconds)
        self._importers[name] = Importer(python, name, self._folder / name / "import.log", self._run_seconds)
        return self._importers[name].cases

    def attempt(self, name: str, case: str, variant: str, folder: Path) -> None:
        """See :class:`Runner`."""
        self._importers[name].attempt(case, variant, folder)


class Importer:
    """The process that imports a project, and forks for each variant."""

    def __init__(self, python: str, name: str, log: Path, seconds: float) -> None:
        self._seconds = seconds
        self._log = log
        with log.open("w", encoding="utf-8") as output:
            command = [python, "-m", "tests.real_projects.one_run", name, str(seconds)]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **SETTINGS}, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
            )  # fmt: skip
        self.cases: dict[str, dict[str, str]] = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        # Forks are stopped by the process; that it has imported everything is waited for here.
        if not select.select([self._process.stdout], [], [], self._seconds + 60)[0]:
            self.close()
            raise LimitError("the project's libraries were not imported in time")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the project cannot be imported: {last_line(self._log)}")
        return json.loads(line)

    def attempt(self, case: str, variant: str, folder: Path) -> None:
        """Runs a variant. Raises LimitError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([case, variant, str(folder)]) + "\n")
        self._process.stdin.flush()
        if self._answer() is None:
            raise LimitError(f"stopped after {self._seconds:g} s")

    def close(self) -> None:
        """Ends the process."""
        end_group(self._process)


def canonical(name: str) -> str:
    """The name of a distribution, as it is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass
class Suite:
    """Runs projects one after the other.

    Attributes:
        folder: of environments and results.
        is_again: whether what has passed is run again.
    """

    folder: Path
    runner: Runner
    is_again: bool = False

    def run(self, names: Iterable[str], only: str = "") -> None:
        """Runs them; what ends one of them does not end the others."""
        for name in names:
            try:
                self._run(name, only)
            except (InstallError, LimitError, RuntimeError) as error:
                print(f"{name}: {error}", flush=True)
                self._keep(name, {**self.results(name), "date": _today(), "problem": str(error)})

    def results(self, name: str) -> dict[str, Any]:
        """What is kept of a project."""
        path = self.folder / name / "results.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def _keep(self, name: str, results: Mapping[str, Any]) -> None:
        path = self.folder / name / "results.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1), encoding="utf-8")
        part.replace(path)

    def _run(self, name: str, only: str) -> None:
        kept = self.results(name)
        results: dict[str, Any] = {"date": _today(), "problem": "", "versions": dict(self.runner.prepare(name))}
        results["entry"] = _digest(name)
        if any(kept.get(key) != results[key] for key in ("versions", "entry")):
            kept = {}
        results["cases"] = {}
        for case, about in self.runner.cases(name).items():
            before = kept.get("cases", {}).get(case, {}).get("variants", {})
            results["cases"][case] = {**about, "variants": dict(before)}
        for case, about in results["cases"].items():
            for variant in VARIANTS:
                if (variant == "set" and not about["set"]) or only not in ("", case):
                    continue
                ended = about["variants"].get(variant, {})
                if self.is_again or ended.get("outcome") not in _DONE or not self._plain(name, case).is_file():
                    about["variants"][variant] = self._ended(name, case, variant)
                    print(f"{name} {case} {variant}: {_line(about['variants'][variant])}", flush=True)
                    self._keep(name, results)
        self._keep(name, results)

    def _plain(self, name: str, case: str) -> Path:
        return self.folder / name / "runs" / case / "plain" / "outcome.pt"

    def _ended(self, name: str, case: str, variant: str) -> dict[str, Any]:
        folder = (self.folder / name / "runs" / case / variant).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        start = time.monotonic()
        if variant != "plain" and not self._plain(name, case).is_file():
            return {"outcome": FAILS, "detail": NOT_PLAIN, "seconds": 0}
        try:
            self.runner.attempt(name, case, variant, folder)
            verdict = self._verdict(folder, variant, self._plain(name, case))
        except LimitError as error:
            verdict = Verdict(FAILS, str(error))
        return {"outcome": verdict.outcome, "detail": verdict.detail, "seconds": round(time.monotonic() - start)}

    def _verdict(self, folder: Path, variant: str, plain: Path) -> Verdict:
        outcome = _outcome_in(folder)
        error, said = (_read(folder / f"{name}.json") for name in ("error", "said"))
        if outcome is None and error is None:
            return Verdict(FAILS, f"the process has ended: {last_line(folder / 'log.txt')}")
        if variant == "plain":
            return Verdict(RUNS) if outcome is not None else Verdict(FAILS, f"{error['kind']}: {error['text']}"[:400])
        options = VARIANTS[variant] or {}
        return judged(_outcome_in(plain.parent), outcome, error, said or [], options.get("num_microbatches", 2))


def _digest(name: str) -> str:
    """Of the entry's source: with another one nothing has run yet."""
    path = ENTRIES / f"{name}.py"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""


def _outcome_in(folder: Path) -> Any:
    path = folder / "outcome.pt"
    return torch.load(path, weights_only=True) if path.is_file() else None


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _line(ended: Mapping[str, Any]) -> str:
    return f"{ended['outcome']} ({ended['seconds']} s) {ended['detail']}".strip()


def _today() -> str:
    return datetime.date.today().isoformat()
