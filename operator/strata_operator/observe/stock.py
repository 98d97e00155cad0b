"""The cluster as it is known: the last version of every object that decides something, and what has changed since somebody asked.

Fed with lists, with events of watches and with the answers to the operator's own writes, in any order: of each object the newest version
counts, whatever comes late or twice. Read by the controller at every look. Pure; knows no connection.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from strata_operator.decide.view import NodeView, node_view
from strata_operator.observe.cut import PodKept, cut, cut_pod
from strata_operator.observe.kube import (
    CLAIMS,
    CONFIG_MAPS,
    DEPLOYMENTS_OF_STRATA,
    NODES,
    PODS,
    SECRETS,
    STATEFUL_SETS,
    Kind,
)
from strata_operator.observe.snapshot import Snapshot
from strata_operator.render.names import INSTANCE_LABEL, SLOT_LABEL
from strata_operator.render.requests import Amounts
from strata_operator.render.slots import pod_label

Object = dict[str, Any]
Key = tuple[str, str]  # namespace and name
KINDS = (DEPLOYMENTS_OF_STRATA, NODES, PODS, STATEFUL_SETS, CONFIG_MAPS, SECRETS, CLAIMS)
_OWNED = (PODS, STATEFUL_SETS, CONFIG_MAPS, SECRETS)
NOTHING: Amounts = {}


@dataclass(slots=True)
class _Shelf:
    """The objects of one kind. `gone`: at which version those ended that were seen to; `listed`: by namespace, what the last list knew."""

    things: dict[Key, Any] = field(default_factory=dict)
    versions: dict[Key, int] = field(default_factory=dict)
    gone: dict[Key, int] = field(default_factory=dict)
    listed: dict[str, int] = field(default_factory=dict)

    def is_news(self, key: Key, version: int) -> bool:
        known = self.versions.get(key)
        if known is None:
            known = max(self.gone.get(key, -1), self.listed.get(key[0], -1), self.listed.get("", -1))
        return version > known


class Stock:
    """`unread`: watched namespaces that are not in it, and why. `changes` counts changes of anything, `news` those of anything but other
    people's pods: of these there are too many for somebody to look at once.
    """

    def __init__(self) -> None:
        self.unread: Mapping[str, str] = {}
        self.changes = self.news = 0
        self._shelves = {kind: _Shelf() for kind in KINDS}
        self._of: dict[Key, dict[Kind, dict[Key, Object]]] = {}  # by deployment: what is labelled as its own
        self._parts: dict[Key, Snapshot] = {}
        self._touched: set[Key] = set()
        self._taken: dict[str, Amounts] = {}  # by node
        self._changed_nodes: dict[str, int] = {}  # in the order of their last change
        self._node_views: dict[str, NodeView] = {}
        self._views: Mapping[str, NodeView] | None = None  # the same, as was handed out last
        self.pod_changes = 0  # of Strata's own pods

    # What is heard.

    @contextmanager
    def listing(self, kind: Kind, namespace: str) -> Iterator["Listing"]:
        """All objects of a kind in a namespace (empty: in all), page by page. At its end, what is older and was not listed is gone;
        a listing that breaks off ends nothing.
        """
        shelf, listing = self._shelves[kind], Listing(self, kind)
        yield listing
        version = listing.version
        for key in [key for key in shelf.things if not namespace or key[0] == namespace]:
            if key not in listing.named and shelf.versions[key] <= version:
                self._drop(kind, key)
        shelf.listed[namespace] = version
        shelf.gone = {key: at for key, at in shelf.gone.items() if at > version}

    def hear(self, kind: Kind, thing: Object, *, gone: bool = False, listed: bool = False) -> None:
        """An event, the answer to a write, or one of a list."""
        shelf, key, version = self._shelves[kind], key_of(thing), version_of(thing)
        if not gone:
            if shelf.is_news(key, version) or (listed and version > shelf.gone.get(key, -1)):
                self._keep(kind, thing, version)
        elif version >= shelf.versions.get(key, -1):
            shelf.gone[key] = max(version, shelf.gone.get(key, -1))
            self._drop(kind, key)

    def wrote(self, kind: Kind, thing: Object) -> None:
        """The answer to a write of our own, perhaps of a kind that nobody asks for."""
        if kind in self._shelves:
            self.hear(kind, thing)

    def forget(self, kind: Kind, namespace: str) -> None:
        """Nobody may read them any more."""
        for key in [key for key in self._shelves[kind].things if not namespace or key[0] == namespace]:
            self._drop(kind, key)

    # What is read.

    @property
    def deployments(self) -> tuple[Object, ...]:
        return tuple(self._shelves[DEPLOYMENTS_OF_STRATA].things.values())

    def node(self, name: str) -> Object | None:
        return self._shelves[NODES].things.get(("", name))

    def node_views(self) -> Mapping[str, NodeView]:
        """The same value as long as no node changes."""
        if self._views is None:
            self._views = dict(self._node_views)
        return self._views

    def changed_nodes(self, since: int) -> list[str]:
        """Nodes that are new, gone or other than they were when `changes` was `since`, or of which something else is taken."""
        found = []
        for name in reversed(self._changed_nodes):
            if self._changed_nodes[name] <= since:
                break
            found.append(name)
        return found

    def changed_at(self, node: str) -> int:
        """When `changed_nodes` had it last: what `changes` was."""
        return self._changed_nodes.get(node, 0)

    def taken(self, node: str) -> Amounts:
        """What all pods there ask for together."""
        return self._taken.get(node, NOTHING)

    def part(self, namespace: str, name: str) -> Snapshot:
        """What is labelled as one deployment's; the same value as long as nothing of it changes."""
        key = (namespace, name)
        if key not in self._parts:
            own = self._of.get(key, {})
            things = {kind: tuple(own.get(kind, {}).values()) for kind in _OWNED}
            self._parts[key] = Snapshot(things[PODS], things[STATEFUL_SETS], things[CONFIG_MAPS], things[SECRETS])
        return self._parts[key]

    def claims(self, namespace: str) -> tuple[Object, ...]:
        """Volume claims."""
        return tuple(thing for key, thing in self._shelves[CLAIMS].things.items() if key[0] == namespace)

    def half_epochs(self) -> set[Key]:
        """ConfigMaps of epochs without a Secret of their name."""
        return self._shelves[CONFIG_MAPS].things.keys() - self._shelves[SECRETS].things.keys()

    def own_pods(self) -> list[Object]:
        """Of all deployments."""
        return [pod for own in self._of.values() for pod in own.get(PODS, {}).values()]

    def slot_requests(self) -> dict[tuple[str, str, str], Amounts]:
        """What the pods of slots that have a node ask for: by namespace, deployment and slot."""
        kept = self._shelves[PODS].things
        found: dict[tuple[str, str, str], Amounts] = {}
        for pod in self.own_pods():
            slot = (pod["metadata"].get("namespace", ""), pod_label(pod, INSTANCE_LABEL), pod_label(pod, SLOT_LABEL))
            if kept[key_of(pod)].node:
                found[slot] = kept[key_of(pod)].requests
        return found

    def held(self, pod: Object) -> tuple[str, Amounts]:
        """The node of one of Strata's pods, empty if it holds nothing there, and what it asks of it."""
        kept = self._shelves[PODS].things[key_of(pod)]
        return kept.node, kept.requests

    def take_touched(self) -> set[Key]:
        """Deployments of which something has changed since this was asked last."""
        touched, self._touched = self._touched, set()
        return touched

    # How it is kept.

    def _keep(self, kind: Kind, thing: Object, version: int) -> None:
        shelf, key = self._shelves[kind], key_of(thing)
        if version < shelf.versions.get(key, -1):
            return
        shelf.versions[key] = version
        before, now = shelf.things.get(key), cut_pod(thing) if kind is PODS else cut(kind, thing)
        if before == now:
            return
        shelf.things[key] = now
        self._note(kind, key, before, now)

    def _drop(self, kind: Kind, key: Key) -> None:
        shelf = self._shelves[kind]
        before = shelf.things.pop(key, None)
        shelf.versions.pop(key, None)
        if before is not None:
            self._note(kind, key, before, None)

    def _note(self, kind: Kind, key: Key, before: Any, now: Any) -> None:
        self.changes += 1
        if kind is NODES:
            self._views = None
            self._node_views.pop(key[1], None)
            if now is not None:
                self._node_views[key[1]] = node_view(now)
            self._mark(key[1])
        elif kind is DEPLOYMENTS_OF_STRATA:
            self._touched.add(key)
        if kind is PODS:
            self._count(before, now)
            before, now = (each and each.thing for each in (before, now))
            self.pod_changes += before is not now
        self.news += kind is not PODS or before is not now
        if kind in _OWNED:
            self._file(kind, key, before, now)

    def _count(self, before: PodKept | None, now: PodKept | None) -> None:
        if before is not None and now is not None and (before.node, before.requests) == (now.node, now.requests):
            return
        for pod, sign in ((before, -1), (now, 1)):
            if pod is None or not pod.node:
                continue
            taken = self._taken.setdefault(pod.node, {})
            for name, amount in pod.requests.items():
                taken[name] = taken.get(name, 0) + sign * amount
            self._mark(pod.node)

    def _file(self, kind: Kind, key: Key, before: Object | None, now: Object | None) -> None:
        for thing in (before, now):
            if thing is None:
                continue
            owner = (key[0], str((thing["metadata"].get("labels") or {}).get(INSTANCE_LABEL, "")))
            own = self._of.setdefault(owner, {}).setdefault(kind, {})
            own.pop(key, None)
            if thing is now:
                own[key] = thing
            elif not own and not any(self._of[owner].values()):
                del self._of[owner]
            self._parts.pop(owner, None)
            self._touched.add(owner)

    def _mark(self, node: str) -> None:
        self._changed_nodes.pop(node, None)
        self._changed_nodes[node] = self.changes


class Listing:
    """A list on its way into the stock. `version`: of the cluster, as its pages say."""

    def __init__(self, stock: Stock, kind: Kind) -> None:
        self._stock, self._kind = stock, kind
        self.named: set[Key] = set()
        self.version = 0

    def take(self, things: Iterable[Object], version: int) -> None:
        self.version = max(self.version, version)
        for thing in things:
            self.named.add(key_of(thing))
            self._stock.hear(self._kind, thing, listed=True)


def key_of(thing: Object) -> Key:
    meta = thing["metadata"]
    return str(meta.get("namespace") or ""), str(meta["name"])


def version_of(thing: Object) -> int:
    """Versions of one API server are compared as numbers, as Kubernetes' own clients have come to (KEP-5504)."""
    text = str(thing["metadata"].get("resourceVersion") or "0")
    return int(text) if text.isdigit() else 0
