"""The operator's settings."""

import pytest

from disagg_operator.config import ConfigError, Settings

IMAGES = {"ROUTER_IMAGE": "r:1", "CONNECTOR_IMAGE": "c:1"}


def test_defaults() -> None:
    settings = Settings.from_env(IMAGES)
    assert settings == Settings(router_image="r:1", connector_image="c:1")
    assert settings.watch_namespaces == ()


def test_everything_that_the_chart_sets() -> None:
    settings = Settings.from_env(
        IMAGES
        | {
            "IMAGE_PULL_POLICY": "Never",
            "IMAGE_PULL_SECRETS": "a, b",
            "WATCH_NAMESPACES": "x,y,",
            "LOG_LEVEL": "DEBUG",
            "WORKERS": "8",
            "RESYNC_SECONDS": "60",
            "PROMETHEUS_URL": " http://prometheus.monitoring:9090/ ",
            "HTTP_PORT": "9090",
            "LEASE_NAME": "disagg",
            "POD_NAME": "p",
            "POD_NAMESPACE": "system",
        }
    )
    assert settings.image_pull_secrets == ("a", "b")
    assert settings.watch_namespaces == ("x", "y")
    assert (settings.workers, settings.resync_seconds, settings.http_port) == (8, 60.0, 9090)
    assert settings.prometheus_url == "http://prometheus.monitoring:9090"
    assert (settings.lease_name, settings.pod_name, settings.pod_namespace) == ("disagg", "p", "system")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ROUTER_IMAGE": ""}, "set ROUTER_IMAGE to the router's image"),
        ({"CONNECTOR_IMAGE": " "}, "set CONNECTOR_IMAGE to the connector's image"),
        ({"IMAGE_PULL_POLICY": "Sometimes"}, "IMAGE_PULL_POLICY is 'Sometimes', it may be one of Always"),
        ({"WORKERS": "many"}, "WORKERS is 'many', it must be a number greater than 0"),
        ({"RESYNC_SECONDS": "0"}, "RESYNC_SECONDS is '0'"),
        ({"RESYNC_SECONDS": "nan"}, "RESYNC_SECONDS is 'nan'"),
        ({"ROTATE_DAYS": "0.01"}, "ROTATE_DAYS is 0.01, it must be at least 0.05"),
        ({"ROTATE_DAYS": "-1"}, "ROTATE_DAYS is '-1'"),
        (
            {"PROMETHEUS_URL": "prometheus:9090"},
            "PROMETHEUS_URL is 'prometheus:9090', it must be an address like",
        ),
        ({"PROMETHEUS_URL": "https://"}, "PROMETHEUS_URL is"),
        ({"LOG_LEVEL": "loud"}, "LOG_LEVEL is 'loud'"),
    ],
    ids=str,
)
def test_a_bad_one_is_named_with_what_it_may_be(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.from_env(IMAGES | changes)
