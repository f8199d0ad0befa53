{{/* Settings of pods from the values: defaults and overrides, probes, rollouts, placement, resources. */}}

{{/* Sets `settings`: podDefaults, overridden by the component's values. */}}
{{- define "grpo.settle" -}}
{{- $_ := set . "settings" (mergeOverwrite (deepCopy .root.Values.podDefaults) (deepCopy (index .root.Values .component))) }}
{{- end }}

{{/* Probes of a container: takes settings, and the action (`of`) that checks whether it is live and ready. */}}
{{- define "grpo.probes" -}}
{{- $probes := .settings.probes }}
startupProbe:
  {{ .of }}: {{ toJson .live }}
  {{- toYaml (mergeOverwrite (dict "failureThreshold" (include "grpo.startupTries" .settings | int)) (deepCopy $probes.startup)) | nindent 2 }}
livenessProbe:
  {{ .of }}: {{ toJson .live }}
  {{- toYaml $probes.liveness | nindent 2 }}
readinessProbe:
  {{ .of }}: {{ toJson .ready }}
  {{- toYaml $probes.readiness | nindent 2 }}
{{- end }}

{{- define "grpo.startupTries" -}}
{{ .probes.startup.failureThreshold | default (ceil (divf .startupSeconds .probes.startup.periodSeconds)) | int }}
{{- end }}

{{/* Seconds that a pod may wait before it reports an error: just less than until the startup probe fails for good. */}}
{{- define "grpo.patience" -}}
{{ max 1 (sub (mul (include "grpo.startupTries" . | int) (int .probes.startup.periodSeconds)) 15) }}
{{- end }}

{{/* Fields of a Deployment or StatefulSet other than its pods. */}}
{{- define "grpo.rollout" -}}
{{- include "grpo.settle" . }}
revisionHistoryLimit: {{ .settings.revisionHistoryLimit }}
{{- if not .stateful }}
{{- $startup := mul (include "grpo.startupTries" .settings | int) (int .settings.probes.startup.periodSeconds) }}
progressDeadlineSeconds: {{ .settings.progressDeadlineSeconds | default (add $startup 600) }}
{{- end }}
{{- with .settings.strategy | default .strategy }}
{{ ternary "updateStrategy" "strategy" (eq $.stateful true) }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "grpo.placement" -}}
{{- include "grpo.settle" . -}}
{{- $settings := .settings -}}
{{- with $settings.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with $settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $settings.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $selector := dict "matchLabels" (include "grpo.selector" . | fromYaml) }}
{{- $spread := list }}
{{- with $settings.spreadOver }}
{{- $spread = append $spread (dict "maxSkew" 1 "topologyKey" . "whenUnsatisfiable" "ScheduleAnyway" "labelSelector" $selector) }}
{{- end }}
{{- range $settings.topologySpreadConstraints }}
{{- $spread = append $spread (merge (deepCopy .) (dict "labelSelector" $selector)) }}
{{- end }}
{{- with $spread }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "grpo.resources" -}}
{{- $resources := deepCopy (index .root.Values .component).resources }}
{{- $devices := dict }}
{{- if include "grpo.claimed" . }}
{{- $_ := set $resources "claims" (list (dict "name" "devices")) }}
{{- else if and .gpus (eq .root.Values.accelerator "nvidia") }}
{{- $_ := set $devices .root.Values.gpuResource .gpus }}
{{- end }}
{{- with .root.Values.interconnect.rdma }}
{{- if and $.collective .resource }}
{{- $_ := set $devices .resource .count }}
{{- end }}
{{- end }}
{{- if $devices }}
{{- $_ := set $resources "limits" (merge $devices ($resources.limits | default dict)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}
