"""Runs one variant of one case, in the environment of the project: ``python -m tests.real_projects.one_run``.

It writes ``outcome.pt`` with all there is to compare, or ``error.json``, and ``said.json`` with the warnings of this
package, into a folder. Without a case it prints those of the entry.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from tests.real_projects.cases import VARIANTS, Case, Run
from tests.real_projects.draws import without_draws

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
        if is_said_by_us(sys._getframe(1)):
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
    is_ours = OURS in last or type(error).__module__.startswith("lightning_roundpipe")
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    text = "".join(traceback.format_exception(error))
    return {"kind": type(error).__name__, "text": f"{error}{notes}", "is_ours": is_ours, "traceback": text}


def main(name: str, case_name: str = "", variant: str = "", into: str = "") -> int:
    """Runs it; see above."""
    entry = importlib.import_module(f"tests.real_projects.entries.{name}")
    cases: dict[str, Case] = entry.CASES
    if not case_name:
        found = {key: {"what": case.what, "set": case.options_text} for key, case in cases.items()}
        print(json.dumps(found))
        return 0
    folder, case, options = Path(into), cases[case_name], VARIANTS[variant]
    said = listen()
    torch.set_num_threads(1)
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
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
