{{/*
The parts that the pods of all services share.

"grpo.podTemplate" takes root, component (a key of values, and the pod's label), kind (its image), command, and where applicable:
  http       true if it serves /health on apiPort
  startup    seconds that it may take to start serving
  drain      command of the preStop hook
  grace      seconds from SIGTERM, or from the hook, to SIGKILL
  gpus       number of GPUs
  runs, models, data, rewards, collective   volumes and settings that it needs
  account    name of its service account, if it calls the cluster's API; its token is then mounted
  logins     kinds of service whose Redis users it may use; default: its component's own
  env        further variables, YAML
  envSecret  name of a Secret whose keys are variables
*/}}

{{- define "grpo.podTemplate" -}}
{{- $values := .root.Values }}
{{- $settings := index $values .component }}
{{- $scheme := ternary ", scheme: HTTPS" "" (ne (include "grpo.apiTls" .root) "") }}
metadata:
  labels:
    {{- include "grpo.labels" . | nindent 4 }}
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
    {{- with $settings.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ .account | default (printf "%s-services" .root.Release.Name) }}
  automountServiceAccountToken: {{ if .account }}true{{ else }}false{{ end }}
  enableServiceLinks: false
  {{- /* The first process of a namespace ignores a SIGTERM until it installs a handler, which takes Python seconds. */}}
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ .grace | default 30 }}
  {{- if and .collective $values.interconnect.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- include "grpo.placement" . | nindent 2 }}
  securityContext:
    {{- include "grpo.podSecurity" . | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and .models $values.preload.enabled }}
  initContainers:
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
  containers:
    - name: {{ .component }}
      image: {{ include "grpo.image" . }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: {{ toRawJson .command }}
      terminationMessagePolicy: FallbackToLogsOnError
      env:
        {{- include "grpo.environment" . | nindent 8 }}
      {{- with .envSecret }}
      envFrom:
        - secretRef: {name: {{ . }}}
      {{- end }}
      {{- if .http }}
      ports:
        - {name: api, containerPort: {{ $values.apiPort }}}
      startupProbe:
        httpGet: {path: /health/live, port: api{{ $scheme }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ ceil (divf (.startup | default 120) 5) }}
      livenessProbe:
        httpGet: {path: /health/live, port: api{{ $scheme }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        httpGet: {path: /health/ready, port: api{{ $scheme }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 1
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
  volumes:
    - name: config
      configMap: {name: {{ .root.Release.Name }}-config}
    - name: secrets
      {{- include "grpo.secretVolume" . | nindent 6 }}
    - name: tmp
      emptyDir: {}
    {{- if .collective }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $settings.sharedMemory }}}
    {{- end }}
    {{- if .runs }}
    - name: runs
      persistentVolumeClaim: {claimName: {{ $values.storage.runs.existingClaim | default (printf "%s-runs" .root.Release.Name) }}}
    {{- end }}
    {{- include "grpo.inputVolumes" . | nindent 4 }}
{{- end }}

{{/* Inputs of a run that are on volumes: model, data and the files of rewards. */}}
{{- define "grpo.inputMounts" -}}
{{- if and .models .root.Values.storage.models.enabled }}
- {name: models, mountPath: /srv/grpo/models, readOnly: {{ include "grpo.modelFolder" .root | default "false" }}}
{{- end }}
{{- if and .data .root.Values.storage.data.existingClaim }}
- {name: data, mountPath: /srv/grpo/data, readOnly: true}
{{- end }}
{{- if and .rewards (include "grpo.rewardsMap" .root) }}
- {name: rewards, mountPath: /srv/grpo/rewards, readOnly: true}
{{- end }}
{{- end }}

{{- define "grpo.inputVolumes" -}}
{{- if and .models .root.Values.storage.models.enabled }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "grpo.modelsClaim" .root }}}
{{- end }}
{{- if and .data .root.Values.storage.data.existingClaim }}
- name: data
  persistentVolumeClaim: {claimName: {{ .root.Values.storage.data.existingClaim }}, readOnly: true}
{{- end }}
{{- if and .rewards (include "grpo.rewardsMap" .root) }}
- name: rewards
  configMap: {name: {{ include "grpo.rewardsMap" .root }}}
{{- end }}
{{- end }}

{{- define "grpo.modelsClaim" -}}
{{ .Values.storage.models.existingClaim | default (printf "%s-models" .Release.Name) }}
{{- end }}

{{- define "grpo.environment" -}}
{{- $values := .root.Values }}
- {name: GRPO_CONFIG, value: /run/grpo/config/config.toml}
- name: GRPO_POD
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: GRPO_ADDRESS
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOME, value: /tmp}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
{{- if .models }}
{{- if include "grpo.modelFolder" .root }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- else }}
- {name: HF_HOME, value: {{ ternary "/srv/grpo/models/huggingface" "/tmp/huggingface" $values.storage.models.enabled }}}
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
{{- with .env }}
{{ . }}
{{- end }}
{{- range $name, $value := (index $values .component).env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "grpo.hubToken" -}}
{{- with .Values.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.hub.tokenKey }}}}
{{- end }}
{{- end }}

{{- define "grpo.placement" -}}
{{- $settings := index .root.Values .component -}}
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
{{- with $settings.spreadOver }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "grpo.selector" $ | nindent 8 }}
{{- end }}
{{- end }}

{{- define "grpo.resources" -}}
{{- $resources := deepCopy (index .root.Values .component).resources }}
{{- $devices := dict }}
{{- if and .gpus (eq .root.Values.accelerator "nvidia") }}
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

{{- define "grpo.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .root.Values.security.user }}
runAsGroup: {{ .root.Values.security.user }}
fsGroup: {{ .root.Values.security.user }}
fsGroupChangePolicy: OnRootMismatch
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

{{/* Mounts as files: the tokens, the passwords of the pod's Redis users, the endpoints' certificate, and the CA of Redis'. */}}
{{- define "grpo.secretVolume" -}}
{{- $values := .root.Values }}
projected:
  defaultMode: 0440
  sources:
    - secret:
        name: {{ include "grpo.secret" .root }}
        items:
          - {key: api-token, path: api-token}
          - {key: api-read-token, path: api-read-token}
    {{- with include "grpo.users" .root }}
    - secret:
        name: {{ . }}
        items:
          {{- range $.logins | default (list $.component) }}
          - {key: {{ . }}, path: users/{{ . }}}
          {{- end }}
    {{- else }}
    {{- with $values.redis.external.existingSecret }}
    - secret:
        name: {{ . }}
        items:
          - {key: {{ $values.redis.external.passwordKey }}, path: redis-password}
    {{- end }}
    {{- end }}
    {{- with include "grpo.redisAuthority" .root }}
    - secret:
        name: {{ . }}
        items:
          - {key: ca.crt, path: redis-ca.crt}
    {{- end }}
    {{- with include "grpo.apiTls" .root }}
    - secret:
        name: {{ . }}
        items:
          - {key: tls.crt, path: api.crt}
          - {key: tls.key, path: api.key}
          - {key: ca.crt, path: api-ca.crt}
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
