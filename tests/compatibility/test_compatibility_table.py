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
    all_rows,
    features_of,
    page_of,
)
from tests.support.rows import COMPLETE


@pytest.fixture(scope="module")
def rows() -> list[Feature]:
    return all_rows()


@pytest.fixture(scope="module")
def features(rows: list[Feature]) -> list[Feature]:
    return features_of(rows)


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


def test_every_row_has_a_test_that_runs(rows: list[Feature]) -> None:
    """In an environment with the extra ``test``: a row whose test is skipped for everybody shows nothing."""
    for path in sorted({row.place.partition(":")[0] for row in rows}):
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not re.search(r"mark\.(skip|xfail|gpu)\b", source), path
        for package in re.findall(r'importorskip\("(\w+)', source):
            assert importlib.util.find_spec(package), f"{path} needs {package}"
