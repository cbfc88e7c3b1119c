"""Runs variants in the environment of the project: ``python -m tests.real_projects.one_run NAME SECONDS``.

The libraries of a project take longer to import than to train. So they are imported once; then each line of the input,
``[case, variant, folder]`` as JSON, is run by a fork, which ends after so many seconds at the latest. Lines of the
output are JSON, too: the cases of the entry at first, then how each fork has ended: its exit status, or null if it was
stopped. A fork leaves ``log.txt`` in its folder, ``outcome.pt`` with all there is to compare, or ``error.json``, and
``said.json`` with the warnings of this package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import random
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from tests.real_projects.cases import VARIANTS, Case, Run
from tests.real_projects.draws import without_draws
from tests.real_projects.torchvision_operators import register_missing

OURS = f"{os.sep}lightning_roundpipe{os.sep}"
# Between who warns and who shows the warning.
_BETWEEN = ("warnings.py", "rank_zero.py", "notices.py", "one_run.py")


def is_said_by_us(frame: FrameType | None) -> bool:
    """Whether a warning that is being shown comes from this package."""
    while frame is not None and os.path.basename(frame.f_code.co_filename) in _BETWEEN:
        if OURS in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return frame is not None and OURS in frame.f_code.co_filename


def listen() -> list[str]:
    """The warnings of this package from now on; all of them are shown as ever."""
    said: list[str] = []
    show = warnings.showwarning

    def hear(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        # Those of torch's own sources have the frame of its caller.
        if is_said_by_us(sys._getframe(1)) and "Triggered internally at" not in str(message):
            said.append(str(message))
        show(message, category, *args, **kwargs)

    warnings.showwarning = hear
    warnings.simplefilter("always")
    return said


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def told(error: BaseException) -> dict[str, Any]:
    """What is known of an error: its kind, its text, and whether this package has raised it."""
    last = [frame.f_code.co_filename for frame in _frames(error.__traceback__)][-1]
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    # To errors of code that needs the rows of the whole batch this package adds what to do.
    is_ours = OURS in last or type(error).__module__.startswith("lightning_roundpipe") or "num_microbatches=1" in notes
    text = "".join(traceback.format_exception(error))
    return {"kind": type(error).__name__, "text": f"{error}{notes}", "is_ours": is_ours, "traceback": text}


def run_variant(entry: Any, case: Case, variant: str, folder: Path) -> None:
    """Runs it, and leaves its files."""
    options = VARIANTS[variant]
    said = listen()
    torch.manual_seed(0)
    random.seed(0)
    importlib.import_module("numpy").random.seed(0)
    run = Run(
        {**options, **case.options} if variant == "set" and options is not None else options,
        folder,
        getattr(entry, "LIGHTNING", "lightning.pytorch"),
    )
    try:
        with without_draws():
            case.act(run)
        torch.save(run.outcome, folder / "outcome.pt")
    except BaseException as error:
        (folder / "error.json").write_text(json.dumps(told(error)), encoding="utf-8")
        raise
    finally:
        (folder / "said.json").write_text(json.dumps(list(dict.fromkeys(said))), encoding="utf-8")


def forked(act: Callable[[], None], folder: Path, seconds: float) -> int | None:
    """Lets a fork act in the folder, and returns its exit status; None if it was stopped after so many seconds."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setsid()
            os.chdir(folder)
            with open("log.txt", "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    ended = os.pidfd_open(child)
    is_stopped = not select.select([ended], [], [], seconds)[0]
    os.close(ended)
    # What it has started may be alive.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if is_stopped else status


def main(name: str, seconds: str) -> None:
    """See above."""
    # What libraries print goes with their warnings.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    register_missing()
    entry = importlib.import_module(f"tests.real_projects.entries.{name}")
    cases: dict[str, Case] = entry.CASES
    print(
        json.dumps({key: {"what": c.what, "set": c.options_text} for key, c in cases.items()}), file=answers, flush=True
    )
    for line in sys.stdin:
        case, variant, into = json.loads(line)
        run = functools.partial(run_variant, entry, cases[case], variant, Path(into))
        print(json.dumps(forked(run, Path(into), float(seconds))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
