"""Slot names: labels of Kubernetes, distinct for distinct slots."""

import re

from hypothesis import given
from hypothesis import strategies as st

from strata_planner.naming import MAX_SLOT_NAME, slot_name

names = st.from_regex(r"\A[a-z0-9]([-a-z0-9.]{0,60}[a-z0-9])?\Z")


def test_short_names_are_kept() -> None:
    assert slot_name("chat", "gpu-a", "T4") == "chat-gpu-a-t4"
    assert slot_name("chat", "gpu-a", "Tesla-V100-SXM2-32GB") == "chat-gpu-a-tesla-v100-sxm2-32gb"


def test_what_shortening_would_merge_stays_apart() -> None:
    assert slot_name("chat", "a.b", "cpu") != slot_name("chat", "a-b", "cpu")
    assert slot_name("chat", "n" * 60 + "1", "cpu") != slot_name("chat", "n" * 60 + "2", "cpu")


@given(names, names, st.sampled_from(["cpu", "T4", "NVIDIA-A100-SXM4-80GB", "RTX 3090 Ti"]))
def test_every_name_is_a_label(deployment: str, node: str, kind: str) -> None:
    name = slot_name(deployment, node, kind)
    assert len(name) <= MAX_SLOT_NAME
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
    assert name == slot_name(deployment, node, kind)
