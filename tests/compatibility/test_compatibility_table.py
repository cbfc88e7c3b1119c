"""The page of compatible features is up to date, and complete."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.compatibility.inventory import ONLY_IN, inventory
from tests.compatibility.table import (
    COMMAND,
    PAGE,
    ROOT,
    Feature,
    TableError,
    all_rows,
    count_line,
    features_of,
    page_of,
    rows_of,
)
from tests.support.rows import COMPLETE, KINDS


@pytest.fixture(scope="module")
def features() -> list[Feature]:
    return features_of(all_rows())


def base(name: str) -> str:
    """``precision (plugin object)`` is a row about ``precision``."""
    return name.split(" (")[0]


def test_the_page_is_up_to_date(features: list[Feature]) -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page_of(features), f"{PAGE.name} is not what the marks in the tests say: run {COMMAND}"


def test_kinds_that_the_page_does_not_list_are_held_to_be_complete() -> None:
    """The page says that all others work, which test_every_feature_of_lightning_has_a_row makes true."""
    assert set(COMPLETE) <= set(inventory())


def test_every_feature_of_lightning_has_a_row(features: list[Feature]) -> None:
    shown = {(feature.kind, base(feature.name)) for feature in features}
    missing = [
        f"{kind}: {name}"
        for kind, names in inventory().items()
        for name in names
        if (kind, name) not in shown and not ONLY_IN.get(kind, {}).get(name, "").startswith("until")
    ]
    assert not missing, f"{len(missing)} features without a test that shows them:\n" + "\n".join(missing)


def test_rows_are_names_that_lightning_knows(features: list[Feature]) -> None:
    """A typing error in a mark would be a row of its own. Phrases (``hooks set on the instance``) are no names."""
    known = inventory()
    unknown = [
        f"{feature.kind}: {feature.name}"
        for feature in features
        if feature.kind in known
        and " " not in base(feature.name)
        and base(feature.name) not in known[feature.kind]
        and base(feature.name) not in ONLY_IN.get(feature.kind, {})
    ]
    assert unknown == []


def test_every_row_has_a_test_that_runs() -> None:
    """In an environment with the extra ``test``: a row whose test is skipped for everybody shows nothing."""
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        source = path.read_text(encoding="utf-8")
        if rows_of(source, path.name):
            assert not re.search(r"mark\.(skip|xfail|gpu)\b", source), path.name
            for package in re.findall(r'importorskip\("(\w+)', source):
                assert importlib.util.find_spec(package), f"{path.name} needs {package}"


def test_the_inventory_is_about_kinds_of_rows() -> None:
    found = inventory()
    assert set(found) | set(ONLY_IN) <= set(KINDS)
    for kind, names in found.items():
        assert len(set(names)) == len(names) > 0, kind


def test_the_inventory_finds_what_users_know() -> None:
    found = inventory()
    for kind, some in {
        "Trainer argument": "precision max_time plugins barebones",
        "Trainer method": "fit validate test predict save_checkpoint",
        "LightningModule hook": "training_step configure_model backward on_after_backward val_dataloader setup",
        "LightningModule method": "log log_dict manual_backward save_hyperparameters load_from_checkpoint",
        "LightningDataModule": "prepare_data transfer_batch_to_device state_dict on_exception",
        "Callback hook": "on_sanity_check_start on_exception state_key on_before_zero_grad",
        "Precision": "32-true bf16-mixed 16-mixed 64-true transformer-engine",
        "Plugin": "AsyncCheckpointIO SLURMEnvironment LayerSync",
    }.items():
        assert set(some.split()) <= set(found[kind]), kind


def test_marks_are_found() -> None:
    source = """
A = {'x': pytest.param(1, marks=compat('Callback', 'A'))}
@compat('Callback', 'Timer; B', note='x')
@pytest.mark.parametrize('x', [1, pytest.param(2, marks=[compat('Callback', names='C', status='refused', note='n')])])
def test_a(x): ...
"""
    found = [(row.name, row.status, row.note, row.place) for row in rows_of(source, "t.py")]
    assert sorted(found) == [
        ("A", "equal", "", "t.py:2"),
        ("B", "equal", "x", "t.py:3"),
        ("C", "refused", "n", "t.py:4"),
        ("Timer", "equal", "x", "t.py:3"),
    ]


WRONG = {
    "compat('Callbacks', 'A')": "unknown kind 'Callbacks'",
    "compat('Callback', 'A', 'broken')": "unknown status 'broken'",
    "compat('Callback', 'A', 'refused')": "its note must say",
    "compat('Callback', '')": "no name",
    "compat('Callback', 'A;  B')": "no name",
    "compat('Callback', NAME)": "must be literals",
    "compat('Callback')": "must be literals",
}


@pytest.mark.parametrize("mark", WRONG)
def test_marks_that_make_no_row_are_errors(mark: str) -> None:
    with pytest.raises(TableError, match=WRONG[mark]) as error:
        rows_of(f"@{mark}\ndef test_a(): ...", "t.py")
    assert "t.py:1" in str(error.value)


def test_contradictions_are_errors() -> None:
    source = "compat('Callback', 'A')\ncompat('Callback', 'A', 'differs', 'so')\ncompat('Callback', 'A', note='other')"
    with pytest.raises(TableError, match=r"'A' is 'differs' at t.py:2, but 'equal' at t.py:1"):
        features_of(rows_of(source, "t.py"))
    with pytest.raises(TableError, match=r"has one note at t.py:2, and another one at t.py:1"):
        features_of(rows_of("compat('Logger', 'A', note='so')\ncompat('Logger', 'A', note='other')", "t.py"))


SHOWN = """
compat('Misuse', 'b|c', 'refused', 'use | less')
compat('Callback', 'A')
compat('Callback', 'A')
compat('Callback', 'B', note='n')
compat('Callback', 'C; D (`x`)', 'differs', 'd')
compat('Logger', 'W (`x`); W (y); a phrase; Z')
compat('Library', 'PEFT LoRA; Jupyter')
compat('Callback hook', 'setup')
compat('LightningDataModule', 'setup')
compat('Callback hook', 'teardown', 'refused', 'no')
compat('Misuse', 'a mistake', 'refused', 'The error says so.')
"""


def test_the_page() -> None:
    shown = features_of(rows_of(SHOWN, "t.py"))
    assert count_line(shown) == "15 features: 10 equal, 3 refused with a clear error, 2 with a difference"
    page = page_of(shown)
    lines = page.splitlines()
    refused, differs, works = (lines.index(f"## What {what}") for what in ("does not work", "differs", "works"))
    assert lines[refused + 4 : differs - 1] == ["| `teardown` | no |", "| `b\\|c` | use \\| less |"]
    assert lines[differs + 4 : works - 1] == ["| `C`, `D` (`x`) | d |"]
    assert lines[works + 2].startswith("All arguments, methods and attributes of the Trainer work")
    assert lines[works + 6 : works + 10] == [
        "- **Callback**: `A`",
        "- **Logger**: a phrase, `W` (`x`), `W` (y), `Z`",
        "- **PEFT**: `LoRA`",
        "- **Other libraries**: `Jupyter`",
    ]
    assert lines[-1] == "| `B` | n |"
