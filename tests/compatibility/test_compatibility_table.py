"""The page of compatible features is up to date, and complete."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from tests.compatibility.inventory import ONLY_IN, inventory
from tests.compatibility.table import (
    COMMAND,
    PAGE,
    Feature,
    TableError,
    all_marks,
    count_line,
    features_of,
    marks_of,
    page_of,
)
from tests.support.rows import COMPLETE, KINDS

IMPORT = "from tests.support.rows import compat\n"


@pytest.fixture(scope="module")
def features() -> list[Feature]:
    return features_of(all_marks())


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


def test_every_row_has_a_test_that_runs(features: list[Feature]) -> None:
    """In an environment with the extra ``test``: a row whose tests are skipped for everybody shows nothing."""
    installed = functools.cache(lambda name: importlib.util.find_spec(name.split(".")[0]) is not None)
    skipped = [
        f"{feature.kind}: {feature.name} needs {feature.needs}"
        for feature in features
        if not any(all(map(installed, feature.needs[test])) for test in feature.tests)
    ]
    assert skipped == []


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


MARKED = {
    "decorator": (
        "@compat('Callback', 'Timer')\ndef test_a(): ...",
        [("Timer", ("t.py::test_a",))],
    ),
    "several": (
        "@compat('Callback', 'Timer')\n@compat('Callback', name='B', status='differs', note='x')\ndef test_a(): ...",
        [("Timer", ("t.py::test_a",)), ("B", ("t.py::test_a",))],
    ),
    "each": (
        "@compat_each('Callback', 'A B')\ndef test_a(): ...",
        [("A", ("t.py::test_a",)), ("B", ("t.py::test_a",))],
    ),
    "parameters": (
        "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=[compat('Callback', 'A')])])\ndef test_a(x): ...",
        [("A", ("t.py::test_a",))],
    ),
    "constants": (
        "A = {'x': pytest.param(1, marks=compat('Callback', 'A'))}\nB = [*A.values()]\n"
        "@pytest.mark.parametrize('x', B)\ndef test_a(x): ...\n"
        "def test_b(): ...\n@pytest.mark.parametrize('x', list(A))\ndef test_c(x): ...",
        [("A", ("t.py::test_a", "t.py::test_c"))],
    ),
    "skipped with a reason": (
        "@compat('Callback', 'A')\n@pytest.mark.skipif(not FOUND, reason='needs x')\ndef test_a(): ...",
        [("A", ("t.py::test_a",))],
    ),
}


@pytest.mark.parametrize("case", MARKED)
def test_marks_are_found(case: str) -> None:
    source, expected = MARKED[case]
    assert [(mark.name, mark.tests) for mark in marks_of(IMPORT + source, "t.py")] == expected


WRONG = {
    "unknown kind": ("@compat('Callbacks', 'A')\ndef test_a(): ...", "unknown kind 'Callbacks'"),
    "unknown status": ("@compat('Callback', 'A', 'broken')\ndef test_a(): ...", "unknown status 'broken'"),
    "no note": ("@compat('Callback', 'A', 'refused')\ndef test_a(): ...", "its note must say"),
    "no name": ("@compat('Callback', '')\ndef test_a(): ...", "no name"),
    "not literal": ("@compat('Callback', NAME)\ndef test_a(): ...", "must be literals"),
    "too few": ("@compat('Callback')\ndef test_a(): ...", "must be literals"),
    "raw mark": ("@pytest.mark.compat('Callback', 'A')\ndef test_a(): ...", "use compat"),
    "helper": ("@compat('Callback', 'A')\ndef helper(): ...", "is no test"),
    "body": ("def test_a():\n    compat('Callback', 'A')", "belongs to no test"),
    "unused constant": ("A = [compat('Callback', 'A')]\ndef test_a(): ...", "no test is parametrized with A"),
    "skipped": ("@compat('Callback', 'A')\n@pytest.mark.skip(reason='x')\ndef test_a(): ...", "marked 'skip'"),
    "skipped, first": ("@pytest.mark.skip\n@compat('Callback', 'A')\ndef test_a(): ...", "marked 'skip'"),
    "fails": ("@compat('Callback', 'A')\n@pytest.mark.xfail\ndef test_a(): ...", "marked 'xfail'"),
    "gpu only": ("@compat('Callback', 'A')\n@pytest.mark.gpu\ndef test_a(): ...", "marked 'gpu'"),
    "no reason": ("@compat('Callback', 'A')\n@pytest.mark.skipif(X)\ndef test_a(): ...", "skipif without a reason"),
    "skipped parameter": (
        "@pytest.mark.parametrize('x', [pytest.param(2, marks=[compat('Callback', 'A'), pytest.mark.skip])])\n"
        "def test_a(x): ...",
        "marked 'skip'",
    ),
    "gpu module": ("pytestmark = pytest.mark.gpu\n@compat('Callback', 'A')\ndef test_a(): ...", "marked 'gpu'"),
    "module": ("pytestmark = compat('Callback', 'A')\ndef test_a(): ...", "belongs to no test"),
    "class": ("@compat('Callback', 'A')\nclass TestIt:\n    def test_a(self): ...", "belongs to no test"),
}


@pytest.mark.parametrize("case", WRONG)
def test_marks_that_make_no_row_are_errors(case: str) -> None:
    source, message = WRONG[case]
    with pytest.raises(TableError, match=message) as error:
        marks_of(IMPORT + source, "t.py")
    assert "tests/t.py:" in str(error.value)


def test_another_parameter_may_be_skipped() -> None:
    source = (
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=compat('Callback', 'A')), "
        "pytest.param(2, marks=pytest.mark.skip)])\ndef test_a(x): ..."
    )
    assert [mark.name for mark in marks_of(source, "t.py")] == ["A"]


def test_contradictions_are_errors() -> None:
    source = (
        "@compat('Callback', 'A')\ndef test_a(): ...\n@compat('Callback', 'A', 'differs', 'so')\ndef test_b(): ...\n"
        "@compat('Callback', 'A', 'equal', 'other')\ndef test_c(): ..."
    )
    with pytest.raises(TableError, match=r"'A' is 'differs' at tests/t.py:3, but 'equal' at tests/t.py:1") as error:
        features_of(marks_of(source, "t.py"))
    assert "has one note at tests/t.py:5" in str(error.value)


SHOWN = (
    "@compat('Misuse', 'b|c', 'refused', 'use | less')\n@compat('Callback', 'A')\ndef test_a(): ...\n"
    "@compat('Callback', 'A')\ndef test_b(): ...\n@compat('Callback', 'B', note='n')\ndef test_c(): ...\n"
    "@compat('Callback', 'C', 'differs', 'd')\n@compat('Callback', 'D (`x`)', 'differs', 'd')\ndef test_f(): ...\n"
    "@compat('Logger', 'W (`x`)')\n@compat('Logger', 'W (y)')\n@compat('Logger', 'a phrase')\ndef test_d(): ...\n"
    "@compat('Logger', 'a phrase')\ndef test_c2():\n    pytest.importorskip('wandb')\n"
    "@compat('Logger', 'Z')\ndef test_e():\n    z = pytest.importorskip('z')\n"
    "@compat('Library', 'PEFT LoRA')\n@compat('Library', 'Jupyter')\ndef test_g(): ...\n"
    "@compat('Callback hook', 'setup')\n@compat('LightningDataModule', 'setup')\n"
    "@compat('Callback hook', 'teardown', 'refused', 'no')\ndef test_h(): ...\n"
    "@compat('Misuse', 'a mistake', 'refused', 'The error says so.')\ndef test_i(): ..."
)


@pytest.fixture
def shown() -> list[Feature]:
    return features_of(marks_of(IMPORT + SHOWN, "t.py"))


def test_the_page(shown: list[Feature]) -> None:
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
    assert "test_" not in page
