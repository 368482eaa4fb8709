"""The strategic merge of a role's `template` into the pod template that the operator renders.

The rules are those of `kubectl patch --type strategic` for a pod template, as far as users need them:

- objects merge key by key, `null` deletes a key;
- lists whose items have an identity (containers, env, volumes, ...) merge item by item; new items are appended;
  `{<key>: x, $patch: delete}` removes one;
- `{$patch: replace, ...}` replaces an object instead of merging into it;
- all other lists (args, command, tolerations, ...) are replaced.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

_DEEP = {"containers": "name", "initContainers": "name"}
_WHOLE = {
    # Their items hold a choice of one (a volume's source, a variable's value or valueFrom): a merge of two choices would
    # be invalid, so an item replaces the one with the same identity.
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}


class OverlayError(ValueError):
    """The overlay cannot be merged; the message names the path and what was expected."""


def strategic_merge(base: Mapping[str, Any], overlay: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """`base` with `overlay` merged into it; neither is changed.

    Raises OverlayError if the overlay has another shape than what it is merged into.
    """
    if overlay.get("$patch") == "replace":
        return {key: deepcopy(value) for key, value in overlay.items() if key != "$patch"}
    merged = dict(deepcopy(dict(base)))
    for key, value in overlay.items():
        where = f"{path}.{key}" if path else key
        below = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif below is not None and _shape(below) != _shape(value):
            raise OverlayError(f"{where} must be {_a(below)}, not {_a(value)}")
        elif isinstance(value, Mapping):
            merged[key] = strategic_merge(below or {}, value, where)
        elif key in _DEEP or key in _WHOLE:
            merged[key] = _merge_items(below or [], value, key, where)
        else:
            merged[key] = deepcopy(value)
    return merged


def with_labels(pod: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """The pod template with `labels` winning over the overlay's: selectors and the router must find the pods."""
    metadata = dict(pod.get("metadata") or {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    return {**pod, "metadata": metadata}


def _merge_items(base: Sequence[Any], overlay: Any, field: str, path: str) -> list[Any]:
    identity = _DEEP.get(field) or _WHOLE[field]
    if not isinstance(overlay, list):
        raise OverlayError(f"{path} must be a list of objects with {identity}, not {_a(overlay)}")
    items = list(base)
    for position, item in enumerate(overlay):
        if not isinstance(item, Mapping) or identity not in item:
            raise OverlayError(f"{path}[{position}] must be an object with {identity}")
        found = next((i for i, old in enumerate(items) if old[identity] == item[identity]), None)
        if item.get("$patch") == "delete":
            if found is not None:
                del items[found]
        elif found is None:
            items.append(strategic_merge({}, item, f"{path}[{position}]"))
        elif field in _DEEP:
            items[found] = strategic_merge(items[found], item, f"{path}[{position}]")
        else:
            items[found] = strategic_merge({}, item, f"{path}[{position}]")
    return items


def _shape(value: object) -> str:
    if isinstance(value, Mapping):
        return "object"
    return "list" if isinstance(value, list) else "value"


def _a(value: object) -> str:
    return {"object": "an object", "list": "a list", "value": "a plain value"}[_shape(value)]
