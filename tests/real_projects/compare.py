"""How a variant ends: by its outcome beside that of plain Lightning, its error, and what this package has said.

[Note: honest weights]
Adam divides a gradient by its size: an element whose gradient is rounding error alone (a bias before a batch norm) it
moves by a full step in a direction that means nothing. Such elements differ between any two ways to compute. So
gradients are compared at every step, beside the largest one of their tensor and of the model, and of weights those
elements whose gradients were always above rounding, beside the way that their tensor has gone. The others may go no
further than any weight.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Of the largest value of a tensor.
TOLERANCE = 1e-4
# Below this part of the largest gradient of a model there is rounding error alone.
_NOTHING = 1e-6
# Below this part of the largest gradient of its tensor the direction of an element is uncertain to 1e-3.
_UNCERTAIN = 1e-3
# By how much of the way of a tensor its weights may differ.
_OF_WAY = 2e-3
_MOST_NAMED = 3

EQUAL, WHOLE, REFUSED, FAILS = "equal", "equal (whole)", "refused with a way out", "FAILS"
RESULTS, ANNOUNCED = "results differ, announced", "training differs, announced"
PASSING = (EQUAL, WHOLE, RESULTS, ANNOUNCED, REFUSED)
NOT_PLAIN = "plain Lightning does not run"
# What is trained, of all that is compared.
_TRAINING = ("gradient", "weight", "buffer")
# What says that there is something else to know than a difference.
_NO_ANNOUNCEMENT = re.compile("is not compared with plain autograd|has no effect|but have no logger configured")
_OWN_BUG = "differs from plain autograd on the host"
_WAY_OUT = re.compile(
    r"\b(use|pass|give|set|return|write|make|call|move|choose|add|take|change|import|install|num_microbatches)\b", re.I
)


@dataclass(frozen=True)
class Verdict:
    """How it ends, and why."""

    outcome: str
    detail: str = ""


def differences(expected: Any, actual: Any, where: str = "", tolerance: float = TOLERANCE) -> Iterator[str]:
    """Where two nestings of plain data differ by more than rounding, in words."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if missing := sorted({*expected} ^ {*actual}):
            yield f"{where}: only one of both has {', '.join(missing[:_MOST_NAMED])}"
        for key in expected:
            if key in actual:
                yield from differences(expected[key], actual[key], f"{where}.{key}".lstrip("."), tolerance)
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            yield f"{where}: {len(actual)} entries instead of {len(expected)}"
        for index, (one, other) in enumerate(zip(expected, actual, strict=False)):
            yield from differences(one, other, f"{where}[{index}]", tolerance)
    elif _is_number(expected) and _is_number(actual):
        one, other = torch.as_tensor(expected).double(), torch.as_tensor(actual).double()
        if one.numel() == other.numel() == 1:
            one, other = one.reshape(()), other.reshape(())
        if one.shape != other.shape:
            yield f"{where}: {tuple(other.shape)} instead of {tuple(one.shape)}"
        elif (beyond := _distance(one, other)) > tolerance:
            yield f"{where}: off by {beyond:.1e} of the largest value {float(one.abs().nan_to_num().max()):.3g}"
    elif expected != actual:
        yield f"{where}: {actual!r} instead of {expected!r}"[:200]


def _is_number(value: Any) -> bool:
    return isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a part of the largest value; infinite if one alone is no finite number."""
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return math.inf
    if not finite.any():
        return 0.0
    return float((one - other)[finite].abs().max() / max(float(one[finite].abs().max()), 1e-6))


def _largest(tensors: Sequence[Tensor]) -> float:
    return max((float(tensor.abs().nan_to_num().max()) for tensor in tensors if tensor.numel()), default=0.0)


def gradient_differences(
    expected: Sequence[Mapping[str, Tensor]], actual: Sequence[Any], before: int = 0
) -> Iterator[str]:
    """See [Note: honest weights]. So many steps were ``before`` the first one."""
    if len(expected) != len(actual):
        yield f"gradients of {len(actual)} optimizer steps instead of {len(expected)}"
    for step, (one, other) in enumerate(zip(expected, actual, strict=False)):
        floor = _NOTHING * _largest([*one.values()])
        if missing := sorted({*one} ^ {*other}):
            yield f"gradients in step {step}: only one of both has {', '.join(missing[:_MOST_NAMED])}"
        for name in one.keys() & other.keys():
            off = _largest([other[name].double() - one[name].double()])
            largest = _largest([one[name]])
            # Gradients of later steps are those of weights that rounding has moved.
            if not off <= (1 + 4 * (before + step)) * max(TOLERANCE * largest, floor):
                yield f"gradient of {name} in step {step}: off by {off / max(largest, 1e-30):.1e} of its largest value"


def weight_differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[str]:
    """See [Note: honest weights]."""
    gradients = expected["gradients"]
    floors = [_NOTHING * _largest([*step.values()]) for step in gradients]
    trained = {name for step in gradients for name in step}
    if missing := sorted({*expected["weights"]} ^ {*actual["weights"]}):
        yield f"weights: only one of both has {', '.join(missing[:_MOST_NAMED])}"
    ways = [expected["weights"][name].double() - expected["start"][name] for name in trained & {*expected["start"]}]
    longest = _largest(ways)
    for name, one in expected["weights"].items():
        other, start, own_start = actual["weights"].get(name), expected["start"].get(name), actual["start"].get(name)
        if other is None:
            continue
        own = [(step[name], floor) for step, floor in zip(gradients, floors, strict=True) if name in step]
        if not own or start is None or own_start is None or start.shape != one.shape:
            yield from differences(one, other, f"buffer {name}", 10 * TOLERANCE)
            continue
        # A training that was resumed begins with what rounding has done to the first one.
        way, off = (one.double() - start).abs(), ((one.double() - start) - (other.double() - own_start)).abs()
        is_certain = torch.ones_like(one, dtype=torch.bool)
        for gradient, floor in own:
            is_certain &= gradient.abs() > max(_UNCERTAIN * _largest([gradient]), 100 * floor)
        allowed = torch.where(is_certain, _OF_WAY * way.max(), 2.1 * longest) + 1e-7 * one.abs().max()
        if bool((off > allowed).any()):
            worst = float((off / way.max().clamp_min(1e-30))[off > allowed].max())
            yield f"weight {name}: off by {worst:.1e} of the way that it has gone"


def moved(outcome: Mapping[str, Any]) -> bool:
    """Whether a training, if there was one, has changed weights."""
    trained = [t for t in outcome["trainings"] if t["gradients"]]
    return all(any(not torch.equal(t["start"].get(n, w), w) for n, w in t["weights"].items()) for t in trained)


def all_differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[str]:
    """Of two outcomes."""
    if len(expected["trainings"]) != len(actual["trainings"]):
        yield f"{len(actual['trainings'])} Trainers instead of {len(expected['trainings'])}"
    for one, other in zip(expected["trainings"][:1], actual["trainings"][:1], strict=False):
        yield from itertools.islice(differences(one["start"], other["start"], "weight before the training"), 1)
    num_steps = 0
    for one, other in zip(expected["trainings"], actual["trainings"], strict=False):
        yield from differences(one["steps"], other["steps"], "step")
        yield from gradient_differences(one["gradients"], other["gradients"], num_steps)
        num_steps += len(one["gradients"])
        yield from weight_differences(one, other)
        yield from differences(one["logged"], other["logged"], "logged")
        yield from differences(one["outputs"], other["outputs"], "evaluated")
    yield from differences(expected["kept"], actual["kept"])


def judged(
    plain: Mapping[str, Any] | None,
    actual: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
    said: Sequence[str],
    num_microbatches: int,
) -> Verdict:
    """The verdict on a variant.

    Args:
        plain: the outcome of plain Lightning, None if it has none.
        actual: that of the variant.
        error: what has ended it.
        said: warnings of this package.
        num_microbatches: that were wanted: with several, a step that has one is whole.
    """
    if plain is None:
        return Verdict(FAILS, NOT_PLAIN)
    if error is not None:
        text = first_lines(error["text"])
        if error["is_ours"] and _WAY_OUT.search(error["text"]):
            return Verdict(REFUSED, text)
        return Verdict(FAILS, f"{error['kind']}{'' if error['is_ours'] else ' (not of this package)'}: {text}")
    if actual is None:
        return Verdict(FAILS, "no outcome")
    if bugs := [text for text in said if _OWN_BUG in text]:
        return Verdict(FAILS, first_lines(bugs[0]))
    announced = [text for text in said if not _NO_ANNOUNCEMENT.search(text)]
    if found := [*all_differences(plain, actual)]:
        named = "; ".join(found[:_MOST_NAMED]) + (f"; {len(found)} in all" if len(found) > _MOST_NAMED else "")
        if announced and num_microbatches > 1:
            outcome = ANNOUNCED if any(text.startswith(_TRAINING) for text in found) else RESULTS
            return Verdict(outcome, f"{first_lines(announced[0])} [{named}]")
        return Verdict(FAILS, f"different without a word: {named}")
    counts = [count for training in actual["trainings"] for count in training["num_microbatches"]]
    if num_microbatches > 1 and counts and max(counts) == 1:
        if announced:
            return Verdict(WHOLE, first_lines(announced[0]))
        return Verdict(FAILS, "equal, but whole without a word")
    return Verdict(EQUAL, first_lines(announced[0]) if announced else "")


def first_lines(text: str, most: int = 400) -> str:
    """The beginning of a message, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]} ..."
