{{/* Further checks: the model, numbers of pods, environments, and what the cluster lacks. */}}

{{- define "grpo.modelChecks" -}}
{{- $v := .Values }}
{{- $path := $v.config.model.path | trim }}
{{- if not $path }}
{{- fail "config.model.path is empty: set a name on the hub, e.g. Qwen/Qwen3-0.6B, or a folder under /srv/grpo/models" }}
{{- end }}
{{- $mounted := list }}
{{- if $v.storage.models.enabled }}{{ $mounted = append $mounted "/srv/grpo/models" }}{{ end }}
{{- range list "generator" "trainer" }}
{{- range concat (index $v . "extraVolumeMounts" | default list) $v.podDefaults.extraVolumeMounts }}{{ $mounted = append $mounted .mountPath }}{{ end }}
{{- end }}
{{- $found := false }}
{{- range $mounted }}
{{- if or (eq $path .) (hasPrefix (printf "%s/" (trimSuffix "/" .)) $path) }}{{ $found = true }}{{ end }}
{{- end }}
{{- $image := or $v.generator.image $v.rewards.image $v.trainer.image }}
{{- if and (hasPrefix "/" $path) (not $found) (not $image) }}
{{- fail (printf "config.model.path = %q is on no volume of the pods: set storage.models.enabled = true for a folder under /srv/grpo/models, or mount it with podDefaults.extraVolumes and extraVolumeMounts" $path) }}
{{- end }}
{{- if and (not (hasPrefix "/" $path)) (not (regexMatch "^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$" $path)) }}
{{- fail (printf "config.model.path = %q is neither a name on the hub, which is owner/name, nor a folder, which begins with /: correct it" $path) }}
{{- end }}
{{- if and $v.preload.enabled (not $v.preload.repository) }}
{{- fail "preload.enabled = true needs preload.repository: set the model's name on the hub, e.g. Qwen/Qwen3-0.6B" }}
{{- end }}
{{- if and $v.preload.enabled (not $v.storage.models.enabled) }}
{{- fail "preload.enabled = true needs a volume for the model: set storage.models.enabled = true" }}
{{- end }}
{{- if and $v.preload.enabled (not (hasPrefix "/srv/grpo/models/" $v.config.model.path)) }}
{{- fail (printf "preload.enabled = true downloads to config.model.path = %q, which is not on the volume: set a folder under /srv/grpo/models/" $v.config.model.path) }}
{{- end }}
{{- if and (not $v.networkPolicy.internet) $v.networkPolicy.enabled (or $v.preload.enabled (not (include "grpo.modelFolder" .))) }}
{{- fail (printf "config.model.path = %q must be downloaded, but networkPolicy.internet = false forbids it: set it to true, or use a folder on a volume" $v.config.model.path) }}
{{- end }}
{{- if and (include "grpo.hubData" .) $v.networkPolicy.enabled (not $v.networkPolicy.internet) }}
{{- fail "config.data.sources or config.evaluation.sources names a dataset on the hub (hf://), but networkPolicy.internet = false forbids its download: set it to true, or put the files on a volume (storage.data)" }}
{{- end }}
{{- end }}

{{/* Files of prompts must be on a volume of dataprep's pods, or in its image. */}}
{{- define "grpo.dataChecks" -}}
{{- $v := .Values }}
{{- $mounted := list }}
{{- if $v.storage.data.existingClaim }}{{ $mounted = append $mounted "/srv/grpo/data" }}{{ end }}
{{- range concat ($v.dataprep.extraVolumeMounts | default list) ($v.podDefaults.extraVolumeMounts | default list) }}{{ $mounted = append $mounted .mountPath }}{{ end }}
{{- $image := or $v.dataprep.image $v.environment.image }}
{{- range $section, $sources := dict "data" (dig "data" "sources" list $v.config) "evaluation" (dig "evaluation" "sources" list $v.config) }}
{{- range $i, $source := $sources }}
{{- $path := toString ($source.path | default "") }}
{{- $found := or (not $path) (hasPrefix "hf://" $path) $image }}
{{- range $mounted }}{{ if hasPrefix (printf "%s/" (trimSuffix "/" .)) $path }}{{ $found = true }}{{ end }}{{ end }}
{{- if not $found }}
{{- fail (printf "config.%s.sources.%d.path = %q is on no volume of the pods: put the file on one, set storage.data.existingClaim to it and write /srv/grpo/data/…, or name a dataset on the hub (hf://…)" $section $i $path) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "grpo.numberChecks" -}}
{{- $v := .Values }}
{{- if and (eq $v.generator.autoscaling.kind "hpa") (not $v.generator.autoscaling.metrics) }}
{{- fail "generator.autoscaling.kind = hpa needs generator.autoscaling.metrics: set them, or use keda" }}
{{- end }}
{{- if gt (int $v.generator.autoscaling.minReplicas) (int $v.generator.autoscaling.maxReplicas) }}
{{- fail (printf "generator.autoscaling.minReplicas = %d exceeds generator.autoscaling.maxReplicas = %d: swap them" (int $v.generator.autoscaling.minReplicas) (int $v.generator.autoscaling.maxReplicas)) }}
{{- end }}
{{- if and (eq $v.generator.autoscaling.kind "hpa") (lt (int $v.generator.autoscaling.minReplicas) 1) }}
{{- fail "generator.autoscaling.minReplicas = 0 needs generator.autoscaling.kind = keda: set at least 1" }}
{{- end }}
{{- if and (eq $v.generator.autoscaling.kind "keda") (lt (int $v.generator.autoscaling.minReplicas) 1) }}
{{- $seen := false }}
{{- range (dig "data" "sources" list $v.config) }}{{ if not .environment }}{{ $seen = true }}{{ end }}{{ end }}
{{- if not $seen }}
{{- fail "generator.autoscaling.minReplicas = 0 would never start a generator, since all of config.data.sources name an environment and KEDA does not see the tickets of environments: set at least 1" }}
{{- end }}
{{- end }}
{{- if and (ne (int $v.generator.replicas) 1) (include "grpo.autoscaled" .) }}
{{- fail (printf "generator.replicas = %d has no effect with generator.autoscaling.kind = %s, which begins with minReplicas: remove it" (int $v.generator.replicas) $v.generator.autoscaling.kind) }}
{{- end }}
{{- if and (ne (int $v.generator.replicas) 1) (not (include "grpo.scaled" .)) }}
{{- fail (printf "generator.replicas = %d has no effect with scaler.enabled = false, since no manifest names the number: use kubectl scale after the install, or enable the scaler" (int $v.generator.replicas)) }}
{{- end }}
{{- end }}

{{- define "grpo.schedulingChecks" -}}
{{- $v := .Values }}
{{- $scheduler := $v.trainer.schedulerName | default $v.podDefaults.schedulerName }}
{{- if and (has $v.trainer.gang (list "coscheduling" "volcano")) (not $scheduler) }}
{{- fail (printf "trainer.gang = %s needs a scheduler of its own: name it in trainer.schedulerName" $v.trainer.gang) }}
{{- end }}
{{- if and (ne $v.trainer.gang "none") $v.kueue.queue }}
{{- fail (printf "trainer.gang = %s has no effect with kueue.queue = %q, which admits the trainer as a whole: remove one" $v.trainer.gang $v.kueue.queue) }}
{{- end }}
{{- if and $v.kueue.queue (eq $v.trainer.kind "StatefulSet") (gt (int $v.trainer.nodes) 1) (include "grpo.scaled" .) }}
{{- fail (printf "kueue.queue = %q would admit one pod of trainer.nodes = %d, since the scaler sets the number only after Kueue has seen the StatefulSet: set trainer.kind = LeaderWorkerSet, which Kueue admits as a whole" $v.kueue.queue (int $v.trainer.nodes)) }}
{{- end }}
{{- if and $v.kueue.priorityClass (not $v.kueue.queue) }}
{{- fail (printf "kueue.priorityClass = %q has no effect without kueue.queue: name the LocalQueue, or remove it" $v.kueue.priorityClass) }}
{{- end }}
{{- if and (eq $v.trainer.kind "LeaderWorkerSet") $v.trainer.strategy }}
{{- fail "trainer.strategy has no effect with trainer.kind = LeaderWorkerSet, which replaces all pods at once: remove it" }}
{{- end }}
{{- if and (eq $v.devices.kind "claim") (ne $v.accelerator "nvidia") }}
{{- fail (printf "devices.kind = claim claims GPUs, but accelerator = %s: set nvidia, or plugin" $v.accelerator) }}
{{- end }}
{{- if and (eq $v.devices.kind "plugin") (or $v.devices.nicClass $v.devices.gpuSelectors) }}
{{- fail "devices.nicClass and devices.gpuSelectors have no effect with devices.kind = plugin: set claim, or remove them" }}
{{- end }}
{{- if and $v.devices.nicClass $v.interconnect.rdma.resource }}
{{- fail (printf "devices.nicClass = %q and interconnect.rdma.resource = %q ask for the same NICs: remove one" $v.devices.nicClass $v.interconnect.rdma.resource) }}
{{- end }}
{{- end }}

{{- define "grpo.roleChecks" -}}
{{- $v := .Values }}
{{- if not (include "grpo.whole" .) }}
{{- if $v.redis.enabled }}
{{- fail "role = generators joins the run of another release: set redis.enabled = false and redis.external.url to that run's Redis" }}
{{- end }}
{{- if not (dig "run" "name" "" $v.config) }}
{{- fail (printf "role = generators needs config.run.name, the name of the run to join: without it, it would be %q, the name of this release" .Release.Name) }}
{{- end }}
{{- if ne (dig "sync" "backend" "auto" $v.config) "store" }}
{{- fail (printf "role = generators has no network to the trainer: set config.sync.backend = store, as in the run's own release, instead of %s" (dig "sync" "backend" "auto" $v.config)) }}
{{- end }}
{{- if and (eq (include "grpo.weightsVolume" .) "true") (not $v.storage.runs.existingClaim) }}
{{- fail (printf "config.sync.folder = %q is on the volume of the runs, which belongs to another release: set storage.runs.existingClaim to it, or use a bucket" (dig "sync" "folder" "" $v.config)) }}
{{- end }}
{{- if ne (int $v.generator.replicas) 1 }}
{{- fail (printf "generator.replicas = %d has no effect with role = generators, since the scaler belongs to the run's own release: use kubectl scale" (int $v.generator.replicas)) }}
{{- end }}
{{- range $section := list "web" "judge" }}
{{- if (index $v $section).enabled }}
{{- fail (printf "%s.enabled = true has no effect with role = generators: enable it in the run's own release" $section) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The file that a function names must be in the values. Takes key, function, folder, files, map and value. */}}
{{- define "grpo.fileCheck" -}}
{{- $file := regexFind "^.+\\.py:" .function | trimSuffix ":" }}
{{- if and $file (not (hasPrefix "/" $file)) }}
{{- fail (printf "%s = %q: put the file into %s and write %s%s" .key .function .value .folder .function) }}
{{- end }}
{{- if and (hasPrefix .folder $file) (not .map) (not (hasKey .files (trimPrefix .folder $file))) }}
{{- fail (printf "%s = %q: %s has no %q: add it" .key .function .value (trimPrefix .folder $file)) }}
{{- end }}
{{- end }}

{{/* Each code file must be mentioned by an entry of `by` or by another file. Takes files, by, value and where. */}}
{{- define "grpo.unnamedFileCheck" -}}
{{- range $name := keys .files | sortAlpha }}
{{- $mentions := printf "%s %s" (toJson $.by) (toJson (omit $.files $name)) }}
{{- if and (hasSuffix ".py" $name) (not (regexMatch (printf "\\b%s\\b" (regexQuoteMeta (trimSuffix ".py" $name))) $mentions)) }}
{{- fail (printf "%s has %q, which has no effect, since no function of %s names it: name it there, or remove it" $.value $name $.where) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "grpo.environmentChecks" -}}
{{- $v := .Values }}
{{- if and $v.environment.files $v.environment.existingConfigMap }}
{{- fail (printf "environment.existingConfigMap = %q has no effect with environment.files: remove one" $v.environment.existingConfigMap) }}
{{- end }}
{{- if and (not $v.config.environments) (or $v.environment.files $v.environment.existingConfigMap) }}
{{- fail "environment.files and environment.existingConfigMap have no effect without config.environments: add the environment there, or remove them" }}
{{- end }}
{{- include "grpo.unnamedFileCheck" (dict "files" $v.environment.files "by" $v.config.environments "value" "environment.files" "where" "config.environments") }}
{{- range $i, $environment := $v.config.environments }}
{{- include "grpo.fileCheck" (dict "key" (printf "config.environments.%d.function" $i) "function" ($environment.function | default "")
    "folder" "/srv/grpo/environments/" "files" $v.environment.files "map" $v.environment.existingConfigMap "value" "environment.files") }}
{{- end }}
{{- if and $v.config.environments (not (include "grpo.modelFolder" .)) $v.networkPolicy.enabled (not (and $v.environment.internet $v.networkPolicy.internet)) }}
{{- fail (printf "environments tokenize with config.model.path = %q, which their pods must download: set environment.internet = true, or use a folder on a volume (preload)" $v.config.model.path) }}
{{- end }}
{{- end }}

{{- define "grpo.sandboxChecks" -}}
{{- $v := .Values }}
{{- if and $v.sandbox.warmPool (not $v.config.environments) }}
{{- fail (printf "sandbox.warmPool = %s has no effect without config.environments, whose policy calls the tool python: add one, or remove it" $v.sandbox.warmPool) }}
{{- end }}
{{- if and $v.sandbox.namespace (not $v.sandbox.warmPool) }}
{{- fail (printf "sandbox.namespace = %s has no effect without sandbox.warmPool: set it, or remove the namespace" $v.sandbox.namespace) }}
{{- end }}
{{- end }}

{{/* Kinds of other operators that the values need must exist in the cluster. Without a cluster (helm template), this is unknown. */}}
{{- define "grpo.clusterChecks" -}}
{{- $v := .Values }}
{{- if and (or $v.web.ingress.enabled $v.web.route.enabled) (not $v.web.enabled) }}
{{- fail "web.ingress and web.route have no effect with web.enabled = false: set it to true" }}
{{- end }}
{{- if and (or $v.web.ingress.enabled $v.web.route.enabled) $v.networkPolicy.enabled (not $v.networkPolicy.apiFrom) }}
{{- fail "web.ingress and web.route: the ingress controller or gateway may not connect to the page; list its pods in networkPolicy.apiFrom" }}
{{- end }}
{{- if and $v.web.route.enabled (not $v.web.route.parentRefs) }}
{{- fail "web.route.enabled = true needs web.route.parentRefs: name the Gateway" }}
{{- end }}
{{- $wanted := dict }}
{{- if eq $v.trainer.kind "LeaderWorkerSet" }}{{ $_ := set $wanted "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet" "trainer.kind = LeaderWorkerSet needs the LeaderWorkerSet controller" }}{{ end }}
{{- if and $v.kueue.queue (not ($.Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta2/LocalQueue")) }}
{{- $_ := set $wanted "kueue.x-k8s.io/v1beta1/LocalQueue" (printf "kueue.queue = %q needs Kueue" $v.kueue.queue) }}
{{- end }}
{{- if eq $v.devices.kind "claim" }}{{ $_ := set $wanted "resource.k8s.io/v1/ResourceClaimTemplate" "devices.kind = claim needs Kubernetes 1.34" }}{{ end }}
{{- with get (dict "kubernetes" "scheduling.k8s.io/v1beta1/PodGroup" "coscheduling" "scheduling.x-k8s.io/v1alpha1/PodGroup" "volcano" "scheduling.volcano.sh/v1beta1/PodGroup") $v.trainer.gang }}
{{- $_ := set $wanted . (printf "trainer.gang = %s needs its scheduler" $v.trainer.gang) }}
{{- end }}
{{- if $v.monitoring.podMonitor }}{{ $_ := set $wanted "monitoring.coreos.com/v1/PodMonitor" "monitoring.podMonitor = true needs the Prometheus operator" }}{{ end }}
{{- if $v.monitoring.rules }}{{ $_ := set $wanted "monitoring.coreos.com/v1/PrometheusRule" "monitoring.rules = true needs the Prometheus operator" }}{{ end }}
{{- if $v.tls.issuer.name }}{{ $_ := set $wanted "cert-manager.io/v1/Certificate" (printf "tls.issuer.name = %q needs cert-manager" $v.tls.issuer.name) }}{{ end }}
{{- if eq $v.generator.autoscaling.kind "keda" }}{{ $_ := set $wanted "keda.sh/v1alpha1/ScaledObject" "generator.autoscaling.kind = keda needs KEDA" }}{{ end }}
{{- if $v.web.route.enabled }}{{ $_ := set $wanted "gateway.networking.k8s.io/v1/HTTPRoute" "web.route.enabled = true needs the Gateway API" }}{{ end }}
{{- /* The list is empty in a namespace that --create-namespace is about to create, and absent without a cluster. */}}
{{- if and $wanted (lookup "v1" "ServiceAccount" .Release.Namespace "") }}
{{- range $kind, $why := $wanted }}
{{- if not ($.Capabilities.APIVersions.Has $kind) }}
{{- fail (printf "%s, but this cluster has no kind %s: install it first, or remove the value" $why (base $kind)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The labels that select pods are reserved for the chart. */}}
{{- define "grpo.labelChecks" -}}
{{- $own := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" }}
{{- $labels := dict "commonLabels" .Values.commonLabels }}
{{- range $section, $values := .Values }}
{{- if kindIs "map" $values }}
{{- $_ := set $labels (printf "%s.podLabels" $section) ($values.podLabels | default dict) }}
{{- end }}
{{- end }}
{{- range $key, $given := $labels }}
{{- range $label := $own }}
{{- if hasKey $given $label }}
{{- fail (printf "%s sets %s = %q, by which the chart selects its pods: use another label" $key $label (get $given $label)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
