{{/*
Pods that run to completion: the check, the preload and the smoke test.

"grpo.onceMetadata" and "grpo.onceSpec" take root, component and kind; the spec also takes
  restart    restartPolicy
  command    of the container
  account    name of its service account; default: the namespace's own
  env, mounts, volumes   YAML, in addition to /tmp and what the values add
*/}}

{{- define "grpo.onceMetadata" -}}
{{- include "grpo.settle" . -}}
labels:
  {{- include "grpo.selector" . | nindent 2 }}
  {{- with merge (dict) .settings.podLabels .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .settings.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "grpo.onceSpec" -}}
{{- include "grpo.settle" . -}}
restartPolicy: {{ .restart }}
{{- with .account }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with include "grpo.placement" . | trim }}
{{ . }}
{{- end }}
securityContext:
  {{- include "grpo.podSecurity" . | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ .component }}
    image: {{ include "grpo.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: {{ toRawJson .command }}
    terminationMessagePolicy: FallbackToLogsOnError
    {{- with .env | trim }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    {{- include "grpo.environmentFrom" . | nindent 4 }}
    resources:
      {{- toYaml .settings.resources | nindent 6 }}
    securityContext:
      {{- include "grpo.containerSecurity" . | nindent 6 }}
    volumeMounts:
      {{- .mounts | trim | nindent 6 }}
      - {name: tmp, mountPath: /tmp}
      {{- with .settings.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  {{- .volumes | trim | nindent 2 }}
  {{- include "grpo.tmp" .settings | nindent 2 }}
  {{- with .settings.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
