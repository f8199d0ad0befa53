{{/* Further refusals: the model, numbers of pods, environments, and what the cluster lacks. */}}

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
{{- if and $v.preload.enabled (not $v.storage.models.enabled) }}
{{- fail "preload.enabled = true needs a volume for the model: set storage.models.enabled = true" }}
{{- end }}
{{- if and $v.preload.enabled (not (hasPrefix "/srv/grpo/models/" $v.config.model.path)) }}
{{- fail (printf "preload.enabled = true downloads to config.model.path = %q, which is not on the volume: set a folder under /srv/grpo/models/" $v.config.model.path) }}
{{- end }}
{{- if and (not $v.networkPolicy.internet) $v.networkPolicy.enabled (or $v.preload.enabled (not (include "grpo.modelFolder" .))) }}
{{- fail (printf "config.model.path = %q must be downloaded, but networkPolicy.internet = false forbids it: set it to true, or use a folder on a volume" $v.config.model.path) }}
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
{{- if and (ne (int $v.generator.replicas) 1) (include "grpo.autoscaled" .) }}
{{- fail (printf "generator.replicas = %d has no effect with generator.autoscaling.kind = %s, which begins with minReplicas: remove it" (int $v.generator.replicas) $v.generator.autoscaling.kind) }}
{{- end }}
{{- if and (ne (int $v.generator.replicas) 1) (not (include "grpo.scaled" .)) }}
{{- fail (printf "generator.replicas = %d has no effect with scaler.enabled = false, since no manifest names the number: use kubectl scale after the install, or enable the scaler" (int $v.generator.replicas)) }}
{{- end }}
{{- end }}

{{/* The file that a function names is in the values. Takes key, function, folder, files, map and value. */}}
{{- define "grpo.fileCheck" -}}
{{- $file := regexFind "^.+\\.py:" .function | trimSuffix ":" }}
{{- if and $file (not (hasPrefix "/" $file)) }}
{{- fail (printf "%s = %q: put the file into %s and write %s%s" .key .function .value .folder .function) }}
{{- end }}
{{- if and (hasPrefix .folder $file) (not .map) (not (hasKey .files (trimPrefix .folder $file))) }}
{{- fail (printf "%s = %q: %s has no %q: add it" .key .function .value (trimPrefix .folder $file)) }}
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
{{- range $i, $environment := $v.config.environments }}
{{- include "grpo.fileCheck" (dict "key" (printf "config.environments.%d.function" $i) "function" ($environment.function | default "")
    "folder" "/srv/grpo/environments/" "files" $v.environment.files "map" $v.environment.existingConfigMap "value" "environment.files") }}
{{- end }}
{{- if and $v.config.environments (not (include "grpo.modelFolder" .)) $v.networkPolicy.enabled (not (and $v.environment.internet $v.networkPolicy.internet)) }}
{{- fail (printf "environments tokenize with config.model.path = %q, which their pods must download: set environment.internet = true, or use a folder on a volume (preload)" $v.config.model.path) }}
{{- end }}
{{- end }}

{{/* Kinds of others' operators that the values ask for and this cluster lacks. Without a cluster (helm template) nothing is known. */}}
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
{{- if $v.monitoring.podMonitor }}{{ $_ := set $wanted "monitoring.coreos.com/v1/PodMonitor" "monitoring.podMonitor = true needs the Prometheus operator" }}{{ end }}
{{- if $v.monitoring.rules }}{{ $_ := set $wanted "monitoring.coreos.com/v1/PrometheusRule" "monitoring.rules = true needs the Prometheus operator" }}{{ end }}
{{- if $v.tls.issuer.name }}{{ $_ := set $wanted "cert-manager.io/v1/Certificate" (printf "tls.issuer.name = %q needs cert-manager" $v.tls.issuer.name) }}{{ end }}
{{- if eq $v.generator.autoscaling.kind "keda" }}{{ $_ := set $wanted "keda.sh/v1alpha1/ScaledObject" "generator.autoscaling.kind = keda needs KEDA" }}{{ end }}
{{- if $v.web.route.enabled }}{{ $_ := set $wanted "gateway.networking.k8s.io/v1/HTTPRoute" "web.route.enabled = true needs the Gateway API" }}{{ end }}
{{- if and $wanted (lookup "v1" "Namespace" "" .Release.Namespace) }}
{{- range $kind, $why := $wanted }}
{{- if not ($.Capabilities.APIVersions.Has $kind) }}
{{- fail (printf "%s, but this cluster has no kind %s: install it first, or remove the value" $why (base $kind)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
