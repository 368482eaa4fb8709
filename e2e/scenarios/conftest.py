"""What the scenarios share: the operator in the cluster, a DisaggInference on CPU, and what a plain engine answers."""

from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster, Progress, Provider, expose_engine
from e2e.demo.stack import MODEL, Stack
from e2e.engines import EngineSpec, running
from e2e.images.engine import ensure_model
from e2e.inference import Inference
from e2e.scenarios.talk import SCRIPTS, PlainAnswers, client_of, converse, cpu_manifest

IMAGES = ("operator", "router", "connector", "engine-cpu")


@pytest.fixture(scope="session")
def plain_answers() -> PlainAnswers:
    """What one plain engine, without connector or router, answers to each script, greedily."""
    spec = EngineSpec(model=ensure_model("smollm2-135m"), served_name=MODEL)
    with running(spec, "plain") as engine, client_of(engine.url) as client:
        return {script: tuple(converse(client, script)) for script in SCRIPTS}


@pytest.fixture(scope="session")
def operator(cluster: Cluster, provider: Provider, plain_answers: object) -> Stack:
    """The chart, installed; images, engine and models are where the manifests expect them.

    Comes after the plain engine has done its work and stopped, since two cores are enough for two engines.
    """
    progress = Progress()
    provider.load_images(IMAGES, progress)
    expose_engine(provider, progress, ("smollm2-135m", "tiny-qwen3"))
    stack = Stack(cluster)
    stack.install_operator()
    cluster.wait_ready("deployment/disagg-disagg-operator", "disagg-system")
    return stack


@pytest.fixture(scope="module")
def agents(operator: Stack) -> Iterator[Inference]:
    """A DisaggInference with one prefill and one decode engine, ready."""
    inference = Inference(operator.cluster, "agents")
    operator.cluster.apply(cpu_manifest(inference.name))
    try:
        inference.wait_ready()
        yield inference
    finally:
        inference.delete()
