"""Reading everything that one pass needs, at once."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from .naming import Manifest
from .observe import ObjectKey, Observed, observe, open_questions
from .wanted import Wanted, key_of


class Reader(Protocol):
    """The part of the API server that is read from; `Kube` is one."""

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None: ...

    async def children(self, namespace: str, name: str) -> list[Manifest]: ...

    async def events(self, kind: str, namespace: str, name: str) -> list[Manifest]: ...


async def gather(kube: Reader, wanted: Wanted) -> Observed:
    """Children and pods by label; names of children that the label did not find, in case somebody else has them; and the
    events of what does not explain itself."""
    owner = wanted.owner
    objects = await kube.children(owner.namespace, owner.name)
    missing = sorted(wanted.keys - {key_of(item) for item in objects})
    found = await asyncio.gather(*(kube.get(kind, owner.namespace, name) for kind, name in missing))
    by_name = [item for item in found if item is not None]
    return observe(owner.uid, objects, by_name, await _events(kube, owner.namespace, open_questions(objects)))


async def _events(
    kube: Reader, namespace: str, questions: Sequence[ObjectKey]
) -> Mapping[ObjectKey, Sequence[Manifest]]:
    answers = await asyncio.gather(*(kube.events(kind, namespace, name) for kind, name in questions))
    return dict(zip(questions, answers, strict=True))
