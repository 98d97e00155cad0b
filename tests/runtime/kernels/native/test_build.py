"""The native library: built from its sources, loaded only when made from them, done without where no compiler is."""

import ctypes
import shutil
from pathlib import Path

import pytest

from strata_runtime.kernels import native
from strata_runtime.kernels.native import build

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler is here")


def a_folder(path: Path, text: str) -> Path:
    visible = '__attribute__((visibility("default")))'
    (path / "one.cpp").write_text(
        f'extern "C" {visible} const char* strata_digest() {{ return STRATA_DIGEST; }}\n{text}\n'
    )
    return path


@needs_compiler
def test_the_library_here_is_made_from_the_sources_here() -> None:
    library = native.library()
    assert library is not None
    library.strata_digest.restype = ctypes.c_char_p
    assert library.strata_digest().decode() == build.digest()


@needs_compiler
def test_a_library_of_other_sources_is_not_loaded(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "int answer() { return 42; }")
    built = build.build(folder)
    assert native._load(built, build.digest(folder)) is not None
    a_folder(tmp_path, "int answer() { return 43; }")
    assert native._load(built, build.digest(folder)) is None
    assert native._load(tmp_path / "absent.so", build.digest(folder)) is None
    assert list(tmp_path.glob(".*.so")) == []


@needs_compiler
def test_what_does_not_compile_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "this is not C++")
    with pytest.raises(build.BuildError, match=r"one\.cpp"):
        build.build(folder)
    assert [each.name for each in tmp_path.iterdir()] == ["one.cpp"]


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(build.BuildError, match="install one"):
        build.build(tmp_path)
