"""Makes docs/reference/projects.md of docs/measurements/projects.json: ``python -m tests.real_projects.page``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.real_projects import compare
from tests.real_projects.compare import ANNOUNCED, EQUAL, FAILS, REFUSED, WHOLE
from tests.real_projects.environments import ROOT

RESULTS = ROOT / "docs" / "measurements" / "projects.json"
PAGE = ROOT / "docs" / "reference" / "projects.md"
COMMAND = "python -m tests.real_projects.page"
_COLUMNS = ("auto", "one", "two", "copies")
_WORDS = {
    EQUAL: "equal",
    WHOLE: "whole",
    compare.RESULTS: "results differ",
    ANNOUNCED: "differs",
    REFUSED: "refused",
    FAILS: "**fails**",
    "": "",
}
_INTRODUCTION = """\
# Real projects

Public projects on small made-up data and two virtual devices, beside plain Lightning: losses, gradients, weights,
logged values, predictions. `make test-projects` writes this page.

- *equal*: to rounding;
- *whole*: equal; a warning says that batches run as one micro-batch;
- *results differ*: weights are equal; a warning names logged values or outputs that are not;
- *differs*: a warning says why, and what to do;
- *refused*: an error names a way out; an empty cell has not run.

Dropout was off, and draws were replaced by constants. torchgeo and segmentation-models-pytorch ran in double precision,
with an `nms` of our own. Columns are `strategy="roundpipe"`, then `RoundPipeStrategy(num_microbatches=...)`, the last
one with `virtual_copies=True`. With the last column, two micro-batches are equal.

"""


def keep(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Writes results and page; of projects without results those that were written before stay."""
    before = read()
    # Without times, which change with every run.
    kept = {name: _without_seconds(found) if found else before.get(name, {}) for name, found in results.items()}
    kept = {name: found for name, found in kept.items() if found}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(text_of(kept), encoding="utf-8")
    return kept


def read() -> dict[str, Any]:
    """The results that were written last."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.is_file() else {}


def _without_seconds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_seconds(entry) for key, entry in value.items() if key not in ("seconds", "entry")}
    return value


def failing(results: Mapping[str, Any]) -> Iterator[str]:
    """A line for each row that fails."""
    for name, found in results.items():
        if found.get("problem"):
            yield f"{name} : {found['problem']}"
        for case, about in found.get("cases", {}).items():
            for variant, ended in about["variants"].items():
                if ended["outcome"] == FAILS and ended["detail"] != compare.NOT_PLAIN:
                    yield f"{name} {case} {variant}: {ended['detail']}"


def text_of(results: Mapping[str, Any]) -> str:
    """The page. Its table is set without spaces: what is between bars are the words of a page."""
    lines = ["|Project|Ran|`roundpipe`|1|2|2, copies|Set|", "|---|---|---|---|---|---|---|"]
    for name, found in results.items():
        own, version = next(iter(found.get("versions", {}).items()), (name, ""))
        label = f"{own} {version}".strip()
        for case, about in found.get("cases", {}).items():
            ended = about["variants"]
            outcomes = [_WORDS.get(ended.get(column, {}).get("outcome", ""), "") for column in _COLUMNS]
            to_set = f"`{about['set']}`" if ended.get("set", {}).get("outcome") == EQUAL else ""
            what = f"{case}: {about['what']}" if about["what"] else case
            lines.append(f"|{label}|{what}|{'|'.join(outcomes)}|{to_set}|")
            label = ""
        if found.get("problem"):
            lines.append(f"|{label}|{found['problem'].replace('|', ' ')}||||||")
    return _INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text_of(read()), encoding="utf-8")
