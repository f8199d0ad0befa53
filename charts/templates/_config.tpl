{{/*
The configuration as the services read it: values.config, plus the keys that the chart sets itself.
Not rendered with toToml, which turns every integer into a float.
*/}}

{{- define "grpo.config" -}}
{{- $given := deepCopy .Values.config }}
{{- $section := dict }}
{{- range $name := list "run" "redis" "api" "sync" "trainer" "generator" "fleet" "web" }}
{{- $_ := set $section $name (index $given $name | default dict) }}
{{- end }}
{{- $_ := set $section.run "name" (toString (include "grpo.run" .)) }}
{{- $_ := set $section.run "dir" "/srv/grpo/runs" }}
{{- $_ := set $section.redis "url" (include "grpo.redisUrl" .) }}
{{- if include "grpo.users" . }}
{{- $_ := set $section.redis "password_file" "/run/grpo/secrets/users" }}
{{- else if .Values.redis.external.existingSecret }}
{{- $_ := set $section.redis "password_file" "/run/grpo/secrets/redis-password" }}
{{- end }}
{{- if include "grpo.redisAuthority" . }}
{{- $_ := set $section.redis "ca_file" "/run/grpo/secrets/redis-ca.crt" }}
{{- end }}
{{- $_ := set $section "api" (dict "host" "0.0.0.0" "port" .Values.apiPort "token_file" "/run/grpo/secrets/api-token" "read_token_file" "/run/grpo/secrets/api-read-token") }}
{{- if include "grpo.apiTls" . }}
{{- $_ := set $section "api" (merge $section.api (dict "certificate_file" "/run/grpo/secrets/api" "ca_file" "/run/grpo/secrets/api/ca.crt")) }}
{{- end }}
{{- if or (include "grpo.autoscaled" .) (not .Values.scaler.enabled) }}
{{- $_ := set $section.fleet "scaling" "cluster" }}
{{- end }}
{{- $_ := set $section.sync "host" (include "grpo.trainerHost" .) }}
{{- $_ := set $section.trainer "ranks" (mul .Values.trainer.nodes .Values.trainer.ranksPerNode) }}
{{- $_ := set $section.generator "count" (max 1 .Values.generator.replicas) }}
{{- if .Values.web.enabled }}
{{- $_ := set $section "web" (dict "port" .Values.apiPort) }}
{{- end }}
{{- range $name, $keys := $section }}
{{- if $keys }}
{{- $_ := set $given $name $keys }}
{{- end }}
{{- end }}
{{- range $name, $keys := $given }}
{{ $name }} = {{ include "grpo.toml" $keys }}
{{- end }}
{{- end }}

{{/* Renders one value. A JSON string, number or boolean is also valid TOML. */}}
{{- define "grpo.toml" -}}
{{- if kindIs "map" . -}}
{
{{- $first := true -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- if not $first }}, {{ end }}{{ toRawJson $key }} = {{ include "grpo.toml" $value }}
{{- $first = false -}}
{{- end -}}
{{- end -}}
}
{{- else if kindIs "slice" . -}}
[{{ range $i, $value := . }}{{ if $i }}, {{ end }}{{ include "grpo.toml" $value }}{{ end }}]
{{- else -}}
{{ toRawJson . }}
{{- end -}}
{{- end }}
