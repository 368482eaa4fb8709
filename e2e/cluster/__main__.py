"""`python -m e2e.cluster up | down | status | kubeconfig | kubectl ... | helm ...`"""

from e2e.cluster.cli import main

main()
