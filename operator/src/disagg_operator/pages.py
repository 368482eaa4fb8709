"""What is wanted of pods' metrics, and what they have to say. Pure data; `scrape` and `prometheus` bring it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A pod's page of metrics."""

    namespace: str
    address: str
    port: int
    names: frozenset[str]
    """Of the samples that are wanted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A number on a page of metrics."""

    name: str
    labels: Mapping[str, str]
    value: float
    age: float = 0.0
    """Seconds for which somebody else has had it; 0 if it comes from the pod itself."""


Page = tuple[Sample, ...]
"""What was looked for on a pod's page."""


@dataclass(frozen=True, slots=True)
class NoPage:
    """There is no page of a pod."""

    why: str
    """As few words as say it: "status 503"."""


Answer = Page | NoPage
"""What a pod has to say."""
