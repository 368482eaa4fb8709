"""Builds the CustomResourceDefinitions and everything that is generated from them.

python -m disagg_operator.api.crd            write crds/, the chart's copies and docs/api-reference.md
python -m disagg_operator.api.crd --check    fail if any of them is stale
"""

import argparse
import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .base import GROUP, VERSION
from .reference import api_reference
from .schema import Schema, structural
from .types import KIND, PLURAL, SCALER_KIND, SCALER_PLURAL, ApiObject, DisaggInference, DisaggInferenceScaler

SHORT_NAME = "di"
SCALER_SHORT_NAME = "discaler"
_GENERATED = "# Generated from operator/src/disagg_operator/api by `make crds`; do not edit.\n"


def disagginference_crd() -> dict[str, Any]:
    """The CustomResourceDefinition of DisaggInference."""
    return _crd(
        DisaggInference,
        kind=KIND,
        plural=PLURAL,
        short_name=SHORT_NAME,
        subresources={"status": {}},
        columns=(
            _column(
                "Ready",
                '.status.conditions[?(@.type=="Ready")].status',
                "Whether clients are served as asked.",
            ),
            _column("Prefill", '.status.roles[?(@.name=="prefill")].ready', "Prefill pods, ready/desired."),
            _column("Decode", '.status.roles[?(@.name=="decode")].ready', "Decode pods, ready/desired."),
            _column(
                "Reuse%", ".status.reuse.ratioPercent", "Prompt tokens not computed again.", type_="integer"
            ),
            _column("Mode", ".spec.kvTransfer.mode", "How KV moves."),
            _column(
                "Reason", '.status.conditions[?(@.type=="Ready")].reason', "Why Ready is as it is.", wide=True
            ),
            _column("Model", ".spec.model.uri", "The model.", wide=True),
            _column("Endpoint", ".status.endpoint", "Base URL for OpenAI clients.", wide=True),
            _column("Age", ".metadata.creationTimestamp", "Time since creation.", type_="date"),
        ),
    )


def scaler_crd() -> dict[str, Any]:
    """The CustomResourceDefinition of DisaggInferenceScaler."""
    return _crd(
        DisaggInferenceScaler,
        kind=SCALER_KIND,
        plural=SCALER_PLURAL,
        short_name=SCALER_SHORT_NAME,
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        columns=(
            _column("Desired", ".spec.replicas", "Pods wanted.", type_="integer"),
            _column("Current", ".status.replicas", "Pods that exist and take new turns.", type_="integer"),
            _column("Age", ".metadata.creationTimestamp", "Time since creation.", type_="date"),
        ),
    )


def _crd(
    model: type[ApiObject],
    *,
    kind: str,
    plural: str,
    short_name: str,
    subresources: Mapping[str, Any],
    columns: tuple[dict[str, Any], ...],
) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": ["all", "disagg"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root(structural(model))},
                    "subresources": dict(subresources),
                    "additionalPrinterColumns": list(columns),
                }
            ],
        },
    }


def _root(schema: Schema) -> Schema:
    """The schema of a whole object: with its type and metadata, and only spec required."""
    head = {
        "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
        "kind": {"type": "string", "description": "The kind of the object."},
        "metadata": {"type": "object"},
    }
    status = {k: v for k, v in schema["properties"]["status"].items() if k != "default"}
    return schema | {"properties": head | schema["properties"] | {"status": status}, "required": ["spec"]}


def _column(
    name: str, path: str, description: str, *, type_: str = "string", wide: bool = False
) -> dict[str, Any]:
    column = {"name": name, "type": type_, "jsonPath": path, "description": description}
    return column | {"priority": 1} if wide else column


class _Dumper(yaml.SafeDumper):
    """Block style with indented lists and no aliases, as Kubernetes manifests are written."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_yaml(manifest: Mapping[str, Any]) -> str:
    """As YAML with keys in the order given."""
    return yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, width=118, allow_unicode=True)


def chart_template(crd: Mapping[str, Any]) -> str:
    """The CRD as a template of the chart: optional, and kept on uninstall."""
    text = to_yaml(crd)
    if "{{" in text:
        raise ValueError(
            f"{crd['metadata']['name']}: a description contains '{{{{', which Helm would evaluate"
        )
    name = f"  name: {crd['metadata']['name']}\n"
    metadata = f'{name}  {{{{- include "disagg-operator.crdMetadata" . | nindent 2 }}}}\n'
    guard = (
        f'{{{{- include "disagg-operator.crdGuard" (dict "root" . "crd" "{crd["metadata"]["name"]}") }}}}\n'
    )
    return (
        "{{- if .Values.crds.enabled }}\n"
        + guard
        + _GENERATED
        + text.replace(name, metadata, 1)
        + "{{- end }}\n"
    )


def generated_files() -> dict[str, str]:
    """Path in the repository -> content, of every generated file."""
    crds = [disagginference_crd(), scaler_crd()]
    files = {}
    for crd in crds:
        file = f"{GROUP}_{crd['spec']['names']['plural']}.yaml"
        files[f"crds/{file}"] = _GENERATED + to_yaml(crd)
        files[f"charts/disagg-operator/templates/crds/{file}"] = chart_template(crd)
    files["docs/api-reference.md"] = api_reference(crds)
    return files


def _stale(root: Path) -> list[str]:
    """A short diff per generated file that is not as it would be written."""
    diffs = []
    for name, wanted in generated_files().items():
        path = root / name
        present = path.read_text() if path.exists() else ""
        if present != wanted:
            lines = difflib.unified_diff(
                present.splitlines(),
                wanted.splitlines(),
                f"{name} (checked in)",
                f"{name} (generated)",
                lineterm="",
                n=1,
            )
            diffs.append("\n".join(list(lines)[:20]))
    return diffs


def main(argv: list[str] | None = None) -> int:
    """Writes or checks the generated files; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m disagg_operator.api.crd", description="Generate the CRDs."
    )
    parser.add_argument("--check", action="store_true", help="only tell whether the files are current")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository's root (default: here)")
    options = parser.parse_args(argv)
    if not (options.root / "pyproject.toml").exists():
        parser.error(f"{options.root.resolve()} is not the repository's root; run from there or pass --root")
    if options.check:
        stale = _stale(options.root)
        print(*stale, sep="\n", file=sys.stderr)
        if stale:
            print("generated files are stale: run `make crds` and commit the result", file=sys.stderr)
        return 1 if stale else 0
    for name, text in generated_files().items():
        path = options.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
