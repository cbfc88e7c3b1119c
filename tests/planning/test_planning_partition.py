"""Partition: its form and its lookup tables."""

from __future__ import annotations

import pytest

from lightning_roundpipe.planning import Partition, Stage, StageKind, keep_together

F, FUSED, B = StageKind.FORWARD, StageKind.FUSED, StageKind.BACKWARD


def make_partition(num_calls: int, *pieces: tuple[StageKind, int, int]) -> Partition:
    return Partition(num_calls, tuple(Stage(index, *piece) for index, piece in enumerate(pieces)))


# ---------------------------------------------------------------------------------------------------------------------
# The form of a partition


ASYMMETRIC = make_partition(10, (F, 0, 5), (F, 5, 8), (FUSED, 8, 10), (B, 6, 8), (B, 3, 6), (B, 0, 3))


def test_each_call_has_its_forward_and_its_backward_stage() -> None:
    assert ASYMMETRIC.forward_stages == (0, 0, 0, 0, 0, 1, 1, 1, 2, 2)
    assert ASYMMETRIC.backward_stages == (5, 5, 5, 4, 4, 4, 3, 3, 2, 2)
    assert ASYMMETRIC.num_stages == 6
    assert ASYMMETRIC.is_training
    evaluation = make_partition(2, (F, 0, 1), (F, 1, 2))
    assert not evaluation.is_training
    assert (evaluation.forward_stages, evaluation.backward_stages) == ((0, 1), ())


def test_text_names_stages_with_their_calls() -> None:
    assert ASYMMETRIC.format() == "F 0-4 | F 5-7 | fused 8-9 | B 6-7 | B 3-5 | B 0-2"
    assert make_partition(1, (FUSED, 0, 1)).format() == "fused 0"
    assert make_partition(0, (FUSED, 0, 0)).format() == "fused (no calls)"


@pytest.mark.parametrize(
    ("num_calls", "pieces", "message"),
    [
        (2, [], "at least one stage"),
        (-1, [(F, 0, 1)], "num_calls=-1"),
        (2, [(F, 0, 1)], r"Stage 0 \(F 0\) is the last one and leaves calls uncovered"),
        (3, [(F, 0, 1), (F, 2, 3)], r"Stage 1 \(F 2\) must be number 1 and begin at call 1"),
        (3, [(F, 0, 2), (F, 1, 3)], r"Stage 1 \(F 1-2\) must be number 1 and begin at call 2"),
        (2, [(F, 0, 1), (FUSED, 1, 2)], r"Stage 1 \(fused 1\) is the last one"),
        (3, [(F, 0, 1), (FUSED, 1, 2), (B, 0, 1)], r"Stage 1 \(fused 1\) must hold the last calls, up to 3"),
        (3, [(F, 0, 2), (FUSED, 2, 3), (B, 0, 1), (B, 1, 2)], r"Stage 2 \(B 0\) must be number 2 and begin at call 2"),
        (2, [(F, 0, 1), (B, 0, 1)], r"F stages alone, got F 0 \| B 0: reorder"),
        (2, [(FUSED, 0, 2), (FUSED, 0, 2)], "one fused stage, then B stages"),
        (2, [(F, 0, 1), (B, 0, 1), (FUSED, 1, 2)], "got F 0 .* B 0 .* fused 1: reorder"),
        (2, [(FUSED, 0, 2), (F, 0, 2)], "F stages first"),
        (2, [(F, 0, 0), (FUSED, 0, 2)], r"Stage 0 \(F \(no calls\)\) has no calls: drop it"),
        (2, [(F, 0, 2), (FUSED, 2, 2), (B, 0, 2)], "Stage 1 .* has no calls"),
        (0, [(FUSED, 0, 0), (B, 0, 0)], "Stage 0 .* has no calls"),
    ],
)
def test_stages_of_another_form_are_refused(
    num_calls: int, pieces: list[tuple[StageKind, int, int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_partition(num_calls, *pieces)


def test_stages_numbered_wrongly_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Stage 1 .* must be number 0"):
        Partition(1, (Stage(1, FUSED, 0, 1),))


@pytest.mark.parametrize(("index", "start", "stop"), [(-1, 0, 1), (0, 2, 1), (0, -1, 1)])
def test_impossible_stages_are_refused(index: int, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="Stage"):
        Stage(index, F, start, stop)


def test_keep_together_takes_out_forward_cuts_only() -> None:
    made = make_partition(6, (F, 0, 2), (F, 2, 4), (FUSED, 4, 6), (B, 3, 4), (B, 0, 3))
    assert keep_together(made, []) == made
    assert keep_together(made, [(1, 3)]).format() == "F 0-3 | fused 4-5 | B 3 | B 0-2"
    assert keep_together(made, [(3, 5)]).format() == "F 0-1 | fused 2-5 | B 0-1"
    assert keep_together(made, [(0, 6)]).format() == "fused 0-5"
    forward_only = make_partition(4, (F, 0, 2), (F, 2, 4))
    assert keep_together(forward_only, [(1, 3)]).format() == "F 0-3"
    with pytest.raises(ValueError, match="does not lie within the 6 calls"):
        keep_together(made, [(5, 7)])
