"""This machine's Python for pods: read-only hostPath mounts of the interpreter, its libraries, its packages and the checkout.

So a two-megabyte image runs the operator, the gateway and the slots with the code under test, and nothing is built. The dicts are
Kubernetes' own: for `spec.runtime.pod.{volumes,volumeMounts,env}` of an LLMDeployment and for the chart's values. hostPath is not
allowed under the restricted pod security profile, so namespaces that enforce it see these pods only without the mounts.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.testbed.world import CHECKOUT

_LIBRARIES = tuple(Path(path) for path in ("/usr", "/lib", "/lib64"))


@dataclass(frozen=True)
class HostPython:
    """Pod spec fragments, each a list to be taken as it is."""

    volumes: list[dict[str, object]]
    volume_mounts: list[dict[str, object]]
    env: list[dict[str, str]]


def host_python(*extra: Path) -> HostPython:
    """Mounts and variables that make `python`, `strata` and the checkout work in a pod at the machine's own paths.

    `extra` folders are mounted read-only too (a model outside the checkout, say).
    """
    paths = _outermost(
        [*_LIBRARIES, Path(sys.base_prefix), *_environment(), CHECKOUT, *(path.resolve() for path in extra)]
    )
    names = {path: f"host-{number}" for number, path in enumerate(sorted(paths))}  # a path may hold what a name may not
    return HostPython(
        volumes=[{"name": name, "hostPath": {"path": str(path), "type": "Directory"}} for path, name in names.items()],
        volume_mounts=[{"name": name, "mountPath": str(path), "readOnly": True} for path, name in names.items()],
        env=[
            {"name": "PATH", "value": f"{sys.prefix}/bin:/usr/bin:/bin"},
            {"name": "PYTHONPATH", "value": os.pathsep.join(str(CHECKOUT / part) for part in _PACKAGE_ROOTS)},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
            {"name": "HOME", "value": "/tmp"},
        ],
    )


_PACKAGE_ROOTS = ("operator", "planner", "runtime")


def _environment() -> tuple[Path, ...]:
    """The virtual environment, and where it lies if that is a link: several checkouts may share one."""
    prefix = Path(sys.prefix)
    return prefix, prefix.resolve()


def _outermost(paths: list[Path]) -> list[Path]:
    """Existing folders that are in no other of the list, each once."""
    existing = sorted({path for path in paths if path.is_dir()})
    return [path for path in existing if not any(other in path.parents for other in existing)]
