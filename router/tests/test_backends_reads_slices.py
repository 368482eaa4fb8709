"""EndpointSlices as the API server gives them, and what they say about a fleet."""

from __future__ import annotations

from typing import Any

import pytest

from disagg_router.backends import Fleet, from_slices
from disagg_router.http1 import Address


def endpoint(pod: str | None, address: str, **fields: Any) -> dict[str, Any]:
    ready = fields.pop("ready", True)
    terminating = fields.pop("terminating", False)
    entry: dict[str, Any] = {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": True, "terminating": terminating},
        "nodeName": "node-1",
        **fields,
    }
    if pod is not None:
        entry["targetRef"] = {"kind": "Pod", "namespace": "default", "name": pod, "uid": f"uid-{pod}"}
    return entry


def piece(name: str, role: str, *endpoints: dict[str, Any], **fields: Any) -> dict[str, Any]:
    labels = {
        "inference.disagg.dev/name": "demo",
        "inference.disagg.dev/role": role,
        "inference.disagg.dev/revision": fields.pop("revision", "0a1b2c3d"),
        "kubernetes.io/service-name": f"demo-{role}-0a1b2c3d",
        **fields.pop("labels", {}),
    }
    return {
        "metadata": {"name": name, "labels": labels, "resourceVersion": "7"},
        "addressType": fields.pop("family", "IPv4"),
        "endpoints": list(endpoints),
        "ports": fields.pop("ports", [{"name": "http", "port": 8000, "protocol": "TCP"}]),
        **fields,
    }


def read(*slices: dict[str, Any]) -> Any:
    return from_slices(slices, engine_port=8000, control_port=5700)


def test_a_ready_pod_becomes_a_backend() -> None:
    [got] = read(piece("a", "prefill", endpoint("p-0", "10.0.0.1", zone="eu-1a")))
    assert (got.name, got.role, got.revision, got.zone) == ("p-0", "prefill", "0a1b2c3d", "eu-1a")
    assert (got.address, got.control_port, got.state) == (Address("10.0.0.1", 8000), 5700, "ready")


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({"ready": True}, "ready"),
        ({}, "ready"),
        ({"ready": None}, "ready"),
        ({"ready": False}, "not_ready"),
        ({"ready": False, "terminating": True}, "terminating"),
        ({"ready": True, "terminating": True}, "terminating"),
    ],
)
def test_conditions_decide_who_takes_turns(conditions: dict[str, Any], state: str) -> None:
    entry = {**endpoint("d-0", "10.0.0.2"), "conditions": conditions}
    [got] = read(piece("a", "decode", entry))
    assert got.state == state
    assert got.takes_turns == (state == "ready")


KEEP = "inference.disagg.dev/keep"


@pytest.mark.parametrize(
    ("pod", "keep", "leaving"),
    [
        ("demo-decode-0a1b2c3d-0", "1", False),
        ("demo-decode-0a1b2c3d-1", "1", True),
        ("demo-decode-0a1b2c3d-10", "9", True),
        ("demo-decode-0a1b2c3d-9", "10", False),
        ("demo-decode-0a1b2c3d-0", "0", True),
        ("demo-decode-0a1b2c3d-1", None, False),
        ("demo-decode-0a1b2c3d-1", "", False),
        ("demo-decode-0a1b2c3d-1", "one", False),
        ("demo-decode-0a1b2c3d-1", "-1", False),
        ("demo-decode-0a1b2c3d-1", "0.5", False),
        ("demo-decode-0a1b2c3d-1", "٠", False),
        ("demo-decode-0a1b2c3d", "0", False),
        ("7", "0", False),
        (None, "0", False),
    ],
)
def test_pods_that_will_not_be_kept_are_leaving(pod: str | None, keep: str | None, leaving: bool) -> None:
    labels = {} if keep is None else {KEEP: keep}
    [got] = read(piece("a", "decode", endpoint(pod, "10.0.0.2"), labels=labels))
    assert got.leaving == leaving
    assert got.state == ("leaving" if leaving else "ready")
    assert got.takes_turns, "what it has it serves, and turns if there is no other"


@pytest.mark.parametrize(
    ("conditions", "state"), [({"ready": False}, "not_ready"), ({"terminating": True}, "terminating")]
)
def test_what_a_leaving_pod_cannot_do_is_said_of_it(conditions: dict[str, Any], state: str) -> None:
    entry = {**endpoint("d-1", "10.0.0.2"), "conditions": conditions}
    [got] = read(piece("a", "decode", entry, labels={KEEP: "0"}))
    assert (got.state, got.takes_turns) == (state, False)


def test_a_role_that_leaves_as_a_whole_is_still_ready() -> None:
    fleet = Fleet()
    fleet.publish(
        read(
            piece("a", "prefill", endpoint("p-0", "10.0.0.1"), labels={KEEP: "0"}),
            piece("b", "decode", endpoint("d-0", "10.0.0.2"), labels={KEEP: "0"}),
        )
    )
    assert fleet.why_not_ready() is None


def test_a_pod_in_two_slices_counts_once() -> None:
    moving = read(
        piece("new", "decode", endpoint("d-0", "10.0.0.2")),
        piece("old", "decode", endpoint("d-0", "10.0.0.2", ready=False)),
    )
    assert [(b.name, b.ready) for b in moving] == [("d-0", True)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_dual_stack_pod_is_reached_by_ipv4(order: tuple[int, int]) -> None:
    both = (
        piece("four", "decode", endpoint("d-0", "10.0.0.2")),
        piece("six", "decode", endpoint("d-0", "fd00::2"), family="IPv6"),
    )
    [got] = read(*(both[i] for i in order))
    assert got.address.host == "10.0.0.2"


def test_an_ipv6_pod_is_reached_too() -> None:
    [got] = read(piece("six", "decode", endpoint("d-0", "fd00::2"), family="IPv6"))
    assert str(got.address) == "[fd00::2]:8000"


def test_the_port_is_the_slices_own_if_it_names_one() -> None:
    entry = endpoint("d-0", "10.0.0.2")
    assert read(piece("a", "decode", entry, ports=[{"name": "http", "port": 9000}]))[0].address.port == 9000
    for ports in ([], None, [{"name": "control", "port": 5700}], [{"name": "http", "port": None}]):
        assert read(piece("a", "decode", entry, ports=ports))[0].address.port == 8000


def test_what_is_not_an_engine_is_left_out() -> None:
    no_role = piece("a", "router", endpoint("r-0", "10.0.0.9"))
    no_labels = {**piece("b", "decode", endpoint("d-0", "10.0.0.2")), "metadata": {"name": "b"}}
    names = piece("c", "decode", endpoint("d-1", "example.com"), family="FQDN")
    empty = {**piece("d", "decode"), "endpoints": None}
    no_address = piece("e", "decode", {**endpoint("d-2", ""), "addresses": []})
    assert read(no_role, no_labels, names, empty, no_address) == ()


def test_an_endpoint_without_a_pod_is_named_by_its_address() -> None:
    assert read(piece("a", "decode", endpoint(None, "10.0.0.2")))[0].name == "10.0.0.2"


@pytest.mark.parametrize(
    ("slices", "why"),
    [
        ([], "no prefill and no decode engine is ready"),
        ([piece("a", "prefill", endpoint("p-0", "10.0.0.1"))], "no decode engine is ready"),
        (
            [
                piece("a", "prefill", endpoint("p-0", "10.0.0.1", ready=False)),
                piece("b", "decode", endpoint("d-0", "10.0.0.2")),
            ],
            "no prefill engine is ready",
        ),
        (
            [
                piece("a", "prefill", endpoint("p-0", "10.0.0.1"), revision="one"),
                piece("b", "decode", endpoint("d-0", "10.0.0.2"), revision="two"),
            ],
            "no revision has both",
        ),
    ],
)
def test_a_fleet_says_what_it_lacks(slices: list[dict[str, Any]], why: str) -> None:
    fleet = Fleet()
    fleet.publish(read(*slices))
    assert why in (fleet.why_not_ready() or "")


def test_a_fleet_with_a_pair_is_ready_and_one_never_seen_is_not() -> None:
    fleet = Fleet()
    assert "not yet seen" in (fleet.why_not_ready() or "")
    pair = (
        piece("a", "prefill", endpoint("p-0", "10.0.0.1")),
        piece("b", "decode", endpoint("d-0", "10.0.0.2")),
    )
    fleet.publish(read(*pair))
    assert fleet.why_not_ready() is None
