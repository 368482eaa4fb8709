"""`make bench-footprint`: what operator, router and engines cost while nobody asks them anything.

Reads the kubelets' own accounting twice, some time apart, in the running cluster (`make demo KEEP=1` leaves one up), prints a
table and writes build/reports/footprint.json. CPU is in percent of one core, memory is the containers' RSS.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from e2e.cluster import Cluster, ClusterError, choose
from e2e.demo.stack import OPERATOR_NAMESPACE, OPERATOR_SELECTOR

REPORT = Path(__file__).parents[1] / "build" / "reports" / "footprint.json"
_SETTLE_SECONDS = 12
"""The kubelet reads usage every ten seconds or so: a first reading right after load would count the load."""


@dataclass(frozen=True)
class Reading:
    """A pod's use so far."""

    cpu_nanoseconds: int
    at: float
    """When the kubelet took it, as seconds since the epoch."""
    rss_bytes: int


@dataclass(frozen=True)
class Footprint:
    """A pod at rest."""

    pod: str
    role: str
    cpu_percent: float
    rss_mib: float


def readings(cluster: Cluster) -> dict[str, Reading]:
    """namespace/pod -> its use, from every real node's kubelet."""
    found = {}
    for node in cluster.real_nodes():
        summary = json.loads(cluster.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/stats/summary"))
        for pod in summary["pods"]:
            if reading := _reading(pod):
                found[f"{pod['podRef']['namespace']}/{pod['podRef']['name']}"] = reading
    return found


def _reading(pod: dict[str, Any]) -> Reading | None:
    containers = [c for c in pod.get("containers") or [] if "usageCoreNanoSeconds" in (c.get("cpu") or {})]
    if not containers:
        return None
    at = max(_epoch(c["cpu"]["time"]) for c in containers)
    return Reading(
        sum(c["cpu"]["usageCoreNanoSeconds"] for c in containers),
        at,
        sum((c.get("memory") or {}).get("rssBytes", 0) for c in containers),
    )


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def roles(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """namespace/pod and role of everything of ours."""
    for pod in cluster.list("pods", OPERATOR_NAMESPACE, OPERATOR_SELECTOR):
        yield f"{OPERATOR_NAMESPACE}/{pod['metadata']['name']}", "operator"
    for pod in cluster.list("pods", None, "inference.disagg.dev/role"):
        meta = pod["metadata"]
        yield f"{meta['namespace']}/{meta['name']}", meta["labels"]["inference.disagg.dev/role"]


def measure(cluster: Cluster, seconds: float) -> list[Footprint]:
    """The footprint of each of our pods over `seconds` of rest."""
    time.sleep(_SETTLE_SECONDS)
    before = readings(cluster)
    time.sleep(seconds)
    after = readings(cluster)
    return [
        Footprint(
            pod,
            role,
            round(100 * (now.cpu_nanoseconds - was.cpu_nanoseconds) / 1e9 / (now.at - was.at), 2),
            round(now.rss_bytes / 2**20, 1),
        )
        for pod, role in sorted(roles(cluster), key=lambda item: item[1])
        if (was := before.get(pod)) and (now := after.get(pod)) and now.at > was.at
    ]


def main(seconds: Annotated[float, typer.Option(help="How long to watch.")] = 60) -> None:
    """Measure, print, write the report."""
    try:
        found = measure(choose().connect(), seconds)
    except ClusterError as error:
        sys.exit(f"{error}\nStart one with something in it: make demo KEEP=1")
    table = Table("pod", "role", "CPU, % of a core", "RSS, MiB", title=f"At rest, over {seconds:.0f} s")
    for item in found:
        table.add_row(item.pod, item.role, f"{item.cpu_percent:.2f}", f"{item.rss_mib:.0f}")
    Console().print(table)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(
        json.dumps({"seconds": seconds, "pods": [asdict(item) for item in found]}, indent=2) + "\n"
    )


if __name__ == "__main__":
    typer.run(main)
