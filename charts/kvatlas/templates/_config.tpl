{{/*
The application's configuration (TOML), made in this one place. What the values say comes first, `config` wins.
TOML takes JSON's strings, numbers, booleans and lists as they are; only tables are written differently.
*/}}
{{- define "kvatlas.tomlTable" -}}
{{- $path := .path }}
[{{ $path }}]
{{- range $key, $value := .table }}
{{- if not (kindIs "map" $value) }}
{{ include "kvatlas.tomlKey" $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- range $key, $value := .table }}
{{- if kindIs "map" $value }}
{{ include "kvatlas.tomlTable" (dict "path" (printf "%s.%s" $path (include "kvatlas.tomlKey" $key)) "table" $value) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvatlas.tomlKey" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . }}{{ . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}

{{- define "kvatlas.sections" -}}
{{- $v := .Values }}
{{- $sections := dict
  "server" (dict "host" "0.0.0.0" "port" 8000 "ops_port" $v.ops.port "expose_decision" $v.exposeDecision "log_level" $v.logLevel "log_format" $v.logFormat)
  "policy" (dict "policy" $v.policy)
  "fleet" (dict "warm_up_s_max" $v.warmUpSeconds)
  "listen" (dict "drain_s_max" $v.drainSeconds "drain_delay_s" $v.drainDelaySeconds)
  "index" (dict "namespace" $v.redis.namespace)
}}
{{- if and $v.redis.url (not $v.redis.existingSecret) }}
{{- $_ := set $sections.index "url" $v.redis.url }}
{{- end }}
{{- if include "kvatlas.sharesIndex" . }}
{{- $_ := set $sections.index "share" $v.redis.share }}
{{- end }}
{{- if include "kvatlas.servesOps" . }}
{{- $_ := set $sections.server "ops_host" "0.0.0.0" }}
{{- if $v.ops.existingSecret }}
{{- $_ := set $sections.server "ops_token_file" "/etc/kvatlas/ops/token" }}
{{- else }}
{{- $_ := set $sections.server "ops_open" true }}
{{- end }}
{{- end }}
{{- if $v.keys.existingSecret }}
{{- $_ := set $sections "keys" (dict "file" "/etc/kvatlas/keys/keys.toml") }}
{{- if ne $v.keys.isolate "off" }}
{{- $_ := set $sections.keys "isolate" $v.keys.isolate }}
{{- $_ := set $sections.keys "isolate_secret_file" "/etc/kvatlas/keys/isolate.secret" }}
{{- end }}
{{- else if ne $v.keys.isolate "off" }}
{{- fail (printf "keys.isolate = %s needs keys.existingSecret, with the file of keys and the secret of isolation" $v.keys.isolate) }}
{{- end }}
{{- if include "kvatlas.picks" . }}
{{- $_ := set $sections "epp" (dict "listen" "0.0.0.0:9002" "health_listen" "0.0.0.0:9003" "fallbacks" $v.gateway.fallbacks "drain_s_max" $v.drainSeconds "drain_delay_s" $v.drainDelaySeconds) }}
{{- end }}
{{- if $v.tls.existingSecret }}
{{- $section := ternary $sections.epp $sections.server (eq $v.mode "gateway") }}
{{- $_ := set $section "tls_cert_file" "/etc/kvatlas/tls/tls.crt" }}
{{- $_ := set $section "tls_key_file" "/etc/kvatlas/tls/tls.key" }}
{{- end }}
{{- if $v.engines.apiKey.existingSecret }}
{{- $_ := set $sections.fleet "api_key_file" "/etc/kvatlas/engine-key/key" }}
{{- end }}
{{- if include "kvatlas.discovers" . }}
{{- $pairs := list }}
{{- range $key, $value := $v.engines.selector }}{{ $pairs = append $pairs (printf "%s=%s" $key $value) }}{{ end }}
{{- $which := ternary (dict "inference_pool" (include "kvatlas.pool" .)) (dict "selector" (join "," $pairs)) (eq $v.mode "gateway") }}
{{- $_ := set $sections.fleet "kubernetes" (merge $which (dict
  "namespaces" (ternary (list "*") (include "kvatlas.namespaces" . | fromJsonArray) $v.engines.clusterWide)
  "port_name" $v.engines.ports.http
  "events_port_name" $v.engines.ports.events
  "replay_port_name" $v.engines.ports.replay
)) }}
{{- if $v.engines.deletionCosts }}{{ $_ := set $sections.fleet.kubernetes "deletion_costs" true }}{{ end }}
{{- with $v.engines.readyBy }}{{ $_ := set $sections.fleet.kubernetes "service_selector" (printf "kubernetes.io/service-name=%s" .) }}{{ end }}
{{- end }}
{{- $proxy := dict }}
{{- if not $v.engines.continueStreams }}{{ $_ := set $proxy "continue_streams" false }}{{ end }}
{{- with $v.engines.drain.seconds }}{{ $_ := set $proxy "move_drained_s" . }}{{ end }}
{{- if $proxy }}{{ $_ := set $sections "proxy" $proxy }}{{ end }}
{{- if $v.admin.enabled }}
{{- $admin := dict "enabled" true "token_file" "/etc/kvatlas/admin/token" }}
{{- if $v.admin.port }}{{ $admin = merge $admin (dict "host" "0.0.0.0" "port" $v.admin.port) }}{{ end }}
{{- $_ := set $sections "admin" $admin }}
{{- end }}
{{- $prompts := dict }}
{{- if not $v.model.tokenizer.download }}{{ $_ := set $prompts "hub_downloads" false }}{{ end }}
{{- with $v.model.tokenizer.endpoint }}{{ $_ := set $prompts "hub_endpoint" . }}{{ end }}
{{- if $prompts }}{{ $_ := set $sections "prompts" $prompts }}{{ end }}
{{- mustMergeOverwrite $sections (deepCopy $v.config) | toJson }}
{{- end }}

{{- define "kvatlas.config" -}}
# Made by Helm from the release's values.
{{- range $name, $table := include "kvatlas.sections" . | fromJson }}
{{ include "kvatlas.tomlTable" (dict "path" $name "table" $table) }}
{{- end }}
{{- range $name, $model := include "kvatlas.models" . | fromJson }}
{{- $settings := dict }}
{{- with (dig "tokenizer" "repo" "" $model) }}
{{- $revision := dig "tokenizer" "revision" "" $model }}
{{- $_ := set $settings "tokenizer" (ternary (printf "%s@%s" . $revision) . (ne $revision "")) }}
{{- end }}
{{- with (dig "tokenizer" "existingClaim" "" $model) }}
{{- $_ := set $settings "tokenizer" (clean (printf "/models/%s/%s" . (dig "tokenizer" "path" "" $model))) }}
{{- end }}
{{- $settings = mustMergeOverwrite $settings (deepCopy ($model.settings | default dict)) }}
{{ include "kvatlas.tomlTable" (dict "path" (printf "models.%s" (include "kvatlas.tomlKey" $name)) "table" $settings) }}
{{- end }}
{{- range .Values.engines.static }}

[[engines]]
{{- range $key, $value := . }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}
