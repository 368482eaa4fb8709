"""Router pods: what of the spec becomes what of the pod."""

from typing import Any

from operator_world import ROTATE, SETTINGS, World, minimal_spec, parsed_spec, resource

from disagg_operator.build.router import build_router, build_router_config, router_config
from disagg_operator.build.services import build_router_service
from disagg_operator.naming import CONTROL_KEYS

TLS: dict[str, Any] = {"router": {"tls": {"secretName": "team-tls"}}}
AUTH: dict[str, Any] = {"router": {"auth": {"apiKeySecretRef": {"name": "team-keys", "key": "keys.txt"}}}}

SHARING: dict[str, Any] = {"kvTransfer": {"mode": "BidirectionalPull"}}


def pod(**changes: Any) -> Any:
    spec = parsed_spec(**changes)
    config = build_router_config("demo", "default", spec)
    return build_router("demo", "default", spec, config, SETTINGS)["spec"]["template"]


def service(**changes: Any) -> Any:
    return build_router_service("demo", "default", parsed_spec(**changes).router)["spec"]


def roll_routers_alone(world: World, volume: str, **changes: Any) -> Any:
    """What the world comes to by `changes`: both routers have the volume, all is ready, no engine is another than before."""

    def engines() -> dict[str, Any]:
        return {name: p.template for name, p in world.pods.items() if "router" not in name}

    before = engines()
    world.edit(**changes)
    said = world.settle()
    ready = world.condition("Ready")
    assert ready is not None
    assert ready["status"] == "True"
    routers = [p for name, p in world.pods.items() if "router" in name]
    assert len(routers) == 2
    for router in routers:
        assert volume in [mounted["name"] for mounted in router.template["spec"]["volumes"]]
    assert engines() == before
    return said


def test_without_auth_and_tls_nothing_is_mounted_and_nothing_is_said_of_them() -> None:
    assert [volume["name"] for volume in pod()["spec"]["volumes"]] == ["config"]
    config = router_config("demo", "default", parsed_spec())
    assert not {"auth", "tls"} & config.keys()


def test_the_key_of_the_secret_is_the_file_that_the_router_is_told_of() -> None:
    spec = pod(**AUTH)["spec"]
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "api-keys")
    assert volume["secret"] == {
        "secretName": "team-keys",
        "items": [{"key": "keys.txt", "path": "api-keys"}],
        "optional": False,
    }
    (main,) = spec["containers"]
    mount = next(mount for mount in main["volumeMounts"] if mount["name"] == "api-keys")
    assert mount["readOnly"]
    assert "subPath" not in mount, "a single file would never change"
    told = router_config("demo", "default", parsed_spec(**AUTH))["auth"]["apiKeysFile"]
    assert told == f"{mount['mountPath']}/api-keys"
    mounts = [mount["mountPath"] for mount in main["volumeMounts"]]
    assert not any(a != b and a.startswith(b + "/") for a in mounts for b in mounts), "none inside another"


def test_the_certificate_and_its_key_are_the_files_that_the_router_is_told_of() -> None:
    spec = pod(**TLS)["spec"]
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "tls")
    files = [{"key": name, "path": name} for name in ("tls.crt", "tls.key")]
    assert volume["secret"] == {"secretName": "team-tls", "items": files, "optional": False}
    (main,) = spec["containers"]
    mount = next(mount for mount in main["volumeMounts"] if mount["name"] == "tls")
    assert mount["readOnly"]
    assert "subPath" not in mount, "a single file would never change"
    told = router_config("demo", "default", parsed_spec(**TLS))["tls"]
    assert told == {
        f"{what}File": f"{mount['mountPath']}/tls.{end}"
        for what, end in (("certificate", "crt"), ("key", "key"))
    }


def test_keys_and_tls_go_together() -> None:
    both = {"router": TLS["router"] | AUTH["router"]}
    names = [volume["name"] for volume in pod(**both)["spec"]["volumes"]]
    assert names == ["config", "api-keys", "tls"]
    mounts = [mount["mountPath"] for mount in pod(**both)["spec"]["containers"][0]["volumeMounts"]]
    assert len(set(mounts)) == 3
    assert not any(a != b and a.startswith(b + "/") for a in mounts for b in mounts), "none inside another"


def test_clients_are_told_of_https_and_probes_are_not() -> None:
    (plain,), (encrypted,) = service()["ports"], service(**TLS)["ports"]
    assert (plain["name"], "appProtocol" in plain) == ("http", False)
    assert (encrypted["name"], encrypted["appProtocol"]) == ("https", "https")
    names = {port["name"]: port["containerPort"] for port in pod(**TLS)["spec"]["containers"][0]["ports"]}
    assert {encrypted["targetPort"]: 8000, "admin": 8001} == names
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = pod(**TLS)["spec"]["containers"][0][probe]["httpGet"]
        assert (get["port"], get.get("scheme", "HTTP")) == ("admin", "HTTP")


def test_a_certificate_rolls_the_routers_and_no_engine_and_changes_the_endpoint() -> None:
    world = World(resource(minimal_spec()))
    before = world.settle().status
    assert before.endpoint == "http://demo-router.default.svc:8000/v1"
    said = roll_routers_alone(world, "tls", **TLS).status
    assert said.endpoint == "https://demo-router.default.svc:8000/v1"


def test_small_turns_stay_on_decode_only_if_that_is_wanted() -> None:
    spec = parsed_spec(router={"localPrefill": {"maxTokens": 99}})
    assert "localPrefill" not in router_config("demo", "default", spec)
    for mode in ("Threshold", "Auto"):
        spec = parsed_spec(router={"localPrefill": {"mode": mode}})
        assert router_config("demo", "default", spec)["localPrefill"] == {"mode": mode, "maxTokens": 512}


def test_keys_that_change_roll_no_pod_but_another_secret_does() -> None:
    other = {"router": {"auth": {"apiKeySecretRef": {"name": "other-keys", "key": "keys.txt"}}}}
    assert pod(**AUTH) != pod(**other)
    assert pod(**AUTH)["metadata"]["annotations"] == pod(**other)["metadata"]["annotations"]
    assert pod(**AUTH)["metadata"]["annotations"] != pod()["metadata"]["annotations"]


def test_asking_for_keys_rolls_the_routers_and_no_engine() -> None:
    world = World(resource(minimal_spec()))
    world.settle()
    said = roll_routers_alone(world, "api-keys", **AUTH)
    assert said.status.observed_generation == 2


def test_the_operator_itself_looks_at_no_key() -> None:
    """The Secrets are the user's: they are neither read, applied nor pruned."""
    world = World(resource(minimal_spec(router=TLS["router"] | AUTH["router"])))
    plan = world.plan()
    applied = [item for item in plan.apply if item["kind"] == "Secret"]
    assert not applied
    assert plan.secret is not None
    assert plan.secret.manifest["metadata"]["name"] == "demo-control"


def test_replicas_share_handles_by_the_secret_and_their_pods_names_and_in_one_mode_only() -> None:
    spec = pod(**SHARING)["spec"]
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "replicas")
    assert volume["secret"]["secretName"] == "demo-control"
    assert [(item["key"], item["path"]) for item in volume["secret"]["items"]] == [
        (k, k) for k in CONTROL_KEYS
    ]
    (main,) = spec["containers"]
    mount = next(mount for mount in main["volumeMounts"] if mount["name"] == "replicas")
    assert mount["readOnly"]
    assert "subPath" not in mount, "a single file would never change"
    told = router_config("demo", "default", parsed_spec(**SHARING))["handles"]
    assert told == {"secretDir": mount["mountPath"]}
    assert "--name=$(POD_NAME)" in main["args"]
    assert main["env"] == [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    mounts = [mount["mountPath"] for mount in main["volumeMounts"]]
    assert not any(a != b and a.startswith(b + "/") for a in mounts for b in mounts), "none inside another"

    for mode in ("BidirectionalPush", "Push", "Pull"):
        other: dict[str, Any] = {"kvTransfer": {"mode": mode}}
        assert "handles" not in router_config("demo", "default", parsed_spec(**other))
        assert [volume["name"] for volume in pod(**other)["spec"]["volumes"]] == ["config"]
        assert "env" not in pod(**other)["spec"]["containers"][0]


def test_secrets_that_are_rotated_roll_no_router() -> None:
    world = World(resource(minimal_spec(**SHARING)))
    world.settle()
    routers = {name: p.template for name, p in world.pods.items() if "router" in name}
    assert len(routers) == 2
    world.now += ROTATE
    plan = world.plan()
    assert plan.secret is not None
    assert not plan.apply
    world.settle()
    assert {name: p.template for name, p in world.pods.items() if "router" in name} == routers
