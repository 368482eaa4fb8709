"""What the router may do: read the EndpointSlices of its namespace, nothing else."""

from ..naming import Component, Manifest, labels, role_name


def build_service_account(name: str, namespace: str) -> Manifest:
    """The router's identity."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(name, namespace),
        "automountServiceAccountToken": False,
    }


def build_role(name: str, namespace: str) -> Manifest:
    """The one right that the router needs."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": _metadata(name, namespace),
        "rules": [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        ],
    }


def build_role_binding(name: str, namespace: str) -> Manifest:
    """Gives the router's identity that right."""
    full_name = role_name(name, Component.ROUTER)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(name, namespace),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": full_name},
        "subjects": [{"kind": "ServiceAccount", "name": full_name, "namespace": namespace}],
    }


def _metadata(name: str, namespace: str) -> Manifest:
    return {
        "name": role_name(name, Component.ROUTER),
        "namespace": namespace,
        "labels": labels(name, Component.ROUTER),
    }
