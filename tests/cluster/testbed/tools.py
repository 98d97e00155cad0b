"""The programs of a Kubernetes cluster, built from the Go module proxy into a cache outside the checkout.

`scripts/build-cluster-tools` builds them, the testbed asks `tool_path` where they lie. A tool is identified by the bytes of its
module's `go.mod` and `go.sum` and by its linker flags, so it is built only when missing or changed. Knows nothing of clusters.
"""

import fcntl
import hashlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DIRECTORY_VARIABLE = "STRATA_TESTBED_TOOLS"
MODULES = Path(__file__).resolve().parent.parent / "tools"

KUBERNETES_VERSION = "1.34.3"
HELM_VERSION = "3.22.0"

_KUBERNETES_FLAGS = (
    f"-X k8s.io/component-base/version.gitVersion=v{KUBERNETES_VERSION}",
    "-X k8s.io/component-base/version.gitMajor=1",
    "-X k8s.io/component-base/version.gitMinor=34",
)
_HELM_FLAGS = (
    f"-X helm.sh/helm/v3/internal/version.version=v{HELM_VERSION}",
    # What `helm template` and `helm lint` take for `.Capabilities.KubeVersion` when no cluster is asked.
    "-X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1",
    "-X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=34",
)


class ToolError(RuntimeError):
    """A tool is missing or did not build: run `scripts/build-cluster-tools` and read what it prints."""


@dataclass(frozen=True)
class Tool:
    """One program: the folder under `tools/` with its Go module, its package, and what the linker sets in it."""

    name: str
    module: str
    package: str
    linker_flags: tuple[str, ...] = ()


TOOLS: tuple[Tool, ...] = (
    Tool("etcd", "kubernetes", "go.etcd.io/etcd/server/v3"),
    *(
        Tool(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_FLAGS)
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kube-proxy",
            "kubectl",
        )
    ),
    Tool("helm", "helm", "helm.sh/helm/v3/cmd/helm", _HELM_FLAGS),
    Tool("coredns", "coredns", "github.com/coredns/coredns"),
    Tool("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
)
_BY_NAME = {tool.name: tool for tool in TOOLS}


def cache_dir() -> Path:
    """Where built tools live: `$XDG_CACHE_HOME/strata/bin`, by default `~/.cache/strata/bin`; for tests, whose cache is empty, as they were started."""
    told = os.environ.get(DIRECTORY_VARIABLE)
    return Path(told) if told else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strata" / "bin"


def named(name: str) -> Tool:
    """The tool of that name; a `ToolError` lists the names that exist."""
    if name not in _BY_NAME:
        raise ToolError(f"no tool is called {name!r}; the tools are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def expected_path(tool: Tool) -> Path:
    """Where this version of the tool lies once it is built."""
    digest = hashlib.sha256()
    for part in ("go.mod", "go.sum"):
        digest.update((MODULES / tool.module / part).read_bytes())
    digest.update("\0".join(tool.linker_flags).encode())
    return cache_dir() / digest.hexdigest()[:16] / tool.name


def tool_path(name: str) -> Path:
    """The built program; a `ToolError` says how to build it."""
    path = expected_path(named(name))
    if not path.exists():
        raise ToolError(f"{name} is not built (looked at {path}); run scripts/build-cluster-tools {name}")
    return path


def missing(tools: Sequence[Tool] = TOOLS) -> list[Tool]:
    """Those of the tools that are not built yet at the version the modules ask for."""
    return [tool for tool in tools if not expected_path(tool).exists()]


@contextmanager
def _build_lock() -> Iterator[None]:
    """One build at a time on a machine: a second builder says that it waits, then finds everything there."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another build, which holds {lock.name}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(tools: Sequence[Tool] = TOOLS) -> None:
    """Build what is missing, in order, with a line of progress for each. Raises `ToolError` where Go fails."""
    with _build_lock():
        todo = missing(tools)
        for number, tool in enumerate(todo, 1):
            print(f"[{number}/{len(todo)}] building {tool.name} from {tool.package}", flush=True)
            started = time.monotonic()
            _build_one(tool)
            seconds = time.monotonic() - started
            megabytes = expected_path(tool).stat().st_size / 1e6
            print(f"[{number}/{len(todo)}] built {tool.name}: {megabytes:.0f} MB in {seconds:.0f} s", flush=True)


def _build_one(tool: Tool) -> None:
    path = expected_path(tool)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{tool.name}.{os.getpid()}")
    flags = " ".join(("-s", "-w", *tool.linker_flags))
    command = ["nice", "-n", "5", "go", "build", "-p", "2", "-mod=readonly", "-ldflags", flags]
    environment = {**os.environ, "CGO_ENABLED": "0"}
    try:
        subprocess.run(
            [*command, "-o", str(unfinished), tool.package], cwd=MODULES / tool.module, env=environment, check=True
        )
        unfinished.rename(path)
    except FileNotFoundError as error:
        raise ToolError("the Go compiler is not on PATH: install Go 1.24 or newer (https://go.dev/dl)") from error
    except subprocess.CalledProcessError as error:
        raise ToolError(f"{tool.name} did not build: go exited with {error.returncode}, its output is above") from error
    finally:
        unfinished.unlink(missing_ok=True)
