{{/* Names, labels, images. */}}
{{- define "kvatlas.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "kvatlas.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{/* Room for a suffix: names stay within 63 characters. */}}
{{- define "kvatlas.suffixed" -}}
{{- printf "%s-%s" (include "kvatlas.fullname" .root | trunc (int (sub 62 (len .suffix))) | trimSuffix "-") .suffix }}
{{- end }}

{{- define "kvatlas.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvatlas.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvatlas.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "kvatlas.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* metadata of a resource: (dict "root" $ "component" "router" "name" NAME "labels" {} "annotations" {} "namespace" "") */}}
{{- define "kvatlas.metadata" -}}
name: {{ .name }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "kvatlas.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kvatlas.image" -}}
{{- $image := .image }}
{{- $repository := $image.repository }}
{{- with $image.registry }}{{ $repository = printf "%s/%s" . $repository }}{{ end }}
{{- if $image.digest }}
{{- printf "%s@%s" $repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (default .defaultTag $image.tag) }}
{{- end }}
{{- end }}

{{- define "kvatlas.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvatlas.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* "true" where a gateway carries the requests, and asks here. */}}
{{- define "kvatlas.picks" -}}
{{- if eq .Values.mode "gateway" }}true{{ end }}
{{- end }}

{{- define "kvatlas.pool" -}}
{{- .Values.gateway.pool.name | default (include "kvatlas.fullname" .) }}
{{- end }}

{{/* "true" where engines are found by their pods' labels. */}}
{{- define "kvatlas.discovers" -}}
{{- if or .Values.engines.selector (include "kvatlas.picks" .) }}true{{ end }}
{{- end }}

{{/* Namespaces that are looked in, as a JSON list. */}}
{{- define "kvatlas.namespaces" -}}
{{- .Values.engines.namespaces | default (list .Release.Namespace) | toJson }}
{{- end }}

{{/* The secret with the shared index's URL, and its key; nothing where the URL is no secret. */}}
{{- define "kvatlas.indexSecret" -}}
{{- if .Values.valkey.enabled }}
{{- .Values.valkey.existingSecret | default (include "kvatlas.suffixed" (dict "root" . "suffix" "valkey")) }}
{{- else }}
{{- .Values.redis.existingSecret }}
{{- end }}
{{- end }}

{{/* Valkey's own password, the same wherever one rendering asks: that of the secret in the cluster, so that an upgrade
keeps it. Without a cluster to ask (helm template, Argo CD) it is new with each rendering: valkey.existingSecret is for those. */}}
{{- define "kvatlas.valkeyPassword" -}}
{{- if not (hasKey .Values.valkey "password") }}
{{- $old := lookup "v1" "Secret" .Release.Namespace (include "kvatlas.indexSecret" .) }}
{{- $password := randAlphaNum 32 }}
{{- with $old }}{{ $password = index .data "password" | b64dec }}{{ end }}
{{- $_ := set .Values.valkey "password" $password }}
{{- end }}
{{- .Values.valkey.password }}
{{- end }}

{{/* Changes with the password, so that routers and Valkey take a new one together. */}}
{{- define "kvatlas.indexChecksum" -}}
{{- if .Values.valkey.existingSecret }}
{{- $secret := lookup "v1" "Secret" .Release.Namespace .Values.valkey.existingSecret | default dict }}
{{- printf "%s %s" .Values.valkey.existingSecret (toJson (get $secret "data")) | sha256sum }}
{{- else }}
{{- include "kvatlas.valkeyPassword" . | sha256sum }}
{{- end }}
{{- end }}

{{- define "kvatlas.indexSecretKey" -}}
{{- if .Values.valkey.enabled }}url{{ else }}{{ .Values.redis.existingSecretKey }}{{ end }}
{{- end }}

{{- define "kvatlas.sharesIndex" -}}
{{- if or .Values.redis.url .Values.redis.existingSecret .Values.valkey.enabled }}true{{ end }}
{{- end }}

{{/* How the router's port is spoken to. */}}
{{- define "kvatlas.scheme" -}}
{{- if .Values.tls.existingSecret }}https{{ else }}http{{ end }}
{{- end }}

{{/* "true" where others than the pod itself reach the ops port. */}}
{{- define "kvatlas.servesOps" -}}
{{- if or .Values.ops.existingSecret .Values.ops.open }}true{{ end }}
{{- end }}

{{/* Models by served name: `model` and `models` in one, as JSON. */}}
{{- define "kvatlas.models" -}}
{{- $models := deepCopy .Values.models }}
{{- if or .Values.model.tokenizer.existingClaim .Values.model.tokenizer.repo .Values.model.settings }}
{{- $_ := set $models .Values.model.name (omit .Values.model "name") }}
{{- end }}
{{- toJson $models }}
{{- end }}

{{/* Claims that hold tokenizers, each once, as a JSON list. */}}
{{- define "kvatlas.tokenizerClaims" -}}
{{- $claims := list }}
{{- range $model := include "kvatlas.models" . | fromJson }}
{{- with (dig "tokenizer" "existingClaim" "" $model) }}{{ $claims = append $claims . }}{{ end }}
{{- end }}
{{- $claims | uniq | sortAlpha | toJson }}
{{- end }}

{{/* What a probe asks: (dict "root" $ "path" "/health" "service" "liveness") */}}
{{- define "kvatlas.asks" -}}
{{- if include "kvatlas.picks" .root }}
grpc: {port: 9003, service: {{ .service }}}
{{- else }}
httpGet: {path: {{ .path }}, port: http, scheme: {{ include "kvatlas.scheme" .root | upper }}}
{{- end }}
{{- end }}
