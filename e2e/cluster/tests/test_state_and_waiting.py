"""Small parts: memory, names, waiting, processes, choosing a provider."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster import ClusterError, CommandError, NoCluster, WaitTimeoutError, choose, state
from e2e.cluster.daemons import Daemon, _start_time
from e2e.cluster.layout import Layout
from e2e.cluster.local import LocalCluster
from e2e.cluster.progress import Progress
from e2e.cluster.shell import run, wait_until
from e2e.cluster.state import State


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "run", tmp_path / "data", tmp_path / "exposed", "unittest-", "unittest0")


def test_state_survives_a_round_trip(layout: Layout) -> None:
    saved = State(True, 2, "10.88", {"kernel/panic": "1"}, ("/run/netns",))
    state.save(layout, saved)
    assert state.load(layout) == saved


def test_what_another_version_remembered_besides_is_ignored(layout: Layout) -> None:
    saved = State(True, 2, "10.88")
    state.save(layout, saved)
    path = layout.run / "state.json"
    path.write_text(path.read_text().replace("{", '{"color": "red",', 1))
    assert state.load(layout) == saved


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"ready": true}', '{"absent_folders": [], "unknown": 1}']
)
def test_a_damaged_state_is_no_state(layout: Layout, content: str) -> None:
    layout.run.mkdir()
    (layout.run / "state.json").write_text(content)
    assert state.load(layout) is None


def test_a_new_state_remembers_the_sysctls_that_kubelet_changes() -> None:
    begun = State.begin(1, "10.88")
    assert not begun.ready
    assert begun.sysctls["vm/overcommit_memory"] == Path("/proc/sys/vm/overcommit_memory").read_text().strip()


def test_a_cluster_that_is_not_ready_is_no_cluster(layout: Layout) -> None:
    provider = LocalCluster(layout)
    with pytest.raises(NoCluster, match="make cluster-up"):
        provider.connect()
    state.save(layout, State(False, 2, "10.88"))
    with pytest.raises(NoCluster):
        provider.connect()
    state.save(layout, State(True, 2, "10.88"))
    assert provider.connect().kubeconfig == layout.run / "kubeconfig"


@pytest.mark.parametrize("name", ["", "a-b", "Upper", "waytoolong", "1a", "x/y"])
def test_a_bad_cluster_name_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="DISAGG_CLUSTER_NAME"):
        Layout.named(name)


def test_the_default_name_gives_the_default_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISAGG_CLUSTER_NAME", raising=False)
    assert Layout.configured() == Layout()


@pytest.mark.parametrize("nodes", [0, -1, 41])
def test_an_impossible_number_of_nodes_is_refused(layout: Layout, nodes: int) -> None:
    with pytest.raises(ClusterError, match="1 to 40 nodes"):
        LocalCluster(layout).up(nodes, Progress())


def test_waiting_returns_the_first_true_result() -> None:
    answers = iter([None, "", "found"])
    slept: list[float] = []
    assert (
        wait_until(lambda: next(answers), "it", limit=10, every=0.5, clock=lambda: 0, sleep=slept.append)
        == "found"
    )
    assert slept == [0.5, 0.5]


def test_waiting_in_vain_says_for_what_and_how_long() -> None:
    times = iter([0.0, 1.0, 2.0, 3.0])
    with pytest.raises(WaitTimeoutError, match="Waited 3 s for the moon"):
        wait_until(lambda: False, "the moon", limit=3, clock=lambda: next(times), sleep=lambda _: None)


def test_a_machine_that_stood_still_is_no_reason_to_give_up_without_another_look() -> None:
    times = [0.0]
    answers = iter([None, None, "found"])

    def look() -> str | None:
        times.append(times[-1] * 100 + 1)  # 1, 101
        return next(answers)

    assert wait_until(look, "it", limit=3, clock=lambda: times[-1], sleep=lambda _: None) == "found"


def test_a_failed_program_is_told_with_purpose_command_and_words() -> None:
    with pytest.raises(
        CommandError, match=r"Trying it: `sh -c echo bad >&2; exit 3` ended with status 3:\nbad"
    ):
        run(["sh", "-c", "echo bad >&2; exit 3"], "Trying it")
    with pytest.raises(CommandError, match="no-such-program"):
        run(["no-such-program"], "Trying it")


def test_a_program_that_does_not_end_is_stopped() -> None:
    with pytest.raises(CommandError, match="still running after 0 s"):
        run([sys.executable, "-c", "import time; time.sleep(60)"], "Trying it", timeout=0.3)


def test_a_process_is_recognised_by_id_and_start() -> None:
    started = _start_time(os.getpid())
    assert started is not None
    assert Daemon("self", os.getpid(), started, "").is_alive
    assert not Daemon("somebody else with our id", os.getpid(), started + 1, "").is_alive


def test_a_dead_process_is_not_alive_before_it_is_buried() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = _start_time(child.pid)
    assert started is not None
    daemon = Daemon("child", child.pid, started, "")
    assert daemon.is_alive
    child.kill()
    # Not waited for: it stays as a zombie.
    wait_until(lambda: not daemon.is_alive, "the child to be dead", limit=60)
    child.communicate()


@pytest.mark.parametrize("name", ["local", "kind", "existing"])
def test_each_provider_is_chosen_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", name)
    assert choose().name == name


def test_an_unknown_provider_is_refused_with_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", "minikube")
    with pytest.raises(ClusterError, match="choose one of local, kind, existing"):
        choose()


def test_an_existing_cluster_needs_a_kubeconfig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(NoCluster, match="absent"):
        choose("existing").connect()


def test_kind_without_docker_points_to_the_local_provider(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="kind and docker in PATH"):
        choose("kind").up(1, Progress())
