{{- define "strata.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "strata.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "strata.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "strata.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* NetworkPolicies of deployments let in the pods with these two labels: the operator renders them so. */}}
{{- define "strata.identity" -}}
app.kubernetes.io/name: strata
app.kubernetes.io/component: operator
{{- end -}}

{{- define "strata.selectorLabels" -}}
{{ include "strata.identity" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "strata.labels" -}}
{{ include "strata.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "strata.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "strata.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The namespaces that are served, as a JSON list; empty: all. */}}
{{- define "strata.namespaces" -}}
{{- if .Values.clusterScope -}}
{{- if .Values.watchNamespaces }}{{ fail "clusterScope serves all namespaces: leave watchNamespaces empty, or clusterScope false" }}{{ end -}}
[]
{{- else -}}
{{- default (list .Release.Namespace) .Values.watchNamespaces | toJson -}}
{{- end -}}
{{- end -}}

{{/* What the operator may do in the namespaces that it serves. Secrets are created and deleted, never changed. */}}
{{- define "strata.namespacedRules" -}}
- apiGroups: [strata.dev]
  resources: [llmdeployments]
  verbs: [get, list, watch]
- apiGroups: [strata.dev]
  resources: [llmdeployments/status]
  verbs: [get, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [delete]
# Whether slots on several nodes can mount what a deployment names.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch]
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}
