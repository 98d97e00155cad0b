"""Ours beside other servers: which rows come of what was measured, what a cell counts, what is installed for a server."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import serving, serving_cells
from benchmarks.load.streams import Seen
from benchmarks.peers import environments
from benchmarks.peers.environments import SERVERS, Peer
from benchmarks.peers.http_servers import KINDS, Wish
from benchmarks.serving_peers import CELLS, OURS, Measured, rows_of

FIGURES = st.lists(st.floats(0.01, 1000), min_size=1, max_size=5)
LOWER = {"prefix_ttft", "short_behind_long", "stall"}
PEER = SERVERS[0]


def test_every_cell_has_a_row_beside_every_server() -> None:
    measured = [
        Measured(title, cell, "", [2.0]) for title in (OURS, *(peer.title for peer in SERVERS)) for cell in CELLS
    ]
    rows = rows_of(measured, SERVERS, CELLS)
    assert [row.name for row in rows] == [f"{cell}_beside_{peer.name}" for cell in CELLS for peer in SERVERS]
    assert all(row.met and row.ratio == 1 for row in rows)


@given(
    cell=st.sampled_from(CELLS), own=FIGURES, settings=st.dictionaries(st.sampled_from(["a", "b"]), FIGURES, min_size=1)
)
def test_the_best_setting_of_a_server_counts(cell: str, own: list[float], settings: dict[str, list[float]]) -> None:
    measured = [
        Measured(OURS, cell, "", own),
        *(Measured(PEER.title, cell, name, each) for name, each in settings.items()),
    ]
    (row,) = rows_of(measured, [PEER], [cell])
    alone = [rows_of([measured[0], each], [PEER], [cell])[0] for each in measured[1:]]
    assert row.met == all(each.met for each in alone)
    assert row.ratio == (max if cell in LOWER else min)(each.ratio for each in alone if each.ratio is not None)
    assert row.value == alone[0].value


def test_a_server_that_gave_nothing_is_named_with_its_reason() -> None:
    (row,) = rows_of(
        [Measured(OURS, "stall", "", [1.0]), Measured(PEER.title, "stall", "small", reason="it wants a GPU")],
        [PEER],
        ["stall"],
    )
    assert not row.met
    assert row.value is None
    assert "ours 1" in row.unit
    assert row.peer == f"{PEER.title}: it wants a GPU"


def test_a_server_that_lost_one_setting_is_compared_by_the_other() -> None:
    measured = [Measured(OURS, "stall", "", [1.0]), Measured(PEER.title, "stall", "a", reason="refused")]
    (row,) = rows_of([*measured, Measured(PEER.title, "stall", "b", [2.0])], [PEER], ["stall"])
    assert (row.peer, row.ratio) == (f"{PEER.title}, b", 0.5)


@pytest.mark.parametrize("arguments", [["--peers", "sglang"], ["--peers", "vllm", "--cells", "speed"]])
def test_unknown_names_are_refused_with_those_there_are(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serving.main(arguments)
    assert "choose of" in capsys.readouterr().err


@pytest.mark.parametrize("drafts", [0, 4])
def test_every_server_has_a_command_for_every_setting(drafts: int) -> None:
    wish = Wish(Path("model"), 512, 4096, 16, 1, drafts)
    assert {peer.name for peer in SERVERS} == set(KINDS)
    assert all(kind.settings(wish) for kind in KINDS.values())
    command = KINDS["vllm"].command(Path(sys.executable), wish, 80)
    assert ("--speculative-config" in command) == bool(drafts)


def test_requirements_of_a_package_without_those_left_out() -> None:
    peer = Peer("httpx", "httpx", "", {}, ("httpx==0",), without=("httpcore",))
    everything = environments._requirements(Peer("httpx", "httpx", "", {}, ("httpx==0",)), Path(sys.executable))
    left = environments._requirements(peer, Path(sys.executable))
    assert [each for each in everything if not each.startswith("httpcore")] == left != everything


@asynccontextmanager
async def server(delays: Sequence[float]) -> AsyncIterator[int]:
    """Answers each request with a piece after each delay; the next request as well."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for delay in delays:
            await asyncio.sleep(delay)
            writer.write(b"data: " + json.dumps({"choices": []}).encode() + b"\n\n")
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


def test_streams_are_heard_piece_by_piece_to_their_end() -> None:
    async def run() -> list[Seen]:
        async with server([0, 0, 0]) as port, serving_cells._streams(port, [serving_cells.body([1], 3)] * 2) as seen:
            await serving_cells._until(seen, lambda: all(each.ended for each in seen))
        return seen

    for heard in asyncio.run(run()):
        assert heard.tokens == len(heard.moments) == 3
        assert heard.moments == sorted(heard.moments)
        assert heard.firsts[0] > 0


def test_a_refused_stream_ends_its_cell() -> None:
    async def run() -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        listening = await asyncio.start_server(refuse, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            async with serving_cells._streams(port, [serving_cells.body([1], 3)]) as seen:
                await serving_cells._until(seen, lambda: bool(seen[0].ended))

    with pytest.raises(serving_cells.CellError, match="400 Bad Request"):
        asyncio.run(run())
