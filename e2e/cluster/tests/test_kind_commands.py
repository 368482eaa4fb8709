"""The kind provider: which commands it gives to kind and Docker. Both are scripts that write down what they are told.

No substitute for a run on a machine with Docker; it keeps the commands from rotting.
"""

from pathlib import Path

import pytest
import yaml

from e2e.cluster import NoCluster, Progress
from e2e.cluster.kind import KindCluster

SCRIPT = """\
#!/bin/sh
echo "$(basename $0) $*" >> {log}
case "$1 $2" in
    "get clusters") cat {clusters} 2>/dev/null;;
    "create cluster") cat > {config}; echo disagg > {clusters}; echo "{{}}" > "${{6#--kubeconfig=}}";;
    "export kubeconfig") echo "{{}}" > "${{4#--kubeconfig=}}";;
    "delete cluster") rm {clusters};;
    "get nodes") echo disagg-control-plane;;
esac
exit 0
"""


class Machine:
    """A folder with the two scripts and what they noted."""

    def __init__(self, folder: Path) -> None:
        self.log, self.config, self.exposed = folder / "log", folder / "config", folder / "exposed"
        for name in ("kind", "docker"):
            program = folder / name
            program.write_text(SCRIPT.format(log=self.log, clusters=folder / "clusters", config=self.config))
            program.chmod(0o755)

    def commands(self, start: str) -> list[str]:
        """The commands so far that start with these words."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(start)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "cache"))
    return Machine(tmp_path)


def test_up_creates_the_cluster_once(machine: Machine) -> None:
    provider = KindCluster(machine.exposed)
    cluster = provider.up(2, Progress())
    assert cluster.kubeconfig.exists()
    assert provider.up(2, Progress()) == cluster
    assert len(machine.commands("kind create cluster --name=disagg --config=-")) == 1
    assert len(yaml.safe_load(machine.config.read_text())["nodes"]) == 2


def test_a_lost_kubeconfig_is_asked_for_again(machine: Machine) -> None:
    provider = KindCluster(machine.exposed)
    kubeconfig = provider.up(1, Progress()).kubeconfig
    kubeconfig.unlink()
    provider.up(1, Progress())
    assert kubeconfig.exists()
    assert len(machine.commands("kind create cluster")) == 1


def test_images_are_built_from_their_dockerfiles_and_loaded(machine: Machine) -> None:
    provider = KindCluster(machine.exposed)
    provider.up(1, Progress(), ["operator", "connector"])
    for name in ("operator", "connector"):
        reference = f"localhost/disagg/{name}:dev"
        assert machine.commands(f"docker build --tag {reference} --file {name}/Dockerfile .")
        assert machine.commands(f"kind load docker-image {reference} --name=disagg")


def test_down_deletes_the_cluster_and_what_was_exposed(machine: Machine, tmp_path: Path) -> None:
    provider = KindCluster(machine.exposed)
    provider.up(1, Progress())
    (tmp_path / "target").mkdir()
    provider.expose("engine", tmp_path / "target")
    assert provider.down(Progress())
    assert machine.commands("kind delete cluster --name=disagg")
    assert not machine.exposed.exists()
    assert not provider.down(Progress())
    with pytest.raises(NoCluster, match="CLUSTER=kind"):
        provider.connect()


def test_status_lists_the_nodes(machine: Machine) -> None:
    provider = KindCluster(machine.exposed)
    provider.up(1, Progress())
    assert [component.name for component in provider.status()] == ["disagg-control-plane"]
