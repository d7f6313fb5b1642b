{{/* What a schema cannot say: values that contradict each other. Each message names the keys and the remedy. */}}
{{- define "kvatlas.validate" -}}
{{- $v := .Values }}
{{- if not $v.image.repository }}
{{- fail "image.repository: name the image that you built and pushed, e.g. --set image.registry=my-registry.example --set image.repository=kvatlas; none is published" }}
{{- end }}
{{- if include "kvatlas.picks" . }}
{{- if and $v.gateway.pool.create (not $v.engines.selector) }}
{{- fail "engines.selector: the InferencePool selects pods by it; give the labels of the vLLM pods (--set engines.selector.app=vllm), or set gateway.pool.create=false and gateway.pool.name to one that is there" }}
{{- end }}
{{- if not (or $v.gateway.pool.create $v.gateway.pool.name) }}
{{- fail "gateway.pool.name: without gateway.pool.create name the InferencePool that is there" }}
{{- end }}
{{- if or $v.engines.namespaces $v.engines.clusterWide }}
{{- fail (printf "engines.%s: with mode gateway engines are in the release's namespace, as their InferencePool is; leave it out" (ternary "clusterWide" "namespaces" $v.engines.clusterWide)) }}
{{- end }}
{{- if $v.ingress.enabled }}
{{- fail "ingress.enabled: with mode gateway clients ask the gateway; use httpRoute.enabled" }}
{{- end }}
{{- range $port := list 9002 9003 }}
{{- if or (eq (int $v.ops.port) $port) (and $v.admin.enabled (eq (int $v.admin.port) $port)) }}
{{- fail (printf "ops.port, admin.port: %d is the picker's with mode gateway; take another one" $port) }}
{{- end }}
{{- end }}
{{- if and $v.admin.enabled (not $v.admin.port) }}
{{- fail "admin.port: 0 is the router's own port, which there is not with mode gateway; give one" }}
{{- end }}
{{- else if not (or $v.engines.selector $v.engines.static $v.admin.enabled) }}
{{- if not (dig "fleet" dict $v.config) }}
{{- fail "engines.selector: the router knows no engine; give the labels of the vLLM pods (--set engines.selector.app=vllm), engines.static, or enable admin" }}
{{- end }}
{{- end }}
{{- $most := ternary $v.autoscaling.maxReplicas $v.replicaCount $v.autoscaling.enabled }}
{{- if and (gt (int $most) 1) (not (include "kvatlas.sharesIndex" .)) }}
{{- fail (printf "%s: %d routers need a shared index; set redis.url, redis.existingSecret or valkey.enabled" (ternary "autoscaling.maxReplicas" "replicaCount" $v.autoscaling.enabled) (int $most)) }}
{{- end }}
{{- if and $v.autoscaling.enabled (gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas: %d is more than autoscaling.maxReplicas (%d)" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) }}
{{- end }}
{{- if and $v.autoscaling.enabled (not (dig "requests" "cpu" "" $v.resources)) }}
{{- fail "resources.requests.cpu: autoscaling.enabled measures CPU against the request; give one" }}
{{- end }}
{{- if and $v.valkey.enabled (or $v.redis.url $v.redis.existingSecret) }}
{{- fail "valkey.enabled: redis.url or redis.existingSecret names a shared index already; use one of them" }}
{{- end }}
{{- if and $v.admin.enabled (not $v.admin.existingSecret) }}
{{- fail "admin.existingSecret: the admin API is never served without a token; make a secret and name it here" }}
{{- end }}
{{- if and $v.ingress.enabled (not $v.ingress.hosts) }}
{{- fail "ingress.hosts: give at least one host name" }}
{{- end }}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) }}
{{- fail "httpRoute.parentRefs: give at least one gateway" }}
{{- end }}
{{- if and $v.serviceMonitor.enabled $v.podMonitor.enabled }}
{{- fail "podMonitor.enabled: serviceMonitor.enabled is on too and everything would be scraped twice; use one of them" }}
{{- end }}
{{- range $name, $enabled := dict "serviceMonitor" $v.serviceMonitor.enabled "podMonitor" $v.podMonitor.enabled }}
{{- if and $enabled (not (include "kvatlas.servesOps" $)) }}
{{- fail (printf "%s.enabled: metrics are on the ops port, which only the pod itself reaches; name a token's secret in ops.existingSecret, or set ops.open with a networkPolicy" $name) }}
{{- end }}
{{- end }}
{{- if has (int $v.ops.port) (list 8000 (ternary (int $v.admin.port) 0 $v.admin.enabled)) }}
{{- fail (printf "ops.port: %d is another port of the router; take one of its own" (int $v.ops.port)) }}
{{- end }}
{{- if and $v.engines.clusterWide $v.engines.namespaces }}
{{- fail "engines.namespaces: not used while engines.clusterWide is on; use one of them" }}
{{- end }}
{{- with $v.engines.drain.seconds }}
{{- if not (dig "proxy" "continue_streams" $v.engines.continueStreams $v.config) }}
{{- fail (printf "engines.drain.seconds: %v has no effect while streams do not go on from other engines; set engines.continueStreams=true" .) }}
{{- end }}
{{- if gt (add (int .) 5) (int $v.engines.drain.gracePeriodSeconds) }}
{{- fail (printf "engines.drain.seconds: %v is not 5 s below engines.drain.gracePeriodSeconds (%v), when the pods are killed; lower it, or raise terminationGracePeriodSeconds of the engines' pods and the value with it" . $v.engines.drain.gracePeriodSeconds) }}
{{- end }}
{{- end }}
{{- $ports := dict "server.port" "service.port" "server.ops_port" "ops.port" "admin.port" "admin.port" }}
{{- range $name, $section := $v.config }}
{{- range $key, $value := $section }}
{{- with get $ports (printf "%s.%s" $name $key) }}
{{- fail (printf "config.%s.%s: the chart's Service and probes would still use the port that it gives; set %s" $name $key .) }}
{{- end }}
{{- if kindIs "invalid" $value }}
{{- fail (printf "config.%s.%s: has no value; leave the key out" $name $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
