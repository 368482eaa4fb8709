"""The part of the spec about serving clients: router, network policy."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import ApiObject, Opaque, list_type
from .engine import Resources
from .model import SecretKeyRef


class RoutingPolicy(StrEnum):
    """How the router chooses engines."""

    SESSION_AFFINITY = "SessionAffinity"
    LEAST_LOADED = "LeastLoaded"
    ROUND_ROBIN = "RoundRobin"


class LocalPrefillMode(StrEnum):
    """When decode computes a prompt itself."""

    DISABLED = "Disabled"
    THRESHOLD = "Threshold"
    AUTO = "Auto"


class ServiceType(StrEnum):
    """Type of the router's Service."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class RouterPolicy(ApiObject):
    """How the router chooses engines."""

    type: Annotated[
        RoutingPolicy,
        Field(
            description="SessionAffinity: a conversation stays with the engines that hold its KV; a new one goes where "
            "every router replica would send it, or elsewhere if that is overloaded. LeastLoaded: every turn goes to the engines with the "
            "fewest turns. RoundRobin: to one after the other. These two do not look at conversations, so that most turns move KV first."
        ),
    ] = RoutingPolicy.SESSION_AFFINITY


class Session(ApiObject):
    """How the router recognizes a conversation."""

    keys: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$")], ...],
        Field(
            max_length=8,
            json_schema_extra=list_type("atomic"),
            description="Request headers that name the conversation, the first that is present counts.",
        ),
    ] = ("X-Session-Id",)
    body_fields: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...],
        Field(
            max_length=8,
            json_schema_extra=list_type("atomic"),
            description="Fields of the request's body that name the conversation if no header does, the first that is a text "
            "counts. user or prompt_cache_key may be named here if their values never stand for several conversations at a "
            "time. Without any the beginning of the conversation's text decides.",
        ),
    ] = ("session_id",)


class LocalPrefill(ApiObject):
    """When decode computes a prompt itself, without the prefill pool."""

    mode: Annotated[
        LocalPrefillMode,
        Field(
            description="Disabled: prefill computes every turn. Threshold: turns of at most maxTokens new tokens run on decode "
            "alone, which has the conversation in its own prefix cache. Auto: a turn runs where its first token comes sooner, by "
            "what the router measures of its own turns, unless tokens of others on decode would have to wait for it."
        ),
    ] = LocalPrefillMode.DISABLED
    max_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="New tokens up to which a turn is small, with mode Threshold; with Auto until enough has been measured.",
        ),
    ] = 512


class Auth(ApiObject):
    """Who may call the router."""

    api_key_secret_ref: Annotated[
        SecretKeyRef,
        Field(
            description="Secret with the accepted API keys, one a line. Changes reach running routers within a minute or two."
        ),
    ]


class Tracing(ApiObject):
    """OpenTelemetry traces of the router."""

    endpoint: Annotated[
        str,
        Field(
            max_length=2048,
            pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$",
            description="Base URL of a collector that takes OTLP over HTTP, such as http://collector.observability:4318; "
            "/v1/traces is appended. OTEL_* variables in the template's container complete it: sampling, headers, certificates.",
        ),
    ]


class TLS(ApiObject):
    """Encryption of the router's port for clients."""

    secret_name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=253,
            description="Secret of type kubernetes.io/tls. A renewed certificate reaches running routers within a minute or two.",
        ),
    ]


class RouterService(ApiObject):
    """The Service that clients call."""

    type: Annotated[ServiceType, Field(description="Type of the Service.")] = ServiceType.CLUSTER_IP
    port: Annotated[int, Field(ge=1, le=65535, description="Port of the Service.")] = 8000
    annotations: Annotated[
        dict[str, Annotated[str, Field(max_length=4096)]],
        Field(
            max_length=32, description="Annotations of the Service, for example for a cloud's load balancer."
        ),
    ] = Field(default_factory=dict)


class Deadlines(ApiObject):
    """How long the router waits."""

    connect_seconds: Annotated[int, Field(ge=1, le=60, description="For a connection to an engine.")] = 5
    first_byte_seconds: Annotated[
        int,
        Field(
            ge=1,
            le=3600,
            description="For decode's first byte; then the turn is sent again as an ordinary request. Not longer than "
            "kvTransfer.leaseSeconds.",
        ),
    ] = 60
    idle_seconds: Annotated[
        int,
        Field(ge=1, le=3600, description="Between two pieces of an answer, before the stream is given up."),
    ] = 120


class Limits(ApiObject):
    """How large a request may be."""

    body_bytes: Annotated[int, Field(ge=1024, le=1_073_741_824, description="Largest request body.")] = (
        33_554_432
    )
    head_bytes: Annotated[
        int, Field(ge=1024, le=1_048_576, description="Largest request line and headers.")
    ] = 65_536


class Overload(ApiObject):
    """How many turns a router replica lets through, and who waits."""

    turns_per_engine: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="Turns under way for each ready decode engine, counted by each replica for itself. All replicas together "
            "should let through what the engines run at a time (vLLM's --max-num-seqs), and a little more.",
        ),
    ] = 512
    waiting_turns: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="Turns above that which wait in memory; more are refused with 429. 0: nobody waits.",
        ),
    ] = 1024
    waiting_turns_per_session: Annotated[
        int, Field(ge=1, le=1_000_000, description="Of these, how many may be of one conversation.")
    ] = 128
    wait_seconds: Annotated[
        int, Field(ge=1, le=3600, description="How long a turn waits before it is refused with 503.")
    ] = 30


class Router(ApiObject):
    """The OpenAI-compatible front, which pairs prefill and decode for every turn."""

    replicas: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="Number of router pods; they share no state but handles of KV in mode BidirectionalPull.",
        ),
    ] = 2
    resources: Annotated[Resources, Field(description="Requests and limits of the router's container.")] = (
        Resources()
    )
    template: Annotated[
        Opaque,
        Field(
            description="Overlay on the router's pod template, as for the roles; the container is called main."
        ),
    ] = Field(default_factory=dict)
    policy: Annotated[RouterPolicy, Field(description="How engines are chosen.")] = RouterPolicy()
    session: Annotated[Session, Field(description="How a conversation is recognized.")] = Session()
    local_prefill: Annotated[LocalPrefill, Field(description="When decode computes a prompt itself.")] = (
        LocalPrefill()
    )
    auth: Annotated[Auth | None, Field(description="Who may call the router; anybody if absent.")] = None
    tls: Annotated[
        TLS | None,
        Field(description="HTTPS, and nothing else, on the router's port for clients; plain HTTP if absent."),
    ] = None
    tracing: Annotated[
        Tracing | None, Field(description="OpenTelemetry traces of turns; none are made if absent.")
    ] = None
    service: Annotated[RouterService, Field(description="The Service that clients call.")] = RouterService()
    deadlines: Annotated[Deadlines, Field(description="How long the router waits.")] = Deadlines()
    limits: Annotated[Limits, Field(description="How large a request may be.")] = Limits()
    overload: Annotated[
        Overload, Field(description="How many turns a replica lets through, and who waits.")
    ] = Overload()


class NetworkPolicy(ApiObject):
    """Who may reach the engines' ports."""

    enabled: Annotated[
        bool,
        Field(
            description="Create NetworkPolicies that admit router, peers and operator only. Not implemented yet, hence "
            "off; a later version turns it on by default."
        ),
    ] = False
