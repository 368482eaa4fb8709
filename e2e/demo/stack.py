"""The operator and the demo's DisaggInference in a cluster: putting them there, asking about them, removing them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import Cluster, CommandError
from e2e.inference import KIND, Inference

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts" / "disagg-operator"
EXAMPLE = REPOSITORY / "examples" / "cpu" / "smollm2.yaml"

RELEASE = "disagg"
OPERATOR_NAMESPACE = "disagg-system"
OPERATOR_SELECTOR = "app.kubernetes.io/name=disagg-operator"
NAMESPACE = "default"
NAME = "smollm2"
"""Of the DisaggInference in EXAMPLE."""
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What clients put in `model`; of EXAMPLE as well."""


@dataclass(frozen=True)
class Stack:
    """What the demo put into `cluster`."""

    cluster: Cluster

    def install_operator(self) -> None:
        """Install the chart with the values for images that were loaded into the nodes."""
        self.cluster.helm(
            *("upgrade", "--install", RELEASE, str(CHART)),
            *("--namespace", OPERATOR_NAMESPACE, "--create-namespace"),
            *("--values", str(CHART / "values-local.yaml")),
        )
        self.cluster.kubectl("wait", "--for=condition=Established", f"crd/{KIND}", "--timeout=180s")

    def apply_example(self) -> None:
        """Apply the DisaggInference, as a user would."""
        self.cluster.kubectl("apply", "--namespace", NAMESPACE, "-f", str(EXAMPLE))

    @property
    def inference(self) -> Inference:
        """The DisaggInference of EXAMPLE."""
        return Inference(self.cluster, NAME, NAMESPACE)

    def remove(self) -> None:
        """Remove the DisaggInference with its pods, then the operator; the CRDs stay, as the chart says.

        Raises:
            CommandError: something did not go away in time.
        """
        if self.cluster.get("crd", KIND) is not None:
            self.inference.delete()
        self.cluster.helm(
            "uninstall", RELEASE, "--namespace", OPERATOR_NAMESPACE, "--ignore-not-found", "--wait"
        )

    def log(self, namespace: str, pod: str, container: str, lines: int, *, previous: bool = False) -> str:
        """The last lines of a container's log; empty where there is none."""
        which = ("--previous",) if previous else ()
        where = ("logs", pod, f"--container={container}", f"--namespace={namespace}", f"--tail={lines}")
        try:
            return self.cluster.kubectl(*where, *which)
        except CommandError:
            return ""

    def warnings(self) -> list[dict[str, Any]]:
        """Events of type Warning in the example's namespace, the newest last."""
        events = [event for event in self.cluster.list("events", NAMESPACE) if event.get("type") == "Warning"]
        return sorted(events, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
