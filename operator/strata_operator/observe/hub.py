"""The Hugging Face Hub as far as planning needs it: one small file of a model, and the commit that it is from.

Called by model_files. What the hub answers decides who is asked to act: the user (no such model, no access) or nobody (busy,
away: it is tried again). A token is shown to the hub alone, never to a host that it redirects to.
"""

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO
from urllib.parse import urlsplit

from strata_operator.errors import InvalidInputError, NotReadyError

HUB = "https://huggingface.co"
SECONDS = 20.0  # for an answer to begin, and for all of it
MOST_BYTES = 8 << 20  # the largest config.json known has less than one
_CHUNK_BYTES = 1 << 16
_COMMIT = re.compile("[0-9a-f]{40}")
_COMMIT_HEADER = "X-Repo-Commit"
_PASSING = {408, 425, 429}  # beside 5xx


@dataclass(frozen=True, slots=True)
class HubFile:
    """`uri`: with the commit that the file is from, so that whoever reads it later reads the same model."""

    data: bytes
    uri: str


def fetch(uri: str, file: str, environment: Mapping[str, str], token: str = "") -> HubFile:
    """A file of an `hf://owner/name[@revision]`.

    Raises InvalidInputError (change uri or token) and NotReadyError (the hub is busy or away: try again).
    """
    name, _, revision = uri.removeprefix("hf://").partition("@")
    address = f"{environment.get('HF_ENDPOINT') or HUB}/{name}/resolve/{revision or 'main'}/{file}"
    token = token or environment.get("HF_TOKEN", "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    redirects = _Redirects()
    opener = urllib.request.build_opener(redirects)
    request = urllib.request.Request(address, headers=headers)  # noqa: S310  the hub's address is the administrator's
    try:
        with opener.open(request, timeout=SECONDS) as answer:
            commit = redirects.commit or answer.headers.get(_COMMIT_HEADER) or revision
            return HubFile(
                _bounded(answer, address, uri), f"hf://{name}@{commit}" if _COMMIT.fullmatch(commit) else uri
            )
    except urllib.error.HTTPError as error:
        raise _refusal(uri, address, error) from error
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise NotReadyError(f"{uri}: {address} does not answer: {error}; check the network and try again") from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https alone, without the token on another host, and keeps the commit that the hub names first."""

    def __init__(self) -> None:
        self.commit = ""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        self.commit = self.commit or str(headers.get(_COMMIT_HEADER) or "")
        if urlsplit(newurl).scheme not in {"http", "https"}:
            raise urllib.error.HTTPError(newurl, code, "redirects to what is not http", headers, fp)
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and _origin(newurl) != _origin(req.full_url):
            following.remove_header("Authorization")
        return following


def _origin(address: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(address)
    return parts.scheme, parts.hostname, parts.port


def _bounded(answer: IO[bytes], address: str, uri: str) -> bytes:
    """Neither more than a bound nor for longer than one: whoever answers may drip for ever."""
    data, end = bytearray(), time.monotonic() + SECONDS
    while part := answer.read(_CHUNK_BYTES):
        data += part
        if len(data) > MOST_BYTES:
            raise InvalidInputError(
                uri, [f"{address} is larger than {MOST_BYTES >> 20} MiB: this is no config of a model"]
            )
        if time.monotonic() > end:
            raise TimeoutError(f"not all of it came in {SECONDS:g} s")
    # http.client says nothing of a body that ends early when it is read in parts.
    missing = getattr(answer, "length", None)
    if missing:
        raise http.client.IncompleteRead(bytes(data), missing)
    return bytes(data)


def _refusal(uri: str, address: str, error: urllib.error.HTTPError) -> InvalidInputError | NotReadyError:
    if error.code in _PASSING or error.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
        return NotReadyError(f"{uri}: {address} answers {error.code} {error.reason}; it is tried again")
    return InvalidInputError(
        uri, [f"{address} answers {error.code} {error.reason}; check name, revision and access token"]
    )
