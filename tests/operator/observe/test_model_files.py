"""Where config.json comes from, and what is said where it does not."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from strata_operator.errors import InvalidInputError, NotReadyError
from strata_operator.observe import hub
from strata_operator.observe.model_files import read_config, read_model


def test_a_claim_is_read_where_the_operator_mounts_it(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    environment = {"STRATA_MODELS_DIRECTORY": str(tmp_path)}
    assert read_config("pvc://models/llama", environment) == {"model_type": "llama"}


def test_a_claim_that_is_not_mounted_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"mount the claim models .* in the operator too"):
        read_config("pvc://models/llama", {"STRATA_MODELS_DIRECTORY": str(tmp_path)})


@pytest.mark.parametrize(
    ("content", "says"), [("{", "not valid JSON"), ("[]", "must hold an object"), ("[" * 100_000, "not valid JSON")]
)
def test_a_config_that_does_not_read_is_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidInputError, match=says):
        read_config(f"file://{tmp_path}", {})


def test_what_is_no_file_or_too_large_is_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(InvalidInputError, match="is no regular file"):
        read_config(f"file://{tmp_path}", {})
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(" " * (hub.MOST_BYTES + 1))
    with pytest.raises(InvalidInputError, match="larger than 8 MiB"):
        read_config(f"file://{tmp_path}", {})


class Answers:
    """An HTTP server: path -> status, headers and body. `asked`: paths and what they were authorised by."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.url = ""


@contextmanager
def answering() -> Iterator[Answers]:
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.asked.append((self.path, self.headers.get("Authorization")))
            code, headers, body = answers.of.get(self.path, (404, {}, b""))
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    answers.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def the_hub() -> Iterator[Answers]:
    with answering() as answers:
        yield answers


COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = b'{"model_type": "llama"}'
PLACE = "/owner/name/resolve/main/config.json"


def test_the_commit_is_recorded_and_the_token_is_shown(the_hub: Answers) -> None:
    the_hub.of[PLACE] = (200, {"X-Repo-Commit": COMMIT}, CONFIG)
    model = read_model("hf://owner/name", {"HF_ENDPOINT": the_hub.url, "HF_TOKEN": "ours"}, token="theirs")
    assert model.uri == f"hf://owner/name@{COMMIT}"
    assert model.config == {"model_type": "llama"}
    assert the_hub.asked == [(PLACE, "Bearer theirs")]


def test_a_hub_that_names_no_commit_leaves_the_uri(the_hub: Answers) -> None:
    the_hub.of["/owner/name/resolve/v1/config.json"] = (200, {}, CONFIG)
    assert read_model("hf://owner/name@v1", {"HF_ENDPOINT": the_hub.url}).uri == "hf://owner/name@v1"


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_a_hub_that_is_busy_is_asked_again(the_hub: Answers, code: int) -> None:
    the_hub.of[PLACE] = (code, {}, b"")
    with pytest.raises(NotReadyError, match=f"answers {code}"):
        read_model("hf://owner/name", {"HF_ENDPOINT": the_hub.url})


@pytest.mark.parametrize("code", [401, 403, 404, 410])
def test_what_the_hub_does_not_give_is_the_users_to_mend(the_hub: Answers, code: int) -> None:
    the_hub.of[PLACE] = (code, {}, b"")
    with pytest.raises(InvalidInputError, match=f"answers {code} .*; check name, revision and access token"):
        read_model("hf://owner/name", {"HF_ENDPOINT": the_hub.url})


def test_an_answer_that_breaks_off_is_asked_for_again(the_hub: Answers) -> None:
    the_hub.of[PLACE] = (200, {"Content-Length": "1000"}, CONFIG)
    with pytest.raises(NotReadyError, match="does not answer"):
        read_model("hf://owner/name", {"HF_ENDPOINT": the_hub.url})


def test_a_redirect_keeps_the_token_within_the_hub_and_drops_it_elsewhere(the_hub: Answers) -> None:
    with answering() as other:
        the_hub.of[PLACE] = (307, {"Location": "/new/name/resolve/main/config.json"}, b"")
        onward = {"Location": f"{other.url}/blob", "X-Repo-Commit": COMMIT}
        the_hub.of["/new/name/resolve/main/config.json"] = (302, onward, b"")
        other.of["/blob"] = (200, {}, CONFIG)
        model = read_model("hf://owner/name", {"HF_ENDPOINT": the_hub.url}, token="secret")
        assert model.uri == f"hf://owner/name@{COMMIT}"
        assert [token for _, token in the_hub.asked] == ["Bearer secret", "Bearer secret"]
        assert other.asked == [("/blob", None)]


def test_a_redirect_leads_to_no_other_protocol(the_hub: Answers) -> None:
    the_hub.of[PLACE] = (302, {"Location": "ftp://127.0.0.1/config.json"}, b"")
    with pytest.raises(InvalidInputError, match="redirects to what is not http"):
        read_model("hf://owner/name", {"HF_ENDPOINT": the_hub.url})


def test_a_body_without_end_is_read_to_a_bound(the_hub: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MOST_BYTES", 100_000)
    the_hub.of[PLACE] = (200, {}, b" " * 200_000)
    with pytest.raises(InvalidInputError, match="this is no config of a model"):
        read_model("hf://owner/name", {"HF_ENDPOINT": the_hub.url})
