"""What the process says when it cannot start."""

from pathlib import Path

import pytest

from strata_runtime.errors import InputError
from strata_runtime.gateway.__main__ import serve, within_files
from strata_runtime.gateway.errors import StartError, UnauthorizedError
from strata_runtime.gateway.http.api_keys import read_api_keys
from strata_runtime.gateway.settings import Limits, Pages, read_settings
from strata_runtime.gateway.text.tokenizer import load_tokenizer

FLAGS = ["--port", "0", "--control-port", "0", "--served-model-name", "tiny", "--model-uri"]
SECRET = {"STRATA_CONTROL_KEY": "secret"}


def test_flags() -> None:
    settings = read_settings([*FLAGS, "/models/tiny", "--hold-seconds", "3"], SECRET)
    assert (settings.host, settings.port, settings.model_uri) == ("127.0.0.1", 0, "/models/tiny")
    assert (settings.limits.hold_seconds, settings.api_keys_file) == (3.0, None)
    assert settings.control_key == "secret"
    assert settings.pages == Pages()


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("*", ("*",)),
        ("http://localhost:3000", ("http://localhost:3000",)),
        (
            "https://chat.example.org, http://[::1]:80,app://strata",
            ("https://chat.example.org", "http://[::1]:80", "app://strata"),
        ),
    ],
)
def test_origins_of_pages(text: str, origins: tuple[str, ...]) -> None:
    settings = read_settings([*FLAGS, "/models/tiny", "--allowed-origins", text, "--docs"], SECRET)
    assert settings.pages == Pages(allowed_origins=origins, docs=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "example.org",
        "https://example.org/",
        "https://Example.org",
        "https://a,",
        "https://a:",
        "https://*.a",
        "null",
    ],
)
def test_what_is_no_origin(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings([*FLAGS, "/models/tiny", "--allowed-origins", text], SECRET)
    assert "write scheme://host or scheme://host:port" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--port", "65536"], ["--max-requests", "0"], ["--unknown"]])
def test_malformed_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_settings([*FLAGS, "/models/tiny", *flags], SECRET)
    assert end.value.code == 2
    assert flags[-1] in capsys.readouterr().err


def test_a_missing_secret() -> None:
    with pytest.raises(StartError, match="STRATA_CONTROL_KEY is empty: set it"):
        read_settings([*FLAGS, "/models/tiny"], {})


async def test_a_model_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder here"):
        await serve(read_settings([*FLAGS, str(tmp_path / "nowhere")], SECRET))


def test_a_model_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(StartError, match=r"cannot load a tokenizer from .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_an_api_keys_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(StartError, match="cannot be read"):
        read_api_keys(file)
    file.write_text("\n \n")
    with pytest.raises(StartError, match="has no key"):
        read_api_keys(file)
    file.write_text("one\n two \n")
    keys = read_api_keys(file)
    keys.check("Bearer two")
    with pytest.raises(UnauthorizedError):
        keys.check("Bearer three")
    read_api_keys(None).check(None)


@pytest.mark.parametrize(("files", "connections"), [(1024, 512), (8192, 4096), (10**6, 4096)])
def test_connections_leave_files_for_leaders_and_the_controller(files: int, connections: int) -> None:
    assert within_files(Limits(), files).max_connections == connections
