"""The operator's verbs on the wire: what the API server is really sent."""

from collections.abc import Iterator

import kubernetes.client
import pytest

from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import (
    CONFIG_MAPS,
    PODS,
    STATEFUL_SETS,
    AlreadyExistsError,
    ForbiddenError,
    HttpWire,
    Kube,
    RefusedError,
    ServerError,
    StaleError,
)
from tests.operator.fake_api import FakeApi, serving

CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": "ns"}, "data": {"a": "b"}}


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi()) as fake:
        yield fake


@pytest.fixture
def kube(api: FakeApi) -> Kube:
    return kube_of(api.url)


def kube_of(url: str) -> Kube:
    configuration = kubernetes.client.Configuration()
    configuration.host = url
    configuration.retries = False
    return Kube(HttpWire(kubernetes.client.ApiClient(configuration)))


async def test_apply_is_a_server_side_apply(api: FakeApi, kube: Kube) -> None:
    await kube.apply(CONFIG_MAP)
    (request,) = api.requests
    assert (request.method, request.path) == ("PATCH", "/api/v1/namespaces/ns/configmaps/x")
    assert request.content_type == "application/apply-patch+yaml"
    assert request.query == {"fieldManager": ["strata-operator"], "force": ["true"]}
    assert request.body == CONFIG_MAP


async def test_status_goes_to_its_subresource(api: FakeApi, kube: Kube) -> None:
    await kube.apply(
        {"kind": "LLMDeployment", "metadata": {"name": "chat", "namespace": "ns"}, "status": {"phase": "Ready"}},
        "status",
    )
    (request,) = api.requests
    assert request.path == "/apis/strata.dev/v1alpha1/namespaces/ns/llmdeployments/chat/status"
    assert request.content_type == "application/apply-patch+yaml"


async def test_creating_twice_says_that_it_exists(api: FakeApi, kube: Kube) -> None:
    await kube.create(CONFIG_MAPS, CONFIG_MAP)
    with pytest.raises(AlreadyExistsError):
        await kube.create(CONFIG_MAPS, CONFIG_MAP)


async def test_absent_objects_are_none_and_deleting_them_is_done(api: FakeApi, kube: Kube) -> None:
    assert await kube.get(CONFIG_MAPS, "ns", "x") is None
    await kube.delete(STATEFUL_SETS, "ns", "x")


async def test_a_forced_deletion_names_the_uid_and_spares_another_pod(api: FakeApi, kube: Kube) -> None:
    path = "/api/v1/namespaces/ns/pods/a-0"
    api.put(path, {"metadata": {"name": "a-0", "namespace": "ns", "uid": "new"}})
    await kube.delete(PODS, "ns", "a-0", uid="old", grace_seconds=0)
    assert path in api.objects
    await kube.delete(PODS, "ns", "a-0", uid="new", grace_seconds=0)
    assert path not in api.objects
    assert api.requests[-1].body["gracePeriodSeconds"] == 0


async def test_lists_select_by_label_over_namespaces_or_in_one(api: FakeApi, kube: Kube) -> None:
    for namespace, app in (("one", "strata"), ("two", "strata"), ("two", "other")):
        name = f"{app}-{namespace}"
        api.put(
            f"/api/v1/namespaces/{namespace}/pods/{name}",
            {"metadata": {"name": name, "namespace": namespace, "labels": {"app": app}}},
        )
    assert len(await kube.list(PODS)) == 3
    assert [pod["metadata"]["name"] for pod in await kube.list(PODS, "two", "app=strata")] == ["strata-two"]


async def test_a_server_that_is_away_is_not_ready() -> None:
    with pytest.raises(NotReadyError, match="no answer from the API server"):
        await kube_of("http://127.0.0.1:1").list(PODS)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (401, RefusedError),
        (403, ForbiddenError),
        (404, StaleError),
        (409, AlreadyExistsError),
        (410, RefusedError),
        (422, RefusedError),
        (429, RefusedError),
        (500, ServerError),
        (503, ServerError),
        (504, ServerError),
    ],
)
@pytest.mark.parametrize("verb", ["list", "create", "replace", "apply"])
async def test_every_answer_is_the_error_that_its_code_stands_for_and_is_asked_for_once(
    api: FakeApi, kube: Kube, code: int, error: type[NotReadyError], verb: str
) -> None:
    """What lives on a wire without sockets lives with the same errors: `Kube` makes them of the code, whatever the wire."""
    api.refuse = lambda _: (code, "the reason")
    ask = {"list": lambda: kube.list(CONFIG_MAPS), "create": lambda: kube.create(CONFIG_MAPS, CONFIG_MAP),
           "replace": lambda: kube.replace(CONFIG_MAPS, CONFIG_MAP), "apply": lambda: kube.apply(CONFIG_MAP)}[verb]  # fmt: skip
    with pytest.raises(error, match="the reason") as raised:
        await ask()
    assert raised.type is error
    assert len(api.requests) == 1


async def test_long_lists_come_in_pages(api: FakeApi, kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata_operator.observe.kube.PAGE", 2)
    for name in "abcde":
        api.put(f"/api/v1/namespaces/ns/pods/{name}", {"metadata": {"name": name, "namespace": "ns"}})
    pages = [page async for page in kube.pages(PODS)]
    assert [[pod["metadata"]["name"] for pod in page.things] for page in pages] == [["a", "b"], ["c", "d"], ["e"]]
    assert {page.version for page in pages} == {5}
