"""The operator's own settings, from environment variables that the chart sets."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

LEAST_ROTATE_DAYS = 0.05
"""More than an hour. kubelets bring a changed Secret to their pods within about two minutes."""


class ConfigError(ValueError):
    """A setting is missing or cannot be read; the message names the variable and what it may hold."""


@dataclass(frozen=True)
class Settings:
    """How this operator runs. Everything about a model or a pool is in the DisaggInference, not here."""

    router_image: str
    """Image of the router's Deployment: ROUTER_IMAGE."""
    connector_image: str
    """Image of the init container that puts the KV connector into an engine: CONNECTOR_IMAGE. Part of KV compatibility."""
    image_pull_policy: str | None = None
    """Pull policy of those two images: IMAGE_PULL_POLICY. None leaves it to Kubernetes. Engines are not concerned."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets, in the namespace of each DisaggInference, to pull those images with: IMAGE_PULL_SECRETS."""
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces that are served: WATCH_NAMESPACES, separated by commas. Empty is all."""
    workers: int = 4
    """Objects reconciled at the same time: WORKERS. One object never is by two."""
    resync_seconds: float = 300.0
    """How often an object is looked at although nothing seems to have happened: RESYNC_SECONDS."""
    rotate_days: float = 7.0
    """Days between two rotations of the keys that engines recognize each other by: ROTATE_DAYS."""
    prometheus_url: str = ""
    """Prometheus that engines' and routers' metrics are read from: PROMETHEUS_URL. Empty reads them from the pods. Not for
    users of a DisaggInference to choose: the operator connects to it."""
    http_port: int = 8080
    """Port of /healthz, /readyz and /metrics: HTTP_PORT."""
    log_level: str = "INFO"
    """LOG_LEVEL, a level of the standard library's logging."""
    lease_name: str = ""
    """Lease that keeps two operators from acting at once: LEASE_NAME. Empty is none, for a process on a desk."""
    pod_namespace: str = "default"
    """Where that Lease is: POD_NAMESPACE."""
    pod_name: str = ""
    """Who holds it: POD_NAME."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Settings":
        """Reads all settings; raises ConfigError for the first that is missing or unreadable."""
        env = os.environ if env is None else env
        return cls(
            router_image=_required(env, "ROUTER_IMAGE", "the router's image"),
            connector_image=_required(env, "CONNECTOR_IMAGE", "the connector's image"),
            image_pull_policy=_one_of(env, "IMAGE_PULL_POLICY", ("Always", "IfNotPresent", "Never")),
            image_pull_secrets=_words(env, "IMAGE_PULL_SECRETS"),
            watch_namespaces=_words(env, "WATCH_NAMESPACES"),
            workers=int(_positive(env, "WORKERS", cls.workers)),
            resync_seconds=_positive(env, "RESYNC_SECONDS", cls.resync_seconds),
            rotate_days=_rotate_days(env, cls.rotate_days),
            prometheus_url=_url(env, "PROMETHEUS_URL"),
            http_port=int(_positive(env, "HTTP_PORT", cls.http_port)),
            lease_name=env.get("LEASE_NAME", "").strip(),
            pod_namespace=env.get("POD_NAMESPACE", "").strip() or cls.pod_namespace,
            pod_name=env.get("POD_NAME", "").strip(),
            log_level=_one_of(env, "LOG_LEVEL", ("DEBUG", "INFO", "WARNING", "ERROR")) or cls.log_level,
        )


def _required(env: Mapping[str, str], key: str, what: str) -> str:
    value = env.get(key, "").strip()
    if not value:
        raise ConfigError(f"set {key} to {what}")
    return value


def _words(env: Mapping[str, str], key: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in env.get(key, "").split(",")) if word)


def _one_of(env: Mapping[str, str], key: str, allowed: tuple[str, ...]) -> str | None:
    value = env.get(key, "").strip()
    if value and value not in allowed:
        raise ConfigError(f"{key} is '{value}', it may be one of {', '.join(allowed)}")
    return value or None


def _url(env: Mapping[str, str], key: str) -> str:
    text = env.get(key, "").strip().rstrip("/")
    if text and (not text.startswith(("http://", "https://")) or not text.partition("://")[2]):
        raise ConfigError(f"{key} is '{text}', it must be an address like http://prometheus.monitoring:9090")
    return text


def _rotate_days(env: Mapping[str, str], default: float) -> float:
    days = _positive(env, "ROTATE_DAYS", default)
    if days < LEAST_ROTATE_DAYS:
        raise ConfigError(
            f"ROTATE_DAYS is {days:g}, it must be at least {LEAST_ROTATE_DAYS:g}: pods must have seen a rotation before the next"
        )
    return days


def _positive(env: Mapping[str, str], key: str, default: float) -> float:
    text = env.get(key, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{key} is '{text}', it must be a number greater than 0")
    return value
