"""The one container image of the testbed: a shell and little else, 2 MB, written here as an OCI archive.

Pods get Python, its packages and the checkout from the machine by `host_python`. Called by `nodes`.
"""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

from tests.cluster.testbed.processes import call

IMAGE = "strata.test/pod:1"
"""For pods: set as `spec.runtime.image` and as the chart's images. Never pulled: every node has it."""

_BUSYBOX = Path("/bin/busybox")
_APPLETS = (
    "cat",
    "echo",
    "env",
    "false",
    "hostname",
    "id",
    "ls",
    "nslookup",
    "ping",
    "ps",
    "sh",
    "sleep",
    "true",
    "wget",
)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(archive: Path) -> None:
    """Write the image as a tar in OCI layout (OCI Image Format Specification 1.0, image layout)."""
    layer = _layer()
    digest = _digest(layer)
    configuration = {
        "architecture": _MACHINES[platform.machine()],
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "Cmd": ["/bin/sleep", "2147483647"]},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    config = json.dumps(configuration).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
        }
    ).encode()
    named = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
    named["annotations"] = {"io.containerd.image.name": IMAGE}
    index = json.dumps({"schemaVersion": 2, "manifests": [named]}).encode()
    with tarfile.open(archive, "w") as tar:
        _add_file(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add_file(tar, "index.json", index)
        for blob in (layer, config, manifest):
            _add_file(tar, f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}", blob)


def import_image(archive: Path, socket: Path) -> None:
    """Give the image to one node's containerd."""
    call("ctr", f"--address={socket}", "--namespace=k8s.io", "images", "import", str(archive))


def _layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in ("bin", "dev", "etc", "proc", "sys", "tmp", "usr"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        _add_file(tar, "bin/busybox", _BUSYBOX.read_bytes(), 0o755)
        for applet in _APPLETS:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        _add_file(tar, "etc/passwd", b"root:x:0:0::/:/bin/sh\nstrata:x:65532:65532::/tmp:/bin/sh\n")
        _add_file(tar, "etc/group", b"root:x:0:\nstrata:x:65532:\n")
    return buffer.getvalue()


def _add_file(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _descriptor(media_type: str, content: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}
