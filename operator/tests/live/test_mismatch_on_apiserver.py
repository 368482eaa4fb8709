"""What engines count on their pages becomes a condition. The engines are fakes: one page on a loopback address for all pods."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from live_cluster import Cluster, pods, running_operator, spec, until

pytestmark = pytest.mark.cluster
ADDRESS = "127.0.0.9"
PAGE = """\
# TYPE disagg_kv_refused_messages_total counter
disagg_kv_refused_messages_total{{engine="0",reason="fingerprint"}} {refused}.0
# TYPE disagg_kv_writeback_offers_total counter
disagg_kv_writeback_offers_total{{engine="0",result="fingerprint"}} 0.0
"""


class FakeEngine:
    """An engine's /metrics, and how often it was read."""

    def __init__(self) -> None:
        self.refused, self.reads = 0, 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.reads += self.path == "/metrics"
                body = PAGE.format(refused=fake.refused).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer((ADDRESS, 8000), Handler)


@pytest.fixture
def fake_engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    thread = threading.Thread(target=fake.server.serve_forever, daemon=True)
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join(60)


def wait_for_looks(fake: FakeEngine, looks: int) -> None:
    """Until both engine pods have been looked at so many times more."""
    wanted = fake.reads + 2 * looks
    until(lambda: fake.reads >= wanted, f"{wanted} reads of the fake engines' page")


def test_a_mismatch_of_running_engines_is_told_once_and_outlives_the_operator(
    cluster: Cluster, namespace: str, fake_engine: FakeEngine
) -> None:
    one = {"replicas": 1}
    engine = {"image": f"vllm:at-{ADDRESS}", "device": "CPU"}
    with running_operator(cluster, WATCH_NAMESPACES=namespace, RESYNC_SECONDS="1"):
        cluster.apply(namespace, "demo", spec(engine=engine, prefill=one, decode=one))
        cluster.wait_for(namespace, "demo", "Ready", "True")
        wait_for_looks(fake_engine, 2)
        cluster.wait_for(namespace, "demo", "RevisionsCompatible", "True", reason="Compatible")

        fake_engine.refused = 3
        told = cluster.wait_for(
            namespace, "demo", "RevisionsCompatible", "False", reason="FingerprintMismatch"
        )
        for role in ("prefill", "decode"):
            (name,) = pods(cluster, namespace, role)
            assert name in told["message"]
        assert cluster.condition(namespace, "demo", "Ready")["status"] == "True", "turns are answered"
        fake_engine.refused = 4
        wait_for_looks(fake_engine, 1)

    with running_operator(cluster, WATCH_NAMESPACES=namespace, RESYNC_SECONDS="1"):
        wait_for_looks(fake_engine, 2)
        assert cluster.condition(namespace, "demo", "RevisionsCompatible") == told
    events = cluster.get("events", namespace)["items"]
    mismatches = [event["type"] for event in events if event["reason"] == "FingerprintMismatch"]
    assert mismatches == ["Warning"]
