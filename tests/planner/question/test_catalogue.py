"""Names and labels that find a product, and figures that a datasheet shows."""

import pytest

from strata_planner.contract.formats import FORMAT_NAMES
from strata_planner.question.catalogue import catalogue

LABELS = {
    "Tesla-T4": "T4",
    "T4": "T4",
    "Tesla-V100-SXM2-32GB": "V100-32GB",
    "Tesla-V100-PCIE-16GB": "V100-16GB",
    "Tesla-P100-PCIE-12GB": "P100-12GB",
    "NVIDIA-A100-SXM4-40GB": "A100-40GB",
    "A100-SXM4-80GB": "A100-80GB",
    "NVIDIA-A100-80GB-PCIe": "A100-80GB",
    "NVIDIA-A800-SXM4-80GB": "A800-80GB",
    "NVIDIA-H100-80GB-HBM3": "H100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA-H200": "H200",
    "NVIDIA-L4": "L4",
    "NVIDIA-L40S": "L40S",
    "NVIDIA-A10G": "A10G",
    "NVIDIA-GeForce-RTX-3090-Ti": "RTX-3090Ti",
    "NVIDIA-RTX-A6000": "RTX-A6000",
    "A5000": "RTX-A5000",
    "A4000": "RTX-A4000",
    "NVIDIA-A40": "A40",
    "NVIDIA-GB200": "GB200",
    "NVIDIA-B200": "B200",
    "NVIDIA-B300-SXM6-AC": "B300",
    "NVIDIA-H200-NVL": "H200-NVL",
    "NVIDIA-GeForce-RTX-5090": "RTX-5090",
    "GeForce RTX 5080": "RTX-5080",
    "NVIDIA GeForce RTX 5070 Ti": "RTX-5070Ti",
    "NVIDIA-GeForce-RTX-5070": "RTX-5070",
    "NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition": "RTX-PRO-6000",
    "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition": "RTX-PRO-6000-Server",
    "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition": "RTX-PRO-6000-Max-Q",
    "AMD_Instinct_MI300X_OAM": "MI300X",
    "AMD Instinct MI300X": "MI300X",
    "cpu": "cpu",
}


@pytest.mark.parametrize(("label", "name"), LABELS.items())
def test_labels_find_their_product(label: str, name: str) -> None:
    assert catalogue().name_of(label) == name


@pytest.mark.parametrize("label", ["", "X100", "NVIDIA", "T", "V100", "A100"])
def test_an_unknown_or_ambiguous_label_is_not_guessed(label: str) -> None:
    assert catalogue().name_of(label) is None


def test_no_label_names_two_products() -> None:
    for name, entry in catalogue().devices.items():
        assert {catalogue().name_of(label) for label in (name, *entry.labels)} == {name}


EIGHT_BIT_PRODUCTS = {"w8a8", "w8a8_static", "fp8_a8"}  # twice the 16-bit rate, which shares are of


@pytest.mark.parametrize("name", [*catalogue().devices, "cpu"])
def test_a_profile_is_plausible_and_says_its_source(name: str) -> None:
    profile = catalogue().profile(name)
    assert profile.source.startswith(("published: ", "assumed"))
    assert "assumed" in profile.source  # efficiencies are, until measured
    assert profile.memory_bytes >= 4 << 30
    # A gigabyte per second to some TB/s; 16-bit products at least as fast as float32 ones.
    assert 1e9 < profile.bandwidth_bytes_per_second < 1e13
    assert profile.flops_per_second >= profile.float32_flops_per_second > 0
    for efficiency in (profile.decode_efficiency, profile.prefill_efficiency):
        assert {"dense", "int8", "int4", "int3"} <= set(efficiency) <= set(FORMAT_NAMES)
        limit = {name: 2 if name in EIGHT_BIT_PRODUCTS else 1 for name in efficiency}
        assert all(0 < share <= limit[name] for name, share in efficiency.items())
