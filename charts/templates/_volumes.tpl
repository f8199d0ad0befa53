{{/* Volumes of pods: the inputs of a run, secrets, and /tmp. */}}

{{- define "grpo.tmp" -}}
- name: tmp
  emptyDir: {{ if .tmpSize }}{sizeLimit: {{ .tmpSize }}}{{ else }}{}{{ end }}
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
{{- if and .environments (include "grpo.environmentsMap" .root) }}
- {name: environments, mountPath: /srv/grpo/environments, readOnly: true}
{{- end }}
{{- end }}

{{- define "grpo.inputVolumes" -}}
{{- if and .models .root.Values.storage.models.enabled }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "grpo.modelsClaim" .root | trim | quote }}}
{{- end }}
{{- if and .data .root.Values.storage.data.existingClaim }}
- name: data
  persistentVolumeClaim: {claimName: {{ .root.Values.storage.data.existingClaim | quote }}, readOnly: true}
{{- end }}
{{- if and .rewards (include "grpo.rewardsMap" .root) }}
- name: rewards
  configMap: {name: {{ include "grpo.rewardsMap" .root | trim | quote }}}
{{- end }}
{{- if and .environments (include "grpo.environmentsMap" .root) }}
- name: environments
  configMap: {name: {{ include "grpo.environmentsMap" .root | trim | quote }}}
{{- end }}
{{- end }}

{{- define "grpo.modelsClaim" -}}
{{ .Values.storage.models.existingClaim | default (printf "%s-models" .Release.Name) }}
{{- end }}

{{/* Mounts as files: the tokens, the passwords of the pod's Redis users, the endpoints' certificate, and the CA of Redis'. */}}
{{- define "grpo.secretVolume" -}}
{{- $values := .root.Values }}
projected:
  defaultMode: 0440
  sources:
    - secret:
        name: {{ include "grpo.secret" .root | trim | quote }}
        {{- if $.optional }}
        optional: true
        {{- end }}
        items:
          - {key: api-token, path: api-token}
          - {key: api-read-token, path: api-read-token}
    {{- with include "grpo.users" .root }}
    - secret:
        name: {{ . | trim | quote }}
        {{- if $.optional }}
        optional: true
        {{- end }}
        items:
          {{- range $.logins | default (list $.component) }}
          - {key: {{ . }}, path: users/{{ . }}}
          {{- end }}
    {{- else }}
    {{- with $values.redis.external.existingSecret }}
    - secret:
        name: {{ . | trim | quote }}
        {{- if $.optional }}
        optional: true
        {{- end }}
        items:
          - {key: {{ $values.redis.external.passwordKey | quote }}, path: redis-password}
    {{- end }}
    {{- end }}
    {{- with include "grpo.redisAuthority" .root }}
    - secret:
        name: {{ . | trim | quote }}
        {{- if $.optional }}
        optional: true
        {{- end }}
        items:
          - {key: ca.crt, path: redis-ca.crt}
    {{- end }}
    {{- with include "grpo.apiTls" .root }}
    - secret:
        name: {{ . | trim | quote }}
        {{- if $.optional }}
        optional: true
        {{- end }}
        items:
          - {key: tls.crt, path: api/tls.crt}
          - {key: tls.key, path: api/tls.key}
          - {key: ca.crt, path: api/ca.crt}
    {{- end }}
{{- end }}

{{/* true if weights pass through the volume of the runs, in a store of versions that is not a bucket. */}}
{{- define "grpo.weightsVolume" -}}
{{- $backend := dig "sync" "backend" "auto" .Values.config }}
{{- and (eq $backend "store") (not (contains "://" (dig "sync" "folder" "" .Values.config))) }}
{{- end }}
