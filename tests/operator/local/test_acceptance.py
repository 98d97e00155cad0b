"""What is kept of drafts from run to run: enough of it, once, of this model and wish alone."""

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from strata_operator.local.acceptance import Keeper, Subject, acceptance_kept, add, kept_acceptance, read, subject_of
from strata_operator.observe.model_identity import model_identity
from strata_planner.contract.acceptance import DraftCounts
from strata_planner.contract.control import GatewayStatus
from strata_planner.contract.plan import NO_SPECULATION, Plan, Speculation
from tests.operator.fakes import a_plan

WISH = Speculation("suffix", 4)
SUBJECT = Subject("a", WISH)
ENOUGH, FEW = DraftCounts(100, 400, 300, 500), DraftCounts(10, 40, 30, 50)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "strata"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return folder


def status(counts: DraftCounts | None, incarnation: str = "one") -> GatewayStatus:
    return GatewayStatus(incarnation, 1, 1, 0, counts)


def kept() -> DraftCounts | None:
    record = read(SUBJECT)
    return record.counts if record else None


def test_runs_add_up() -> None:
    add(SUBJECT, ENOUGH)
    assert kept() == ENOUGH
    add(SUBJECT, ENOUGH)
    record = read(SUBJECT)
    assert record is not None
    assert 790 <= record.counts.draft_tokens <= 800  # those before have faded a little


def test_few_drafts_are_not_kept(cache: Path) -> None:
    add(SUBJECT, FEW)
    assert not cache.exists()


@pytest.mark.parametrize("other", [Subject("b", WISH), Subject("a", Speculation("suffix", 5))], ids=["model", "wish"])
def test_another_subject_has_figures_of_its_own(other: Subject) -> None:
    add(SUBJECT, ENOUGH)
    assert read(other) is None
    shutil.copy(SUBJECT.file, other.file)
    assert read(other) is None


def test_a_half_written_file_is_measured_anew() -> None:
    add(SUBJECT, ENOUGH)
    SUBJECT.file.write_bytes(SUBJECT.file.read_bytes()[:50])
    assert kept() is None
    add(SUBJECT, ENOUGH)
    assert kept() == ENOUGH


def test_a_cache_that_cannot_be_written_is_no_trouble(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    add(SUBJECT, ENOUGH)
    assert "not kept" in caplog.text


def test_each_count_is_kept_once_and_few_ones_wait_for_more() -> None:
    keeper = Keeper(SUBJECT)
    for counts in (None, FEW, FEW, ENOUGH, ENOUGH):
        keeper.take(status(counts))
    keeper.take(None)
    assert kept() == ENOUGH


def test_a_gateway_that_was_started_anew_counts_from_nothing() -> None:
    keeper = Keeper(SUBJECT)
    keeper.take(status(DraftCounts(50, 200, 150, 250)))
    keeper.take(status(DraftCounts(50, 200, 150, 250), "two"))
    assert kept() == ENOUGH


@pytest.fixture
def plan(model: Path) -> Plan:
    return msgspec.structs.replace(a_plan("a", model_uri=f"file://{model}"), speculation=WISH)


async def test_what_a_deployment_counted_is_kept_when_it_ends(plan: Plan) -> None:
    with pytest.raises(asyncio.CancelledError):
        async with acceptance_kept(plan, lambda: status(ENOUGH)):
            raise asyncio.CancelledError
    record = kept_acceptance(plan.model_uri, WISH)
    assert record is not None
    assert record.counts == ENOUGH


async def test_it_is_kept_now_and_then(plan: Plan) -> None:
    asked = asyncio.Event()

    def gateway() -> GatewayStatus:
        asked.set()
        return status(ENOUGH)

    async with acceptance_kept(plan, gateway, every_seconds=0):
        await asyncio.wait_for(asked.wait(), 10)
        assert kept_acceptance(plan.model_uri, WISH) is not None


def test_nothing_is_kept_where_nothing_is_guessed(model: Path) -> None:
    assert subject_of(f"file://{model}", NO_SPECULATION) is None


def test_a_model_is_told_from_another_training_of_its_shapes(model: Path) -> None:
    before = model_identity(f"file://{model}")
    assert before == model_identity(f"file://{model}")
    data = bytearray((model / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (model / "model.safetensors").write_bytes(data)
    assert model_identity(f"file://{model}") != before


@pytest.mark.parametrize(
    ("uri", "is_known"),
    [
        (f"hf://owner/name@{'0' * 40}", True),
        ("hf://owner/name", False),
        ("hf://owner/name@main", False),
        ("pvc://claim/path", False),
        ("file:///nowhere", False),
    ],
)
def test_which_models_can_be_told_apart(uri: str, is_known: bool) -> None:  # noqa: FBT001  a case of the table
    assert (model_identity(uri) is not None) == is_known
