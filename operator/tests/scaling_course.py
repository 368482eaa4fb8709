"""The autoscaling of one object without a cluster, for tests: pods that there are, and looks at what they say."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from operator_world import Manifest
from scaling_pages import Line
from scaling_pages import decode as decode_page
from scaling_pages import prefill as prefill_page
from scaling_pages import router as router_page
from scaling_world import as_the_crd_asks, scaled_spec

from disagg_operator import autoscale
from disagg_operator.api.status import ScalingStatus
from disagg_operator.api.types import DisaggInferenceSpec
from disagg_operator.autoscale import Course
from disagg_operator.naming import KIND, Component
from disagg_operator.observe import Observed, Pod, Workload
from disagg_operator.pages import Answer, NoPage
from disagg_operator.pools import Pool
from disagg_operator.scaling.policy import Decision

NOW = datetime(2026, 1, 1, tzinfo=UTC)
REVISION = "0123abcd"
ROLES = {
    Component.PREFILL: "demo-prefill-0123abcd",
    Component.DECODE: "demo-decode-0123abcd",
    Component.ROUTER: "demo-router",
}


def pod(component: Component, number: int, **changes: Any) -> Pod:
    made = Pod(
        name=f"{ROLES[component]}-{number}",
        component=component,
        revision=None if component is Component.ROUTER else REVISION,
        ready=True,
        ready_since=NOW,
        leaving=False,
        trouble=None,
        address=f"10.0.0.{number}",
        created=NOW - timedelta(seconds=40),
    )
    return replace(made, **changes)


def workload(component: Component = Component.DECODE, **changes: Any) -> Workload:
    made = Workload(
        kind="StatefulSet",
        name=ROLES[component],
        component=component,
        revision=REVISION,
        wanted=2,
        settled=True,
        replacing=False,
        created=NOW,
        applied=NOW,
        refusal=None,
    )
    return replace(made, **changes)


SCALERS: Mapping[tuple[str, str], Manifest] = {
    ("DisaggInferenceScaler", f"demo-{role}"): {} for role in ("prefill", "decode")
}


def observed(*pods: Pod, **changes: Any) -> Observed:
    return replace(Observed(live=SCALERS, pods=pods), **changes)


def spec(mode: str = "Auto", **changes: Any) -> DisaggInferenceSpec:
    return DisaggInferenceSpec.model_validate(scaled_spec(mode, **changes))


class Watch:
    """Looks of one course at two pods a role and a router."""

    def __init__(self, course: Course | None = None, **changes: Any) -> None:
        self.course = course or Course("uid-1", REVISION)
        self.spec, self.even, self.now = spec(**changes), 1000.0, NOW
        self.sizes = {Component.PREFILL: 2, Component.DECODE: 2}
        self.seen = observed(
            *(pod(c, n) for c in Component for n in range(1 if c is Component.ROUTER else 2))
        )

    def look(
        self, pages: Mapping[Component, Answer], after: float = 15, hold: str = "", full: str = ""
    ) -> Course:
        self.even += after
        self.now += timedelta(seconds=after)
        answers = {p.name: pages[p.component] for p in self.seen.pods if p.component is not None}
        sizes = {component: Pool(size, size) for component, size in self.sizes.items()}
        self.course = autoscale.look(
            self.course, self.spec, self.seen, sizes, answers, hold, full, self.even, self.now
        )
        return self.course

    def work(
        self,
        looks: int,
        tokens: float = 700,
        usage: float = 0.5,
        hold: str = "",
        full: str = "",
        gap: float = 0.02,
    ) -> Course:
        """So many looks at prefill pods that compute that many tokens per second each, and decode with a token every `gap`
        seconds."""
        for _ in range(looks):
            at = self.even + 15
            self.look(
                {
                    Component.PREFILL: prefill_page(computed=at * tokens, prompts=at * tokens / 1000),
                    Component.DECODE: decode_page(usage=usage, running=3, more=_gaps(at, gap)),
                    Component.ROUTER: router_page(turns=2 * at * tokens / 1000),
                },
                hold=hold,
                full=full,
            )
        return self.course


def _gaps(count: float, gap: float) -> list[Line]:
    name = "vllm:inter_token_latency_seconds_bucket"
    own = {"engine": "0", "model_name": "m"}
    bounds = (("0.05", 0.05), ("0.5", 0.5), ("+Inf", float("inf")))
    return [(name, {**own, "le": le}, count if gap <= bound else 0) for le, bound in bounds]


NOTHING = dict.fromkeys(Component, NoPage("status 503"))


def decided(course: Course) -> Decision:
    assert course.decision is not None
    return course.decision


def told(course: Course, previous: ScalingStatus | None = None) -> ScalingStatus:
    said = autoscale.told(course, previous)
    assert said is not None
    as_the_crd_asks(KIND, {"scaling": said.to_wire()})
    return said
