"""DisaggInferenceScalers: where the size of a role is kept while something scales it. Made once, with the size that the role has;
from then on the number is that of whoever scales."""

from ..api.base import API_VERSION
from ..naming import SCALER_KIND, Component, Manifest, labels, role_name, selector


def build_scaler(name: str, namespace: str, component: Component, replicas: int) -> Manifest:
    """The scaler of one role."""
    return {
        "apiVersion": API_VERSION,
        "kind": SCALER_KIND,
        "metadata": {
            "name": role_name(name, component),
            "namespace": namespace,
            "labels": labels(name, component),
        },
        "spec": {"replicas": replicas},
    }


def scaler_status(name: str, component: Component, pods: int, generation: int) -> Manifest:
    """Its status: what HPA and `kubectl scale` go by. Pods of every revision share the load, so all count that take new turns."""
    chosen = ",".join(f"{key}={value}" for key, value in sorted(selector(name, component).items()))
    return {"replicas": pods, "selector": chosen, "observedGeneration": generation}
