"""Per-layer tables: what they answer, what they refuse, and the published files they are made from."""

from pathlib import Path

import pytest

from benchmarks.reference.published_tables import helix_table, llmpq_tables
from strata_planner.contract.formats import FormatName
from strata_planner.costs.source import Phase, Rates
from strata_planner.costs.tables import LayerTable, LayerTables, TableShape
from strata_planner.errors import InputError
from tests.planner.builders import a_model, a_profile
from tests.planner.question.test_cluster import ODD_YAML

LAYER = a_model().layers[0]
SHAPE = TableShape.of(LAYER)
RATES = Rates(a_profile(), "bfloat16", 16, "T4")

YAML = f"""
devices: [T4]
source: a test
layer: {{hiddenSize: 128, heads: 4, kvHeads: 2, headDim: 32, linearParameters: {LAYER.linear_parameters}}}
prefillMilliseconds: {{16: [[1024, 10], [2048, 22]], 4: [[1024, 40]]}}
decodeMilliseconds: {{16: [[2, 5], [4, 6]]}}
promptTokens: 512
pastTokens: 512
"""


def sources(text: str = YAML) -> LayerTables:
    return LayerTables((LayerTable.from_yaml(text, "t4.yaml"),))


KNOWN = {
    "a measured prompt": ("dense", Phase(2, 512, 256), 10e-3, ""),
    "between two batches": ("dense", Phase(3, 512, 256), 16e-3, ""),
    "more than was measured": ("dense", Phase(8, 512, 256), 44e-3, ""),
    "another prompt length": ("dense", Phase(4, 256, 128), 10e-3, ", scaled from 512 tokens a prompt"),
    "a measured step": ("dense", Phase(2, 1, 512), 5e-3, ""),
    "another past": ("dense", Phase(3, 1, 700), 5.5e-3, ", scaled from 512 keys"),
    "four bits": ("int4", Phase(2, 512, 256), 40e-3, ""),
}


@pytest.mark.parametrize("case", KNOWN)
def test_answers_with_its_name(case: str) -> None:
    name, phase, seconds, scaled = KNOWN[case]
    answer = sources().layer(LAYER, name, RATES, phase)
    assert answer is not None
    assert answer.seconds == pytest.approx(seconds)
    assert answer.source == f"layer table, a test{scaled}"


UNKNOWN: dict[str, tuple[FormatName, Rates, Phase]] = {
    "bits that were not measured": ("int8", RATES, Phase(2, 512, 256)),
    "a phase that was not": ("int4", RATES, Phase(2, 1, 512)),
    "another device": ("dense", Rates(a_profile(), "bfloat16", 16, "V100-16GB"), Phase(2, 512, 256)),
    "single precision": ("dense", Rates(a_profile(), "float32", 16, "T4"), Phase(2, 512, 256)),
    "eight-bit keys": ("dense", Rates(a_profile(), "bfloat16", 8, "T4"), Phase(2, 512, 256)),
    "eight-bit activations": ("w8a8", RATES, Phase(2, 512, 256)),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_says_nothing_about(case: str) -> None:
    name, rates, phase = UNKNOWN[case]
    assert sources().layer(LAYER, name, rates, phase) is None


def test_says_nothing_about_layers_of_another_shape_heads_and_steps() -> None:
    model = a_model(intermediate_size=512)
    assert sources().layer(model.layers[0], "dense", RATES, Phase(2, 512, 256)) is None
    assert sources().head(model, RATES, 1) is None
    assert sources().step(model, RATES, Phase(2, 1, 512)) is None


BROKEN = {
    "[[1024, 10], [2048, 22]]": ("[[2048, 10], [1024, 22]]", "row 2: 1024 follows 2048; rows must rise"),
    "[[1024, 40]]": ("[[1024, -1]]", "prefillMilliseconds at 4 bits, row 1"),
    "16: [[2, 5], [4, 6]]": ("5: [[2, 5]]", "decodeMilliseconds at 5 bits: bits are one of 16, 8, 4, 3"),
    "[[2, 5], [4, 6]]": ("[]", "decodeMilliseconds at 16 bits: at least one point"),
    "[T4]": ("[]", "devices is empty"),
    "promptTokens: 512": ("prompts: 512", "prompts"),
    "source: a test": ("source: [", "not valid YAML"),
}


@pytest.mark.parametrize("old", BROKEN)
def test_says_which_row_breaks_which_rule(old: str) -> None:
    new, message = BROKEN[old]
    with pytest.raises(InputError) as error:
        LayerTable.from_yaml(YAML.replace(old, new, 1), "t4.yaml")
    assert str(error.value).startswith("layer table t4.yaml: ")
    assert message in str(error.value)


def test_a_table_without_numbers_is_refused() -> None:
    text = "\n".join(line for line in YAML.splitlines() if "Milliseconds" not in line)
    with pytest.raises(InputError, match="give prefillMilliseconds or decodeMilliseconds"):
        LayerTable.from_yaml(text, "t4.yaml")


@pytest.mark.parametrize("text", ODD_YAML.values(), ids=ODD_YAML)
def test_odd_yaml_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        LayerTable.from_yaml(text, "t4.yaml")


LLMPQ = """device,bits,batch,prefill_ms_512_tokens,decode_ms_past_512
T4,4,2,2844.4,5.09
T4,4,4,5654.0,12.01
V100,16,8,75.62,3.18
"""


def test_llmpqs_file_becomes_a_table_per_device(tmp_path: Path) -> None:
    file = tmp_path / "llmpq.csv"
    file.write_text(LLMPQ, encoding="utf-8")
    first, second = llmpq_tables(file, SHAPE, {"V100": ["V100-16GB", "V100-32GB"]})
    assert (first.devices, second.devices) == (("T4",), ("V100-16GB", "V100-32GB"))
    assert first.prefill_milliseconds == {4: ((1024, 2844.4), (2048, 5654.0))}
    assert second.decode_milliseconds == {16: ((8, 3.18),)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LLMPQ.replace("device,", "gpu,"), "row 1: the columns must be device, bits"),
        (LLMPQ.replace("5.09", "fast"), "row 2: .* must be numbers"),
        (LLMPQ.replace(",3.18", ""), "row 4: 3 numbers where 4 are needed"),
        (LLMPQ.replace("T4,4,4,", "T4,4,1,"), "row 2: 512 follows 1024"),
    ],
)
def test_llmpqs_file_is_checked(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "llmpq.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        llmpq_tables(file, SHAPE, {})


def test_helixs_folder_becomes_a_table_without_its_zero_row(tmp_path: Path) -> None:
    (tmp_path / "prompt_bs2time.csv").write_text("0,0\n250,18\n500,30\n", encoding="utf-8")
    (tmp_path / "decode_bs2time.csv").write_text("0,0\n2,7.1\n", encoding="utf-8")
    table = helix_table(tmp_path, SHAPE, ["T4x2"])
    assert table.prefill_milliseconds == {16: ((250, 18), (500, 30))}
    assert table.decode_milliseconds == {16: ((2, 7.1),)}
    answer = LayerTables((table,)).layer(LAYER, "dense", Rates(a_profile(), "float16", 16, "T4x2"), Phase(1, 375, 187))
    assert answer is not None
    assert answer.seconds == pytest.approx(24e-3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompt_bs2time\.csv: No such file"):
        helix_table(tmp_path, SHAPE, ["T4"])
