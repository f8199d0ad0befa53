{{/*
The parts that the pods of all services share.

"grpo.podTemplate" takes root, component (a key of values, and the pod's label), kind (its image), command, and where applicable:
  http       true if it serves /health on apiPort
  drain      command of the preStop hook
  grace      seconds from SIGTERM, or from the hook, to SIGKILL
  gpus       number of GPUs
  unhurried  true if it starts without waiting for the model, whose tokenizer it reads once it is there
  runs, models, data, rewards, environments, collective   volumes and settings that it needs
  account    name of its service account, if it calls the cluster's API; its token is then mounted
  gang       how all of its pods are scheduled at once: kubernetes, coscheduling or volcano
  logins     kinds of service whose Redis users it may use; default: its component's own
  env        further variables, YAML
  envSecrets names of Secrets whose keys are variables
*/}}

{{- define "grpo.podTemplate" -}}
{{- $values := .root.Values }}
{{- include "grpo.settle" . }}
{{- $settings := .settings }}
metadata:
  labels:
    {{- include "grpo.labels" . | nindent 4 }}
    {{- with include "grpo.gang" (dict "it" . "where" "label") | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $settings.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "grpo.config" .root | sha256sum }}
    {{- if .rewards }}
    {{- with include "grpo.rewardsDigest" .root }}
    checksum/rewards: {{ . }}
    {{- end }}
    {{- end }}
    {{- if .environments }}
    {{- with include "grpo.environmentsDigest" .root }}
    checksum/environments: {{ . }}
    {{- end }}
    {{- end }}
    {{- with include "grpo.gang" (dict "it" . "where" "annotation") | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $settings.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ .account | default (printf "%s-services" .root.Release.Name) }}
  automountServiceAccountToken: {{ if .account }}true{{ else }}false{{ end }}
  enableServiceLinks: false
  {{- /* The first process of a namespace ignores a SIGTERM until it installs a handler, which takes Python several seconds. */}}
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ .grace | default 30 }}
  {{- if and .collective $values.interconnect.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- include "grpo.placement" . | nindent 2 }}
  {{- with include "grpo.gang" (dict "it" . "where" "field") | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if include "grpo.claimed" . }}
  resourceClaims:
    - {name: devices, resourceClaimTemplateName: {{ include "grpo.deviceName" . }}}
  {{- end }}
  securityContext:
    {{- include "grpo.podSecurity" . | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $waits := and .models $values.preload.enabled (not .unhurried) }}
  {{- if or $waits $settings.initContainers }}
  initContainers:
    {{- if $waits }}
    - name: model
      image: {{ include "grpo.image" . }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command:
        - sh
        - -c
        - until [ -e "$0" ]; do echo "waiting for the preload job to create $0"; sleep 5; done
        - {{ $values.config.model.path | quote }}
      securityContext:
        {{- include "grpo.containerSecurity" . | nindent 8 }}
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {memory: 64Mi}
      volumeMounts:
        - {name: models, mountPath: /srv/grpo/models, readOnly: true}
    {{- end }}
    {{- with $settings.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "grpo.image" . }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: {{ toRawJson .command }}
      terminationMessagePolicy: FallbackToLogsOnError
      env:
        {{- include "grpo.environment" . | nindent 8 }}
      {{- include "grpo.environmentFrom" . | nindent 6 }}
      {{- if .http }}
      ports:
        - {name: api, containerPort: {{ $values.apiPort }}}
      {{- $scheme := ternary "HTTPS" "HTTP" (ne (include "grpo.apiTls" .root) "") }}
      {{- include "grpo.probes" (dict "settings" $settings "of" "httpGet" "live" (dict "path" "/health/live" "port" "api" "scheme" $scheme)
          "ready" (dict "path" "/health/ready" "port" "api" "scheme" $scheme)) | nindent 6 }}
      {{- end }}
      {{- with .drain }}
      lifecycle:
        preStop:
          exec:
            command: {{ toRawJson . }}
      {{- end }}
      resources:
        {{- include "grpo.resources" . | nindent 8 }}
      securityContext:
        {{- include "grpo.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /run/grpo/config, readOnly: true}
        - {name: secrets, mountPath: /run/grpo/secrets, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if .collective }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if .runs }}
        - {name: runs, mountPath: /srv/grpo/runs}
        {{- end }}
        {{- include "grpo.inputMounts" . | nindent 8 }}
        {{- with $settings.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ .root.Release.Name }}-config}
    - name: secrets
      {{- include "grpo.secretVolume" . | nindent 6 }}
    {{- include "grpo.tmp" $settings | nindent 4 }}
    {{- if .collective }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $settings.sharedMemory }}}
    {{- end }}
    {{- if .runs }}
    - name: runs
      persistentVolumeClaim: {claimName: {{ $values.storage.runs.existingClaim | default (printf "%s-runs" .root.Release.Name) | quote }}}
    {{- end }}
    {{- include "grpo.inputVolumes" . | nindent 4 }}
    {{- with $settings.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "grpo.environmentFrom" -}}
{{- $from := list }}
{{- range compact (.envSecrets | default list) }}
{{- $from = append $from (dict "secretRef" (dict "name" .)) }}
{{- end }}
{{- with concat $from .settings.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "grpo.environment" -}}
{{- include "grpo.settle" . -}}
{{- include "grpo.merged" (dict "own" (include "grpo.ownEnvironment" .) "settings" .settings) }}
{{- end }}

{{- define "grpo.ownEnvironment" -}}
{{- $values := .root.Values -}}
- {name: GRPO_CONFIG, value: /run/grpo/config/config.toml}
- name: GRPO_POD
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: GRPO_ADDRESS
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOME, value: /tmp}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
{{- if .http }}
- {name: GRPO_START_S, value: {{ include "grpo.patience" .settings | quote }}}
{{- end }}
{{- if .models }}
{{- $folder := include "grpo.modelFolder" .root }}
{{- if and $folder (not (and .data (include "grpo.hubData" .root))) }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- else }}
- {name: HF_HOME, value: {{ ternary "/srv/grpo/models/huggingface" "/tmp/huggingface" (and $values.storage.models.enabled (not $folder)) }}}
{{- include "grpo.hubToken" .root }}
{{- end }}
{{- end }}
{{- if and .collective (eq $values.accelerator "none") }}
- name: OMP_NUM_THREADS
  valueFrom: {resourceFieldRef: {containerName: {{ .component }}, resource: limits.cpu, divisor: "1"}}
{{- end }}
{{- if .collective }}
{{- range $name, $value := $values.interconnect.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- with $values.interconnect.interface }}
- {name: NCCL_SOCKET_IFNAME, value: {{ . | quote }}}
- {name: GLOO_SOCKET_IFNAME, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- if and .environments (include "grpo.sandboxed" .root) }}
- {name: AGENT_SANDBOX_POOL, value: {{ .root.Values.sandbox.warmPool | quote }}}
- {name: AGENT_SANDBOX_NAMESPACE, value: {{ include "grpo.sandboxNamespace" .root | quote }}}
{{- end }}
{{- with .env }}
{{ . }}
{{- end }}
{{- end }}

{{/*
Variables: the chart's `own`, YAML, then env and extraEnv of the settings. The last of a name counts; Kubernetes refuses two when it
applies on the server, as Helm 4 and GitOps tools do.
*/}}
{{- define "grpo.merged" -}}
{{- $all := include "grpo.list" .own | fromYamlArray }}
{{- range $name, $value := .settings.env }}
{{- $all = append $all (dict "name" $name "value" (toString $value)) }}
{{- end }}
{{- $named := dict }}
{{- $names := list }}
{{- range concat $all (.settings.extraEnv | default list) }}
{{- if not (hasKey $named .name) }}
{{- $names = append $names .name }}
{{- end }}
{{- $_ := set $named .name . }}
{{- end }}
{{- range $names }}
- {{ toRawJson (index $named .) }}
{{- end }}
{{- end }}

{{- define "grpo.list" -}}
{{ . | trim | default "[]" }}
{{- end }}

{{- define "grpo.hubToken" -}}
{{- with .Values.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.hub.tokenKey | quote }}}}
{{- end }}
{{- end }}

{{- define "grpo.podSecurity" -}}
runAsNonRoot: true
{{- with .root.Values.security.user }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "grpo.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if and .collective .root.Values.interconnect.rdma.resource }}
  add: [IPC_LOCK]
  {{- end }}
{{- end }}

{{- define "grpo.disruption" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "grpo.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ (index .root.Values .component).maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "grpo.selector" . | nindent 6 }}
{{- end }}

{{/*
Deletion policy of a hook's pod. Helm 4 prints the pod's output and deletes it; Helm 3 prints nothing, so the pod is kept for its log.
Takes root, and `before`, the policy for Helm 3.
*/}}
{{- define "grpo.hookPolicy" -}}
{{- if semverCompare ">=4.0.0-0" .root.Capabilities.HelmVersion.Version -}}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded,hook-failed
helm.sh/hook-output-log-policy: hook-failed
{{- else -}}
helm.sh/hook-delete-policy: {{ .before }}
{{- end }}
{{- end }}
