"""A Kubernetes cluster to run the project on: started here, by kind, or brought by the user.

provider = choose()                      # CLUSTER=local|kind|existing
cluster = provider.up(2, Progress())     # a handle with kubectl, helm, apply, get
provider.load_images(["operator"], Progress())
provider.down(Progress())
"""

from e2e.cluster.errors import ClusterError, CommandError, NoCluster, WaitTimeoutError
from e2e.cluster.handle import Cluster
from e2e.cluster.progress import Progress
from e2e.cluster.provider import Provider, choose, expose_engine

__all__ = [
    "Cluster",
    "ClusterError",
    "CommandError",
    "NoCluster",
    "Progress",
    "Provider",
    "WaitTimeoutError",
    "choose",
    "expose_engine",
]
