"""API keys: who may ask. Read once at start; a key is compared in constant time."""

import hmac
from collections.abc import Mapping
from pathlib import Path

from strata_runtime.gateway.errors import StartError, UnauthorizedError


class ApiKeys:
    """The accepted keys; with none everyone may ask."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def tenant(self, headers: Mapping[str, str]) -> bytes:
        """Who asks, of those who may: by the key that was checked. Without keys all are one."""
        if not self._keys:
            return b""
        scheme, _, bearer = (headers.get("authorization") or "").partition(" ")
        offered = [bearer.strip() if scheme.lower() == "bearer" else "", (headers.get("x-api-key") or "").strip()]
        return next((key.encode() for key in offered if key.encode("utf-8", "surrogateescape") in self._keys), b"")

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """Of a request. Raises UnauthorizedError."""
        self.check(headers.get("authorization"), headers.get("x-api-key"))

    def check(self, authorization: str | None, api_key: str | None = None) -> None:
        """Check the headers Authorization and x-api-key, one of which is enough. Raises UnauthorizedError, which never repeats a key."""
        if not self._keys:
            return
        scheme, _, bearer = (authorization or "").partition(" ")
        offered = [bearer.strip() if scheme.lower() == "bearer" else "", (api_key or "").strip()]
        if not any(offered):
            raise UnauthorizedError(
                "no API key: send the header 'Authorization: Bearer <key>' with one of the keys of this deployment",
                code="missing_api_key",
            )
        candidates = [each.encode("utf-8", "surrogateescape") for each in offered if each]
        pairs = [(key, candidate) for key in self._keys for candidate in candidates]
        matches = [hmac.compare_digest(key, candidate) for key, candidate in pairs]  # all of them: no early end to time
        if not any(matches):
            raise UnauthorizedError(
                "this API key is not one of this deployment's keys: check the key, or ask its owner for one",
                code="invalid_api_key",
            )


def read_api_keys(path: Path | None) -> ApiKeys:
    """One key per line, blank lines ignored. Raises StartError for a file that is unreadable or has no key."""
    if path is None:
        return ApiKeys()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--api-keys-file {path} cannot be read: {error}") from error
    keys = tuple(key for line in lines if (key := line.strip()))
    if not keys:
        raise StartError(f"--api-keys-file {path} has no key: write one per line, or leave the flag out to let all in")
    return ApiKeys(keys)
