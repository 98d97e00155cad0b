"""A file is replaced whole or not at all, and the cache is where the user wants it."""

import stat
from pathlib import Path

import pytest

from strata_planner.contract.store import cache_folder, replacing, write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kept.json"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write_whole(path, b"old")
    with replacing(path) as scratch:
        scratch.write_bytes(b"ne")
        assert path.read_bytes() == b"old"
        scratch.write_bytes(b"new")
    assert path.read_bytes() == b"new"


def test_what_fails_leaves_the_old_file_and_no_scratch(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write_whole(path, b"old")

    def half(scratch: Path) -> None:
        scratch.write_bytes(b"ne")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"), replacing(path) as scratch:
        half(scratch)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_private_is_so_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Path, "replace", lambda scratch, _: seen.append(stat.S_IMODE(scratch.stat().st_mode)))
    write_whole(tmp_path / "secret", b"secret", mode=0o600)
    assert seen == [0o600]


def test_the_cache_is_where_the_user_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "strata"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "strata"
