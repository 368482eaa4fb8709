"""Our images, run in the cluster the way the chart and the operator run them."""

from typing import Any

import pytest

from e2e.cluster.tests.conftest import Pods

pytestmark = pytest.mark.cluster

RESTRICTED: dict[str, Any] = {
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
}
WITHOUT_BYTECODE = """
import os, sys
specs = [module.__spec__ for module in sys.modules.values() if getattr(module, "__spec__", None) is not None]
sources = [spec for spec in specs if spec.has_location and spec.origin.endswith(".py")]
print(sorted(spec.name for spec in sources if not os.path.exists(spec.cached)))
"""


@pytest.mark.parametrize(
    ("image", "modules"),
    [
        ("operator", "kopf, kubernetes.aio.client, pydantic, aiohttp, yaml, disagg_operator"),
        ("router", "uvloop, httptools, aiohttp, kubernetes.aio.client, msgspec, disagg_router"),
    ],
)
def test_an_image_imports_its_packages_without_root_or_writing(pods: Pods, image: str, modules: str) -> None:
    code = f"import {modules}\n{WITHOUT_BYTECODE}"
    printed = pods.output(
        f"imports-{image}", code, image=f"localhost/disagg/{image}:dev", container=RESTRICTED
    )
    assert printed.strip() == "[]", "these modules are compiled at every start"


def test_images_verify_certificates_and_resolve_users(pods: Pods) -> None:
    code = (
        "import getpass, os, ssl; print(getpass.getuser(), os.getuid(), os.path.expanduser('~'), "
        "len(ssl.create_default_context().get_ca_certs()) > 50)"
    )
    assert pods.output("identity", code, container=RESTRICTED).split() == [
        "nonroot",
        "65532",
        "/home/nonroot",
        "True",
    ]


def test_the_connector_is_installed_for_another_container(pods: Pods) -> None:
    mount = {"volumeMounts": [{"name": "shared", "mountPath": "/disagg"}]}
    installer = {
        "name": "connector",
        "image": "localhost/disagg/connector:dev",
        "args": ["/disagg/connector"],
        **RESTRICTED,
        **mount,
    }
    printed = pods.output(
        "uses-connector",
        "import importlib.util; print(importlib.util.find_spec('disagg_connector').origin)",
        container={**mount, "env": [{"name": "PYTHONPATH", "value": "/disagg/connector"}]},
        initContainers=[installer],
        volumes=[{"name": "shared", "emptyDir": {}}],
    )
    assert printed.strip() == "/disagg/connector/disagg_connector/__init__.py"
