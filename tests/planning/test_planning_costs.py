"""CallCost and CostProfile: validation, and JSON there and back. Machines whose devices differ."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import CallCost, CostProfile, DeviceTraits, Machine, SharedLink

PROFILE = CostProfile((CallCost("embed", 0.5, 0, 100, 100, 8, 64), CallCost("layers.0", 7.43, 15.83)))

times = st.floats(0, 1e6)
sizes = st.integers(0, 2**40)
costs = st.builds(CallCost, st.text(min_size=1, max_size=9), times, times, sizes, sizes, sizes, sizes)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(costs, max_size=5))
def test_a_profile_survives_json(calls: list[CallCost]) -> None:
    profile = CostProfile(tuple(calls))
    assert CostProfile.from_json(profile.to_json()) == profile


def test_a_profile_survives_a_file_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    PROFILE.save(path)
    assert CostProfile.load(path) == PROFILE
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"costs\.json: The cost profile is not JSON"):
        CostProfile.load(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "non-empty string, got ''"),
        ({"forward_ms": -1.0}, "forward_ms must be a finite number of ms >= 0, got -1.0"),
        ({"forward_ms": float("nan")}, "forward_ms .* got nan"),
        ({"backward_ms": "3"}, "backward_ms .* got '3'"),
        ({"backward_ms": True}, "backward_ms .* got True"),
        ({"weight_bytes": -1}, "weight_bytes must be an integer number of bytes >= 0, got -1"),
        ({"gradient_bytes": 1.5}, "gradient_bytes .* got 1.5"),
        ({"input_bytes": False}, "input_bytes .* got False"),
        ({"forward_ms": 1e300}, r"forward_ms .* got 1e\+300"),
        ({"backward_ms": 10**400}, r"backward_ms .* got 10+\.\.\."),
        ({"workspace_bytes": 2**63}, "workspace_bytes .* got 9223372036854775808"),
    ],
)
def test_impossible_costs_of_a_call_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CallCost(**{"name": "layer", "forward_ms": 1.0, "backward_ms": 1.0, **arguments})  # type: ignore[arg-type]


def test_a_profile_of_other_entries_is_refused() -> None:
    with pytest.raises(ValueError, match=r"calls\[0\] must be a CallCost, got 3"):
        CostProfile((3,))  # type: ignore[arg-type]


ENTRY = {"name": "a", "forward_ms": 1, "backward_ms": 2}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], 'JSON object with a list "calls"'),
        ({"version": 1, "calls": 3}, 'a list "calls"'),
        ({"version": 1, "calls": "x" * 500}, r"x\.\.\.: write it"),
        ({"calls": []}, "has version None, this release reads 1"),
        ({"version": 99, "calls": []}, "has version 99"),
        ({"version": 1, "calls": [ENTRY, 7]}, r"calls\[1\] .* must be an object, got 7"),
        ({"version": 1, "calls": [{"name": "a"}]}, r"calls\[0\] .* lacks the fields \['forward_ms', 'backward_ms'\]"),
        ({"version": 1, "calls": [{**ENTRY, "speed": 1}]}, r"calls\[0\] .* unknown fields \['speed'\]"),
        ({"version": 1, "calls": [{**ENTRY, "forward_ms": "1"}]}, r"calls\[0\] .*forward_ms must be .* got '1'"),
        ({"version": 1, "calls": [{**ENTRY, "forward_ms": float("nan")}]}, r"calls\[0\] .*got nan"),
    ],
)
def test_json_that_is_no_profile_is_refused(document: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostProfile.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speed": 0.0}, "speed of a device must be a finite number > 0, got 0.0"),
        ({"speed": math.inf}, "speed of a device must be a finite number > 0, got inf"),
        ({"speed": math.nan}, "speed of a device must be a finite number > 0, got nan"),
        ({"memory_bytes": -1}, "memory_bytes must be >= 0, got -1"),
        ({"h2d_bytes_per_ms": 0.0}, "h2d_bytes_per_ms must be > 0"),
        ({"d2h_bytes_per_ms": math.nan}, "d2h_bytes_per_ms must be > 0"),
    ],
)
def test_impossible_traits_of_a_device_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceTraits(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "rate", "message"),
    [
        ((0,), 1.0, r"at least two devices, got \(0,\): leave it out"),
        ((1, 1), 1.0, "at least two devices"),
        ((0, 1), 0.0, "bytes_per_ms must be > 0"),
    ],
)
def test_impossible_shared_links_are_refused(devices: tuple[int, ...], rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedLink(devices, rate)


def test_a_shared_link_of_a_list_is_the_same_as_one_of_a_tuple() -> None:
    """JSON has lists; plans are kept by the machine that they are for."""
    link = SharedLink(**json.loads('{"devices": [0, 1], "bytes_per_ms": 5.0}'))
    assert link == SharedLink((0, 1), 5.0)
    assert len({Machine(2, shared_links=(link,)), Machine(2, shared_links=(SharedLink((0, 1), 5.0),))}) == 1


def test_a_machine_knows_what_its_devices_have_in_common() -> None:
    alike = Machine(2, 100, 5.0, 6.0)
    assert alike.is_uniform
    assert alike.traits == (DeviceTraits(1.0, 100, 5.0, 6.0),) * 2
    assert alike.memories == (100,)
    assert Machine(2).memories == ()
    same = DeviceTraits(0.5, 70)
    assert Machine(2, devices=(same, DeviceTraits(0.5, 70))).is_uniform
    mixed = Machine(3, devices=(same, DeviceTraits(memory_bytes=50), DeviceTraits()))
    assert not mixed.is_uniform
    assert mixed.memories == (50, 70)
    assert mixed.traits[0] is same
