"""PodDisruptionBudgets: voluntary evictions take one pod of a component at a time, and are never blocked for good."""

from ..naming import Component, Manifest, labels, role_name, selector


def build_disruption_budget(name: str, namespace: str, component: Component) -> Manifest:
    """maxUnavailable 1, so that the node of a single replica can still be drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": role_name(name, component),
            "namespace": namespace,
            "labels": labels(name, component),
        },
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(name, component)},
            # A pod that is not ready serves nobody: it must not keep a node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
