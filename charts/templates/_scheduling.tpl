{{/* How pods are admitted, scheduled together, and given devices. */}}

{{/* The labels by which Kueue admits an object's pods. */}}
{{- define "grpo.queue" -}}
{{- with .root.Values.kueue.queue }}
kueue.x-k8s.io/queue-name: {{ . | quote }}
{{- end }}
{{- with .root.Values.kueue.priorityClass }}
kueue.x-k8s.io/priority-class: {{ . | quote }}
{{- end }}
{{- end }}

{{/* The PodGroup of the trainer's pods, which start together or not at all. */}}
{{- define "grpo.podGroup" -}}
{{- $nodes := int .root.Values.trainer.nodes }}
{{- $kinds := dict "kubernetes" "scheduling.k8s.io/v1beta1" "coscheduling" "scheduling.x-k8s.io/v1alpha1" "volcano" "scheduling.volcano.sh/v1beta1" }}
{{- with get $kinds .root.Values.trainer.gang }}
---
apiVersion: {{ . }}
kind: PodGroup
metadata:
  {{- include "grpo.metadata" (omit $ "queued") | nindent 2 }}
spec:
  {{- if eq $.root.Values.trainer.gang "kubernetes" }}
  schedulingPolicy: {gang: {minCount: {{ $nodes }}}}
  {{- else }}
  minMember: {{ $nodes }}
  {{- end }}
  {{- with $.root.Values.trainer.priorityClassName | default $.root.Values.podDefaults.priorityClassName }}
  {{- if ne $.root.Values.trainer.gang "coscheduling" }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* How a pod names its PodGroup: a label, an annotation or a field. Takes `.gang`, its kind, and `.where`. */}}
{{- define "grpo.gang" -}}
{{- $group := printf "%s-%s" .it.root.Release.Name .it.component }}
{{- $said := dict "label" (dict "coscheduling" (printf "scheduling.x-k8s.io/pod-group: %s" $group))
    "annotation" (dict "volcano" (printf "scheduling.k8s.io/group-name: %s" $group))
    "field" (dict "kubernetes" (printf "schedulingGroup: {podGroupName: %s}" $group)) }}
{{- get (get $said .where) (.it.gang | default "none") }}
{{- end }}

{{/* true if devices are claimed (DRA) rather than counted (device plugins). */}}
{{- define "grpo.claimed" -}}
{{- if and .gpus (eq .root.Values.devices.kind "claim") (eq .root.Values.accelerator "nvidia") }}true{{ end }}
{{- end }}

{{/*
The devices of a pod: GPUs and, with nicClass, a NIC beside each on its PCIe root. Named by its content, since the spec of a template is
immutable.
*/}}
{{- define "grpo.deviceSpec" -}}
{{- $devices := .root.Values.devices }}
{{- $requests := list }}
{{- $constraints := list }}
{{- range $i := until (int .gpus) }}
{{- $gpu := dict "deviceClassName" $devices.gpuClass "allocationMode" "ExactCount" "count" 1 }}
{{- with $devices.gpuSelectors }}
{{- $selectors := list }}
{{- range . }}{{ $selectors = append $selectors (dict "cel" (dict "expression" .)) }}{{ end }}
{{- $_ := set $gpu "selectors" $selectors }}
{{- end }}
{{- $requests = append $requests (dict "name" (printf "gpu-%d" $i) "exactly" $gpu) }}
{{- with $devices.nicClass }}
{{- $requests = append $requests (dict "name" (printf "nic-%d" $i) "exactly" (dict "deviceClassName" . "allocationMode" "ExactCount" "count" 1)) }}
{{- $constraints = append $constraints (dict "requests" (list (printf "gpu-%d" $i) (printf "nic-%d" $i)) "matchAttribute" "resource.kubernetes.io/pcieRoot") }}
{{- end }}
{{- end }}
{{- $spec := dict "requests" $requests }}
{{- if $constraints }}{{ $_ := set $spec "constraints" $constraints }}{{ end }}
{{- toYaml (dict "devices" $spec) }}
{{- end }}

{{- define "grpo.deviceName" -}}
{{ .root.Release.Name }}-{{ .component }}-{{ include "grpo.deviceSpec" . | sha256sum | trunc 8 }}
{{- end }}

{{- define "grpo.deviceTemplate" -}}
{{- if include "grpo.claimed" . }}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: {{ include "grpo.deviceName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "grpo.labels" . | nindent 4 }}
spec:
  spec:
    {{- include "grpo.deviceSpec" . | nindent 4 }}
{{- end }}
{{- end }}
