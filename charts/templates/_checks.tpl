{{/* Rejects invalid combinations that a schema cannot express, each with its remedy. */}}

{{- define "grpo.checks" -}}
{{- $v := .Values }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) }}
{{- fail (printf "the release name %q is not a DNS label, which the names of its Services must be: use small letters, digits and -, from a letter on" .Release.Name) }}
{{- end }}
{{- if gt (len .Release.Name) 40 }}
{{- fail (printf "the release name %q has %d characters: use at most 40, since pod names are derived from it" .Release.Name (len .Release.Name)) }}
{{- end }}
{{- if and (not $v.redis.enabled) (not $v.redis.external.url) }}
{{- fail "redis.enabled = false needs redis.external.url: set it, or redis.enabled = true" }}
{{- end }}
{{- if and $v.redis.enabled $v.redis.external.url }}
{{- fail (printf "redis.external.url = %q has no effect with redis.enabled = true: set redis.enabled = false, or remove it" $v.redis.external.url) }}
{{- end }}
{{- if and $v.redis.enabled $v.redis.external.cluster }}
{{- fail "redis.external.cluster = true has no effect with redis.enabled = true: set redis.enabled = false, or remove it" }}
{{- end }}
{{- range $key := ternary (list "externalRedis" "externalRedisPorts") (list "redisFrom") $v.redis.enabled }}
{{- with index $v.networkPolicy $key }}
{{- fail (printf "networkPolicy.%s = %s has no effect with redis.enabled = %t: set redis.enabled = %t, or remove it" $key (toJson .) $v.redis.enabled (not $v.redis.enabled)) }}
{{- end }}
{{- end }}
{{- if and $v.redis.usersSecret $v.redis.external.existingSecret }}
{{- fail (printf "redis.external.existingSecret = %q has no effect with redis.usersSecret = %q: remove one" $v.redis.external.existingSecret $v.redis.usersSecret) }}
{{- end }}
{{- if and $v.tls.redisSecret (not $v.redis.enabled) }}
{{- fail (printf "tls.redisSecret = %q has no effect with redis.enabled = false: use rediss:// in redis.external.url and redis.external.caSecret" $v.tls.redisSecret) }}
{{- end }}
{{- if and $v.redis.external.caSecret (not (hasPrefix "rediss://" $v.redis.external.url)) }}
{{- fail (printf "redis.external.caSecret = %q has no effect with redis.external.url = %q: use rediss://, or remove it" $v.redis.external.caSecret $v.redis.external.url) }}
{{- end }}
{{- if and (gt (int $v.trainer.nodes) 1) (ne $v.storage.runs.accessMode "ReadWriteMany") (not $v.storage.runs.existingClaim) }}
{{- fail (printf "trainer.nodes = %d write checkpoints to one volume: set storage.runs.accessMode = ReadWriteMany, or set storage.runs.existingClaim to one that several nodes can mount" (int $v.trainer.nodes)) }}
{{- end }}
{{- if and (eq $v.storage.runs.accessMode "ReadWriteOncePod") (not $v.storage.runs.existingClaim) (or (include "grpo.tracked" .) $v.web.runs) }}
{{- fail "storage.runs.accessMode = ReadWriteOncePod lets one pod mount the volume of the runs, but the trainer shares it with the tracker or the web console: use ReadWriteOnce or ReadWriteMany" }}
{{- end }}
{{- if and $v.interconnect.hostNetwork $v.networkPolicy.enabled (not $v.networkPolicy.nodeCIDRs) }}
{{- fail "interconnect.hostNetwork = true makes pods use the addresses of their nodes: list these in networkPolicy.nodeCIDRs, or set networkPolicy.enabled = false" }}
{{- end }}
{{- if and (eq $v.accelerator "none") (eq (dig "sync" "backend" "auto" $v.config) "nccl") }}
{{- fail "config.sync.backend = nccl needs GPUs, but accelerator = none: set gloo or auto" }}
{{- end }}
{{- if and (eq (include "grpo.weightsVolume" .) "true") (ne $v.storage.runs.accessMode "ReadWriteMany") (not $v.storage.runs.existingClaim) }}
{{- fail (printf "config.sync.backend = %s passes weights through the volume of the runs: set storage.runs.accessMode = ReadWriteMany, or set storage.runs.existingClaim to one that trainers and generators can mount" (dig "sync" "backend" "" $v.config)) }}
{{- end }}
{{- $parallel := int (dig "trainer" "sequence_parallel" 1 $v.config) }}
{{- $ranks := mul $v.trainer.nodes $v.trainer.ranksPerNode }}
{{- if and (include "grpo.whole" .) (mod $ranks $parallel) }}
{{- fail (printf "trainer.nodes x trainer.ranksPerNode = %d ranks cannot be divided into teams of config.trainer.sequence_parallel = %d ranks: set a multiple of it" $ranks $parallel) }}
{{- end }}
{{- if and (include "grpo.tracked" .) (eq (dig "env" "WANDB_MODE" "offline" $v.tracker) "online") (not $v.tracker.wandbSecret) }}
{{- fail "tracker.env.WANDB_MODE = online needs an API key: set tracker.wandbSecret to a Secret with it" }}
{{- end }}
{{- include "grpo.labelChecks" . }}
{{- include "grpo.modelChecks" . }}
{{- if include "grpo.whole" . }}{{ include "grpo.dataChecks" . }}{{ end }}
{{- include "grpo.numberChecks" . }}
{{- include "grpo.schedulingChecks" . }}
{{- include "grpo.roleChecks" . }}
{{- include "grpo.rewardChecks" . }}
{{- include "grpo.environmentChecks" . }}
{{- include "grpo.sandboxChecks" . }}
{{- include "grpo.clusterChecks" . }}
{{- if and $v.monitoring.rules (not (.Files.Get "files/alerts.yaml")) }}
{{- fail "monitoring.rules = true, but this chart has no files/alerts.yaml: set it to false" }}
{{- end }}
{{- if and $v.monitoring.dashboard (not (.Files.Get "files/dashboard.json")) }}
{{- fail "monitoring.dashboard = true, but this chart has no files/dashboard.json: set it to false" }}
{{- end }}
{{- end }}

{{- define "grpo.rewardChecks" -}}
{{- $v := .Values }}
{{- $folder := "/srv/grpo/rewards/" }}
{{- if and $v.rewards.files $v.rewards.existingConfigMap }}
{{- fail (printf "rewards.existingConfigMap = %q has no effect with rewards.files: remove one" $v.rewards.existingConfigMap) }}
{{- end }}
{{- if and (or $v.rewards.files $v.rewards.existingConfigMap) (not (contains "\"python\"" (toJson $v.config.verifiers))) }}
{{- fail "rewards.files and rewards.existingConfigMap have no effect without a verifier of kind python in config.verifiers: add it there, or remove them" }}
{{- end }}
{{- include "grpo.unnamedFileCheck" (dict "files" $v.rewards.files "by" $v.config.verifiers "value" "rewards.files" "where" "config.verifiers") }}
{{- if and $v.rewards.image $v.generator.image }}
{{- fail (printf "rewards.image = %q has no effect with generator.image = %q: remove one" $v.rewards.image $v.generator.image) }}
{{- end }}
{{- range $i, $verifier := $v.config.verifiers }}
{{- include "grpo.fileCheck" (dict "key" (printf "config.verifiers.%d.function" $i) "function" ($verifier.function | default "") "folder" $folder
    "files" $v.rewards.files "map" $v.rewards.existingConfigMap "value" "rewards.files") }}
{{- end }}
{{- if and $v.judge.enabled (not $v.judge.model) }}
{{- fail "judge.enabled = true needs judge.model: set a name on the hub, or a folder under /srv/grpo/models" }}
{{- end }}
{{- if and $v.judge.enabled (hasPrefix "/" $v.judge.model) (not $v.storage.models.enabled) }}
{{- fail (printf "judge.model = %q is on the volume of the models: set storage.models.enabled = true" $v.judge.model) }}
{{- end }}
{{- if and $v.judge.enabled (not (hasPrefix "/" $v.judge.model)) $v.networkPolicy.enabled (not $v.networkPolicy.internet) }}
{{- fail (printf "judge.model = %q must be downloaded, but networkPolicy.internet = false forbids it: set it to true, or use a folder on a volume" $v.judge.model) }}
{{- end }}
{{- end }}
