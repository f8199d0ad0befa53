{{/* Names and labels. Every object is named <release>-<component> and selected by release and component. */}}

{{- define "grpo.labels" -}}
{{ include "grpo.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "grpo.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Selects all pods of the release. */}}
{{- define "grpo.everyone" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "grpo.metadata" -}}
name: {{ .root.Release.Name }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "grpo.labels" . | nindent 2 }}
  {{- if .queued }}
  {{- with include "grpo.queue" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- end }}
{{- end }}

{{- define "grpo.domain" -}}
{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end }}

{{- define "grpo.trainerHost" -}}
{{ .Release.Name }}-trainer-0.{{ .Release.Name }}-trainer.{{ include "grpo.domain" . }}
{{- end }}

{{- define "grpo.redisUrl" -}}
{{- if .Values.redis.enabled -}}
redis{{ if include "grpo.redisTls" . }}s{{ end }}://{{ .Release.Name }}-redis.{{ include "grpo.domain" . }}:6379/0
{{- else -}}
{{ .Values.redis.external.url }}
{{- end -}}
{{- end }}

{{/* Host name that the endpoints' certificate must contain; pods are called by address. */}}
{{- define "grpo.apiName" -}}
{{ .Release.Name }}-api.{{ include "grpo.domain" . }}
{{- end }}

{{/* Names of the Secrets with tls.crt, tls.key and ca.crt of the endpoints and of the chart's own Redis; empty without TLS. */}}
{{- define "grpo.apiTls" -}}
{{ .Values.tls.apiSecret | default (ternary (printf "%s-api-tls" .Release.Name) "" (ne .Values.tls.issuer.name "")) }}
{{- end }}

{{- define "grpo.redisTls" -}}
{{- if .Values.redis.enabled }}
{{- .Values.tls.redisSecret | default (ternary (printf "%s-redis-tls" .Release.Name) "" (ne .Values.tls.issuer.name "")) }}
{{- end }}
{{- end }}

{{/* Name of the Secret whose ca.crt verifies the certificate of Redis; empty for the system's CA bundle, or without TLS. */}}
{{- define "grpo.redisAuthority" -}}
{{ .Values.redis.external.caSecret | default (include "grpo.redisTls" .) }}
{{- end }}

{{- define "grpo.run" -}}
{{ dig "run" "name" .Release.Name .Values.config }}
{{- end }}

{{/* Name of the Secret with redis-password, api-token and api-read-token. */}}
{{- define "grpo.secret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-auth" .Release.Name) }}
{{- end }}

{{/* Name of the Secret with the password of each Redis user, by kind of service; empty if an external Redis has one user for all. */}}
{{- define "grpo.users" -}}
{{ .Values.redis.usersSecret | default (ternary (printf "%s-redis-users" .Release.Name) "" .Values.redis.enabled) }}
{{- end }}

{{/* Lines `kind rules` for all Redis users of the run. */}}
{{- define "grpo.rules" -}}
{{ .Files.Get "files/users.acl" | replace "@RUN@" (include "grpo.run" .) | trim }}
{{- end }}

{{/* Name of the ConfigMap with the files of rewards; empty if there are none. The chart's own is named by its content. */}}
{{- define "grpo.rewardsMap" -}}
{{- if .Values.rewards.files -}}
{{ .Release.Name }}-rewards-{{ toJson .Values.rewards.files | sha256sum | trunc 8 }}
{{- else -}}
{{ .Values.rewards.existingConfigMap }}
{{- end -}}
{{- end }}

{{/* Digest of these files, as they are now; empty if there are none, or if they cannot be read without a cluster. */}}
{{- define "grpo.rewardsDigest" -}}
{{- if .Values.rewards.files }}
{{- toJson .Values.rewards.files | sha256sum }}
{{- else if .Values.rewards.existingConfigMap }}
{{- with dig "data" dict (lookup "v1" "ConfigMap" .Release.Namespace .Values.rewards.existingConfigMap) }}
{{- toJson . | sha256sum }}
{{- end }}
{{- end }}
{{- end }}

{{/* The same two for the files of environments. */}}
{{- define "grpo.environmentsMap" -}}
{{- if .Values.environment.files -}}
{{ .Release.Name }}-environments-{{ toJson .Values.environment.files | sha256sum | trunc 8 }}
{{- else -}}
{{ .Values.environment.existingConfigMap }}
{{- end -}}
{{- end }}

{{- define "grpo.environmentsDigest" -}}
{{- if .Values.environment.files }}
{{- toJson .Values.environment.files | sha256sum }}
{{- else if .Values.environment.existingConfigMap }}
{{- with dig "data" dict (lookup "v1" "ConfigMap" .Release.Namespace .Values.environment.existingConfigMap) }}
{{- toJson . | sha256sum }}
{{- end }}
{{- end }}
{{- end }}

{{/* true if the release is a whole run, and not only generators of another release's run. */}}
{{- define "grpo.whole" -}}
{{- if eq .Values.role "run" }}true{{ end }}
{{- end }}

{{/* true if the scaler sets the numbers of generators and trainer pods; otherwise the user does. */}}
{{- define "grpo.scaled" -}}
{{- if and .Values.scaler.enabled (include "grpo.whole" .) }}true{{ end }}
{{- end }}

{{/* true if code that the policy writes runs in sandboxes of the cluster. */}}
{{- define "grpo.sandboxed" -}}
{{- if and .Values.sandbox.warmPool (include "grpo.whole" .) }}true{{ end }}
{{- end }}

{{- define "grpo.sandboxNamespace" -}}
{{ .Values.sandbox.namespace | default .Release.Namespace }}
{{- end }}

{{/* Address of the judge for `url` of a verifier. */}}
{{- define "grpo.judgeUrl" -}}
http://{{ .Release.Name }}-judge.{{ include "grpo.domain" . }}:{{ .Values.judge.port }}/v1
{{- end }}

{{- define "grpo.modelFolder" -}}
{{- if hasPrefix "/" (toString .Values.config.model.path) }}true{{ end }}
{{- end }}

{{/* Whether prompts are files of a dataset on the hub. */}}
{{- define "grpo.hubData" -}}
{{- range concat (dig "data" "sources" list .Values.config) (dig "evaluation" "sources" list .Values.config) }}
{{- if hasPrefix "hf://" (toString .path) }}true{{ end }}
{{- end }}
{{- end }}

{{- define "grpo.tracked" -}}
{{- $tracking := .Values.config.tracking | default dict }}
{{- $samples := .Values.config.samples | default dict }}
{{- if and (include "grpo.whole" .) (or $tracking.tensorboard $tracking.wandb $samples.keep) }}true{{ end }}
{{- end }}

{{- define "grpo.autoscaled" -}}
{{- if ne .Values.generator.autoscaling.kind "none" }}true{{ end }}
{{- end }}

{{/* Seconds that a generator or an environment pod may take to drain: generator.drain_s, the steps that follow it, and a margin. */}}
{{- define "grpo.generatorGrace" -}}
{{- $generator := .Values.config.generator | default dict }}
{{- add (ceil (dig "drain_s" 10 $generator)) 20 -}}
{{- end }}

{{/*
Image of a component. Environment pods score with the run's verifiers, which may need what only the generators' image has. Dataprep asks the
environments for their tools, and the check and the smoke test read their code, which may need what environment.image has.
*/}}
{{- define "grpo.image" -}}
{{- $values := .root.Values }}
{{- $settings := index $values .component }}
{{- $kinds := list }}
{{- range $values.config.verifiers }}{{ $kinds = append $kinds .kind }}{{ end -}}
{{- $scores := or (eq .component "generator") (and (eq .component "environment") (has "python" $kinds)) -}}
{{- $kind := ternary "generator" .kind (and (eq .component "environment") (has "math" $kinds)) -}}
{{- if $settings.image -}}
{{ $settings.image }}
{{- else if and (has .component (list "dataprep" "check" "smoke")) $values.config.environments $values.environment.image -}}
{{ $values.environment.image }}
{{- else if and $scores $values.rewards.image -}}
{{ $values.rewards.image }}
{{- else -}}
{{- $variant := ternary (ternary "-cuda" "-cpu" (eq $values.accelerator "nvidia")) "" (has $kind (list "generator" "trainer")) -}}
{{ $values.image.registry }}/grpo-{{ $kind }}
{{- with index $values.image.digests $kind }}@{{ . }}{{ else }}:{{ $values.image.tag | default .root.Chart.AppVersion }}{{ $variant }}{{ end -}}
{{- end -}}
{{- end }}
