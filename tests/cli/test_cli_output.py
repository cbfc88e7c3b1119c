"""Tables, JSON and names in short."""

from __future__ import annotations

import json
import math

import pytest

from lightning_roundpipe.cli.output import Table, compress_names, print_json, print_report

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
    print_report("first", TABLE)
    assert capsys.readouterr().out == f"first\n\n{TABLE.format()}\n"


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"rate": math.inf, "rows": [{"share": 0.5}, (math.inf, 2)]})
    assert json.loads(capsys.readouterr().out) == {"rate": None, "rows": [{"share": 0.5}, [None, 2]]}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["head"], "head"),
        (["layers.0", "layers.1", "layers.2"], "layers.0-2"),
        (["embed", *(f"layers.{i}" for i in range(7)), "norm"], "embed, layers.0-6, norm"),
        (["h.8.mlp", "h.9.mlp", "h.10.mlp"], "h.8-10.mlp"),
        (["shared", "shared", "shared"], "shared x3"),
        (["a.0", "a.2"], "a.0, a.2"),
        (["a.0", "a.1", "a.1"], "a.0-1, a.1"),
        (["a.0.1", "a.1.1", "a.1.2"], "a.0-1.1, a.1.2"),
        (["a.1", "b.2"], "a.1, b.2"),
        (["block1.conv2", "block1.conv3"], "block1.conv2-3"),
        (["a", "b", "c", "d", "e"], "a ... e (5 calls)"),
    ],
)
def test_names_are_shortened_to_ranges(names: list[str], text: str) -> None:
    assert compress_names(names) == text
