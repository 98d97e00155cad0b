"""What whoever creates an LLMDeployment may put into its pods: kinds of volumes and of variables' sources, Secrets, images.

The chart's value `tenants` widens the rules; the controller checks them before it renders anything. The definition says those
of them that CEL can see to the API server too (`crds`). docs/security.md says what is left. Pure: asks no API.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

from strata_operator.api import LLMDeployment
from strata_operator.api.pod import ENV_SOURCES, VOLUME_KINDS
from strata_operator.errors import InvalidInputError
from strata_planner.contract.values import ContractError, Value, from_json

# Projected into one volume; tokens of service accounts and certificates are left out.
_PROJECTED = frozenset({"configMap", "downwardAPI"})
# Strata's own (names.control_secret, names.epoch_name): whoever reads them is the controller of another deployment.
_OWN_SECRET = re.compile(r".*-(control|epoch-[0-9]+)")
_UNCONFINED = re.compile(r"(container\.apparmor|(container\.)?seccomp)\.security\.(alpha|beta)\.kubernetes\.io/.*")


class TenantRules(Value, frozen=True):
    """What is allowed beside the defaults. `volumes`: kinds, also of a projected volume's sources. `env_sources`: fields of
    `valueFrom`. `secrets`: names (`*` stands for anything) that `runtime.pod` may read; `referenced_secrets`: those that
    `model.tokenSecretRef` and `gateway.apiKeysSecretRef` may name. `images`: repositories and what they begin with, beside
    the operator's own runtime image; `*`: any.
    """

    volumes: tuple[str, ...] = ()
    env_sources: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    referenced_secrets: tuple[str, ...] = ("*",)
    images: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the JSON that the chart writes. Raises InvalidInputError."""
        try:
            return from_json(text, cls)
        except ContractError as error:
            raise InvalidInputError("--tenants", [f"{error}; write it as the chart's value `tenants`"]) from error

    def check(self, deployment: LLMDeployment, runtime_image: str) -> None:
        """Raises InvalidInputError with every problem. `runtime_image`: what deployments get that name none."""
        problems = list(_Check(self, deployment, runtime_image).problems())
        if problems:
            raise InvalidInputError(f"{deployment.namespace}/{deployment.name}", problems)


@dataclass(frozen=True, slots=True)
class _Check:
    """One deployment under some rules; every method yields sentences."""

    rules: TenantRules
    deployment: LLMDeployment
    runtime_image: str

    def problems(self) -> Iterator[str]:
        pod = self.deployment.spec.runtime.pod
        for number, volume in enumerate(pod.volumes):
            yield from self._volume(f"spec.runtime.pod.volumes[{number}]", volume)
        for number, variable in enumerate(pod.env):
            yield from self._source(f"spec.runtime.pod.env[{number}].valueFrom", variable.value_from or {})
        for note in pod.annotations:
            if _UNCONFINED.fullmatch(note):
                yield f"spec.runtime.pod.annotations: {note} would loosen the pod's security profile; remove it"
        yield from self._references()
        yield from self._image()

    def _volume(self, path: str, volume: Mapping[str, Any]) -> Iterator[str]:
        for kind, source in volume.items():
            if kind == "name":
                continue
            if kind == "secret":
                yield from self._secret(path, _text(source, "secretName"), self.rules.secrets, "secrets")
            elif kind not in VOLUME_KINDS and kind not in self.rules.volumes:
                yield _refused(f"{path}.{kind}", "volumes", [*VOLUME_KINDS, *self.rules.volumes])
            elif kind == "projected":
                yield from self._projected(f"{path}.{kind}", source)

    def _projected(self, path: str, projected: Any) -> Iterator[str]:
        sources = projected.get("sources") if isinstance(projected, Mapping) else None
        for number, each in enumerate(sources if isinstance(sources, list | tuple) else ()):
            for kind, source in each.items() if isinstance(each, Mapping) else ():
                if kind == "secret":
                    yield from self._secret(
                        f"{path}.sources[{number}]", _text(source, "name"), self.rules.secrets, "secrets"
                    )
                elif kind not in _PROJECTED and kind not in self.rules.volumes:
                    allowed = [*sorted(_PROJECTED), *self.rules.volumes]
                    yield _refused(f"{path}.sources[{number}].{kind}", "volumes", allowed)

    def _source(self, path: str, sources: Mapping[str, Any]) -> Iterator[str]:
        for kind, source in sources.items():
            if kind == "secretKeyRef":
                yield from self._secret(path, _text(source, "name"), self.rules.secrets, "secrets")
            elif kind not in ENV_SOURCES and kind not in self.rules.env_sources:
                yield _refused(f"{path}.{kind}", "envSources", [*ENV_SOURCES, *self.rules.env_sources])

    def _references(self) -> Iterator[str]:
        """The Secrets that fields of their own name."""
        token, keys = self.deployment.spec.model.token_secret_ref, self.deployment.spec.gateway.api_keys_secret_ref
        for path, reference in (("spec.model.tokenSecretRef", token), ("spec.gateway.apiKeysSecretRef", keys)):
            if reference is not None:
                yield from self._secret(path, reference.name, self.rules.referenced_secrets, "referencedSecrets")

    def _secret(self, path: str, name: str, patterns: Iterable[str], value: str) -> Iterator[str]:
        if _OWN_SECRET.fullmatch(name):
            yield f"{path}: Secret '{name}' is named like those of Strata's own keys, which pods may not read; use one of another name"
        elif not any(fnmatchcase(name, pattern) for pattern in patterns):
            yield (
                f"{path}: Secret '{name}' may not be read by pods of a deployment; name one of {_listed(patterns)}, or have "
                f"the administrator add it to the chart's value tenants.{value}"
            )

    def _image(self) -> Iterator[str]:
        image = self.deployment.spec.runtime.image
        own = [repository_of(self.runtime_image)] if self.runtime_image else []
        allowed = [*own, *self.rules.images]
        if image is None or not allowed or any(_is_from(image, each) for each in allowed):
            return
        yield (
            f"spec.runtime.image: {image} may not run here; use an image of {_listed(allowed)}, or have the administrator add "
            "its repository to the chart's value tenants.images"
        )


def repository_of(image: str) -> str:
    """An image's name without tag and digest."""
    name = image.partition("@")[0]
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}"


def _is_from(image: str, allowed: str) -> bool:
    """Whole parts of the name count: `example.org/team` allows `example.org/team/x`, and not `example.org/teams`."""
    repository, wanted = repository_of(image), allowed.rstrip("/")
    return allowed == "*" or repository == wanted or repository.startswith(f"{wanted}/")


def _refused(path: str, value: str, allowed: Iterable[str]) -> str:
    return f"{path}: is not allowed here; use one of {_listed(allowed)}, or have the administrator add it to the chart's value tenants.{value}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _text(source: Any, field: str) -> str:
    return str(source.get(field, "")) if isinstance(source, Mapping) else ""
