"""Bring planning.md and tuning.md up to date: run the commands that they show, draw the pictures that they refer to.

A block of these pages that begins with ``$ roundpipe`` is a command and what it printed. The command is run again in
the folder that holds ``docs``, and what it prints now takes the place of what it printed then; where it says so, it
draws a picture. All of it is planned and simulated by this package from a profile that the RoundPipe paper publishes;
nothing is measured here.

    python docs/assets/make_planning_pictures.py [FOLDER]     # a folder with a copy of docs; default: the repository
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lightning_roundpipe.cli import main  # noqa: E402  (the package of this checkout, installed or not)
from lightning_roundpipe.planning import (  # noqa: E402
    Machine,
    Partition,
    StepPlan,
    Timeline,
    partition,
    plan_training,
    simulate,
    stage_costs,
)
from lightning_roundpipe.reporting.pictures import draw_timelines  # noqa: E402
from tests.planning.paper import MODELS  # noqa: E402

PAGES = ("explanation/planning.md", "how-to/tuning.md")
PROFILE = MODELS["Llama-3.1-8B"].profile()
NUM_DEVICES, NUM_MICROBATCHES = 4, 8
# The command, which goes on behind a backslash at the end of a line, and its output.
BLOCK = re.compile(r"(?<=^```console\n)\$ (roundpipe (?:[^\n]*\\\n)*[^\n]*)\n(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)


def output_of(command: str) -> str:
    """Run a command of the pages, which may end with ``| head -n K``; what it prints, errors included.

    Raises:
        ValueError: If the command line is wrong.
    """
    words, limit = shlex.split(command.replace("\\\n", " ")), None
    if "|" in words:
        at = words.index("|")
        words, (head, option, count) = words[:at], words[at + 1 :]
        if (head, option) != ("head", "-n"):
            raise ValueError(f"{command!r}: only '| head -n K' may follow a command.")
        limit = int(count)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main(words[1:])
    except SystemExit as error:
        raise ValueError(f"{command!r} is no command of this package: {printed.getvalue()}") from error
    return "".join(printed.getvalue().splitlines(keepends=True)[:limit])


def draw_formula(path: Path) -> None:
    """Draw the partition that minimises the paper's formula above the one that the simulator finds fastest, both with
    every stage on one device at a time."""
    counts, machine = {"num_microbatches": NUM_MICROBATCHES}, Machine(NUM_DEVICES)
    formula = partition(PROFILE, num_devices=NUM_DEVICES, **counts)
    found = {
        "least (M S + N (N - 1)) t_max": StepPlan(formula, (1,) * formula.num_stages),
        "shortest simulated step": plan_training(PROFILE, machine, may_split=False, **counts),
    }
    draw_timelines([panel(name, plan, machine) for name, plan in found.items()], path)


def panel(title: str, plan: StepPlan, machine: Machine) -> tuple[str, Timeline, Partition]:
    """What `draw_timelines` takes."""
    simulation = simulate(plan.schedule(PROFILE, machine, NUM_MICROBATCHES), stage_costs(plan.partition, PROFILE))
    return f"{title}, {plan.partition.num_stages} stages", simulation.timeline, plan.partition


def update(folder: Path) -> None:
    """Write the profile, the pictures and the pages below ``folder/docs``."""
    docs = folder / "docs"
    PROFILE.save(docs / "assets" / "llama-3.1-8b-profile.json")
    draw_formula(docs / "assets" / "formula.svg")
    os.chdir(folder)
    for name in PAGES:
        page = docs / name
        text = page.read_text(encoding="utf-8")
        page.write_text(
            BLOCK.sub(lambda block: f"$ {block[1]}\n{output_of(block[1])}", text),
            encoding="utf-8",
        )


if __name__ == "__main__":
    update(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT).resolve())
