"""Tables and JSON."""

from __future__ import annotations

import json
import math

import pytest

from lightning_roundpipe.cli.output import Table, show

TABLE = Table(
    "Stages [per step]", ("stage", "units", "time"), [("0", "a[0]", "1.0 ms"), ("10", "b", "12 ms")], num_text=2
)


def test_plain_tables_are_aligned() -> None:
    assert TABLE.format().splitlines() == [
        "Stages [per step]",
        "stage  units    time",
        "-----  -----  ------",
        "0      a[0]   1.0 ms",
        "10     b       12 ms",
    ]


def test_a_report_has_an_empty_line_between_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    show({}, "first", TABLE, as_json=False)
    assert capsys.readouterr().out == f"first\n\n{TABLE.format()}\n"


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    show({"rate": math.inf, "rows": [{"share": 0.5}, (math.inf, 2)]}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"rate": None, "rows": [{"share": 0.5}, [None, 2]]}
