"""Keys, certificates and kubeconfigs of a cluster that lives for minutes in a closed network.

One authority signs the API server's certificate and every client's; a client's certificate names its user and group, which the API
server authorizes as in any cluster. Called by the control plane, the nodes and the network.
"""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.testbed.addresses import API_PORT, API_SERVICE, BRIDGE
from tests.cluster.testbed.processes import call

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_SERVER_NAMES = (
    "DNS:kubernetes",
    "DNS:kubernetes.default",
    "DNS:kubernetes.default.svc",
    "DNS:kubernetes.default.svc.cluster.local",
    "DNS:localhost",
    f"IP:{BRIDGE}",
    f"IP:{API_SERVICE}",
    "IP:127.0.0.1",
)


@dataclass(frozen=True)
class Credentials:
    """The credential files in a directory."""

    directory: Path

    @property
    def authority(self) -> Path:
        """The certificate that every client trusts."""
        return self.directory / "ca.crt"

    @property
    def server_certificate(self) -> Path:
        """The API server's certificate."""
        return self.directory / "server.crt"

    @property
    def server_key(self) -> Path:
        """The API server's key."""
        return self.directory / "server.key"

    @property
    def service_account_key(self) -> Path:
        """The key that signs the tokens of service accounts."""
        return self.directory / "service-account.key"

    def create(self) -> None:
        """Make the authority, the API server's certificate and the key for service accounts."""
        self.directory.mkdir(parents=True)
        subject = ("-subj", "/CN=strata-testbed")
        self._openssl("req", "-x509", *_NEW_KEY, "-days", "30", *subject, "-keyout", "ca.key", "-out", "ca.crt")
        self._sign("server", "/CN=kube-apiserver", f"subjectAltName={','.join(_SERVER_NAMES)}")
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "service-account.key")

    def add_user(self, user: str, group: str | None = None) -> Path:
        """Sign a certificate for a user and write a kubeconfig with it; the kubeconfig's path."""
        name = self.kubeconfig(user).stem
        self._sign(name, f"/O={group}/CN={user}" if group else f"/CN={user}", "extendedKeyUsage=clientAuth")
        cluster = {"server": f"https://{BRIDGE}:{API_PORT}", "certificate-authority": str(self.authority)}
        keys = {kind: str(self.directory / f"{name}.{end}") for kind, end in (("certificate", "crt"), ("key", "key"))}
        configuration = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "testbed", "cluster": cluster}],
            "users": [{"name": user, "user": {f"client-{kind}": path for kind, path in keys.items()}}],
            "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": user}}],
            "current-context": "testbed",
        }
        self.kubeconfig(user).write_text(json.dumps(configuration, indent=1))
        return self.kubeconfig(user)

    def kubeconfig(self, user: str) -> Path:
        """Where the kubeconfig of a user lies."""
        return self.directory / f"{user.replace(':', '-')}.kubeconfig"

    def _sign(self, name: str, subject: str, extension: str) -> None:
        self._openssl("req", *_NEW_KEY, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (self.directory / f"{name}.ext").write_text(f"{extension}\n")
        serial = f"0x{secrets.token_hex(16)}"
        authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-set_serial", serial, "-days", "30")
        output = ("-extfile", f"{name}.ext", "-out", f"{name}.crt")
        self._openssl("x509", "-req", "-in", f"{name}.csr", *authority, *output)

    def _openssl(self, *arguments: str) -> None:
        call("openssl", *arguments, directory=self.directory)
