{{/* Name of everything in the release's namespace. */}}
{{- define "disagg-operator.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of what lives outside the release's namespace: with the namespace, so that equal releases do not meet. */}}
{{- define "disagg-operator.widename" -}}
{{- printf "%s:%s" .Release.Namespace (include "disagg-operator.fullname" .) -}}
{{- end -}}

{{- define "disagg-operator.selectorLabels" -}}
app.kubernetes.io/name: disagg-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "disagg-operator.labels" -}}
{{ include "disagg-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: disagg-inference
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* An image reference, of a dict with root and image. */}}
{{- define "disagg-operator.image" -}}
{{- $registry := required "\n\nSet images.registry to where the operator's images were pushed (docs/install.md): --set images.registry=registry.example.com/disagg\n" .root.Values.images.registry -}}
{{- if .image.digest -}}
{{- printf "%s/%s@%s" $registry .image.name .image.digest -}}
{{- else -}}
{{- printf "%s/%s:%s" $registry .image.name (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Labels and annotations of a CustomResourceDefinition. */}}
{{- define "disagg-operator.crdMetadata" -}}
labels:
  {{- include "disagg-operator.labels" . | nindent 2 }}
{{- if .Values.crds.keep }}
annotations:
  helm.sh/resource-policy: keep
{{- end }}
{{- end -}}

{{/* Stops early, and says what to do, if a CustomResourceDefinition is there and not of this release. */}}
{{- define "disagg-operator.crdGuard" -}}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" .crd -}}
{{- if $found -}}
{{- $notes := default dict $found.metadata.annotations -}}
{{- $name := index $notes "meta.helm.sh/release-name" -}}
{{- $namespace := index $notes "meta.helm.sh/release-namespace" -}}
{{- if or (ne (default "" $name) .root.Release.Name) (ne (default "" $namespace) .root.Release.Namespace) -}}
{{- fail (printf "\n\nThe CRD %s is already in this cluster and belongs to %s.\nInstall this release without CRDs: --set crds.enabled=false\n" .crd (ternary (printf "release %s in namespace %s" $name $namespace) "no Helm release" (not (empty $name)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What the operator does to objects, in each namespace that it serves. */}}
{{- define "disagg-operator.rules" -}}
# Its own kind: read the wish, write the status, never the spec.
- apiGroups: [inference.disagg.dev]
  resources: [disagginferences]
  verbs: [get, list, watch]
- apiGroups: [inference.disagg.dev]
  resources: [disagginferences/status]
  verbs: [get, patch]
# Owner references that block the owner's deletion, where the cluster guards them.
- apiGroups: [inference.disagg.dev]
  resources: [disagginferences/finalizers]
  verbs: [update]
# Children: made and changed by server-side apply, which is create and patch.
- apiGroups: [inference.disagg.dev]
  resources: [disagginferencescalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [inference.disagg.dev]
  resources: [disagginferencescalers/status]
  verbs: [get, patch]
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# The keys that engines recognize each other by: read, made and rotated by name. Their Secrets' names are not known here, so
# the rule cannot name them; without list and watch nothing is found whose name is not known.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, update]
# Pods tell why they do not come up.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# Its own events, and those of others that explain a failure (image pull, quota, scheduling).
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
# What a router may do; nobody can grant more than they have.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- end -}}
