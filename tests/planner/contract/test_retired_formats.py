"""Formats that 0.1.0 measured and no plan could ask for: its profiles are still read, and nothing else knows the names."""

import msgspec

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import BITS_OF_FORMAT, FORMAT_NAMES, RETIRED
from strata_planner.contract.values import from_json, to_json
from tests.planner.builders import a_profile


def test_a_profile_that_names_them_is_read() -> None:
    profile = a_profile()
    old = msgspec.structs.replace(profile, decode_efficiency=profile.decode_efficiency | dict.fromkeys(RETIRED, 0.1))
    assert from_json(to_json(old), DeviceProfile) == old


def test_they_can_be_neither_asked_for_nor_stored() -> None:
    assert RETIRED
    assert not RETIRED & {*FORMAT_NAMES, *BITS_OF_FORMAT}
