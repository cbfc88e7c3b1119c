"""Tables, JSON and names in short."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import sys

import pytest

from lightning_roundpipe.cli.output import Table, compress_names, print_json, print_report

TABLE = Table(
    "Stages [per step]", ("stage", "units", "time"), [("0", "a[0]", "1.0 ms"), ("10", "b", "12 ms")], num_text=2
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_tables_are_aligned() -> None:
    assert TABLE.format().splitlines() == [
        "Stages [per step]",
        "stage  units    time",
        "-----  -----  ------",
        "0      a[0]   1.0 ms",
        "10     b       12 ms",
    ]


def test_in_a_pipe_the_report_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    print_report("first", TABLE)
    assert capsys.readouterr().out == f"first\n\n{TABLE.format()}\n"


def test_on_a_terminal_rich_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    print_report("see [bold] text", TABLE)
    drawn = terminal.getvalue()
    # what looks like markup is text
    for text in ("see [bold] text", "Stages [per step]", "a[0]", "12 ms", "\N{BOX DRAWINGS LIGHT HORIZONTAL}"):
        assert text in drawn
    assert TABLE.format() not in drawn


def test_narrow_terminals_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "12")
    row = [f"a long cell {column}" for column in range(5)]
    print_report(Table("", [f"column {column}" for column in range(5)], [row]))
    last = terminal.getvalue().splitlines()[-1]
    assert all(cell in last for cell in row)


def test_on_a_terminal_without_rich_the_report_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    print_report(TABLE)
    assert terminal.getvalue() == f"{TABLE.format()}\n"


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
