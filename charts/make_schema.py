"""Write charts/values.schema.json: the schema of values.yaml, with that of the configuration for `config`.

Run `python charts/make_schema.py`; a test checks that the file is up to date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from services.config import RunConfig

HERE = Path(__file__).parent
CHART_SETS = {
    "run": ("dir",), "redis": ("url", "password_file", "ca_file"),
    "sync": ("host",), "trainer": ("ranks",),
    "generator": ("count",), "fleet": ("scaling",), "api": (), "web": (),
}  # fmt: skip
"""Keys of the configuration that the chart sets itself. A section with an empty tuple is set entirely."""

Schema = dict[str, Any]

ANY_LIST: Schema = {"type": "array", "items": {"type": "object"}}
TEXT: Schema = {"type": "string"}
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"}
VOLUME: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(Mi|Gi|Ti|Pi|M|G|T|P)$"}
"""A volume's size: a number without a unit would mean bytes, which is never intended."""
AMOUNTS: Schema = {"type": "object", "additionalProperties": QUANTITY}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
SHARE: Schema = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"}

PROBE: Schema = {
    "type": "object", "additionalProperties": False,
    "properties": {
        name: {"type": "integer", "minimum": least} for name, least in {
            "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1, "successThreshold": 1, "initialDelaySeconds": 0,
            "terminationGracePeriodSeconds": 1,
        }.items()
    },
}  # fmt: skip

COMMON: dict[str, Schema] = {
    "resources": {
        "type": "object", "additionalProperties": False, "properties": {"requests": AMOUNTS, "limits": AMOUNTS},
    },
    "env": {"type": "object", "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}, "additionalProperties": TEXT},
    "podLabels": TEXTS, "podAnnotations": TEXTS, "nodeSelector": TEXTS,
    "tolerations": ANY_LIST, "affinity": {"type": "object"}, "metrics": ANY_LIST, "pullSecrets": ANY_LIST, "labels": TEXTS,
    "apiFrom": ANY_LIST, "redisFrom": ANY_LIST, "externalRedis": ANY_LIST, "externalRedisPorts": ANY_LIST,
    "apiServerPorts": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1, "maximum": 65535}},
    "nodeCIDRs": {"type": "array", "items": {"type": "string", "pattern": r"^[0-9a-fA-F.:]+/[0-9]+$"}},
    "size": QUANTITY, "sharedMemory": QUANTITY, "maxUnavailable": SHARE, "maxSurge": SHARE,
    "accessMode": {"enum": ["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]},
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    "files": {
        "type": "object", "propertyNames": {"pattern": r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"}, "additionalProperties": TEXT,
    },
    "egress": ANY_LIST, "extraEnv": ANY_LIST, "extraEnvFrom": ANY_LIST, "extraVolumes": ANY_LIST, "extraVolumeMounts": ANY_LIST,
    "initContainers": ANY_LIST, "topologySpreadConstraints": ANY_LIST, "parentRefs": ANY_LIST,
    "strategy": {"type": "object"}, "annotations": TEXTS, "commonLabels": TEXTS, "hostnames": {"type": "array", "items": TEXT},
    "tmpSize": {"anyOf": [{"const": ""}, QUANTITY]}, "progressDeadlineSeconds": {"type": "integer", "minimum": 0},
    "startup": PROBE, "liveness": PROBE, "readiness": PROBE,
}  # fmt: skip
"""Schemas by name of the key, at any path."""

OF_PATH: dict[str, Schema] = {
    "accelerator": {"enum": ["nvidia", "none"]},
    "role": {"enum": ["run", "generators"]},
    "devices.kind": {"enum": ["plugin", "claim"]},
    "devices.gpuSelectors": {"type": "array", "items": TEXT},
    "trainer.kind": {"enum": ["StatefulSet", "LeaderWorkerSet"]},
    "trainer.gang": {"enum": ["none", "kubernetes", "coscheduling", "volcano"]},
    "apiPort": {"type": "integer", "minimum": 1024, "maximum": 65535},
    "clusterDomain": {"type": "string", "pattern": r"^[a-z0-9.-]+$"},
    "redis.size": VOLUME, "storage.runs.size": VOLUME, "storage.models.size": VOLUME,
    "generator.replicas": {"type": "integer", "minimum": 0},
    "tls.issuer.kind": {"enum": ["Issuer", "ClusterIssuer"]},
    "generator.autoscaling.kind": {"enum": ["none", "hpa", "keda"]},
    "generator.autoscaling.minReplicas": {"type": "integer", "minimum": 0},
    "preload.repository": {"type": "string"},
    "judge.args": {"type": "array", "items": TEXT},
    "judge.port": {"type": "integer", "minimum": 1024, "maximum": 65535},
    "redis.appendfsync": {"enum": ["always", "everysec"]},
    "redis.maxMemoryMiB": {"type": "integer", "minimum": 64},
    "redis.external.url": {"type": "string", "pattern": "^$|^rediss?://[^@/]+(/[0-9]+)?$"},
    "trainer.masterPort": {"type": "integer", "minimum": 1024, "maximum": 65535},
    "security.user": {"type": ["integer", "null"], "minimum": 1},
    "onFinish": {"enum": ["scaleToZero", "keep"]},
    "image.digests": {
        "type": "object", "propertyNames": {"enum": ["dataprep", "generator", "tracker", "trainer"]},
        "additionalProperties": {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
    },
}  # fmt: skip
"""Schemas by path, where the default value does not determine them."""

PODS = (
    "generator", "trainer", "dataprep", "environment", "judge", "tracker", "scaler",
    "web", "redis", "preload", "check", "smoke",
)  # fmt: skip
"""Sections of pods: each may set what podDefaults sets for all."""


def of_value(value: Any, path: tuple[str, ...]) -> Schema:
    """Return the schema for a default of values.yaml."""
    named = OF_PATH.get(".".join(path)) or COMMON.get(path[-1] if path else "")
    if named:
        return named
    if isinstance(value, dict):
        properties = {key: of_value(below, (*path, key)) for key, below in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer", "minimum": 1}
    assert isinstance(value, str), f"{'.'.join(path)} = {value!r} needs an entry in OF_PATH or COMMON"
    return TEXT


def of_config() -> tuple[Schema, dict[str, Schema]]:
    """Return the schema of `config`, and the definitions it refers to."""
    tree = RunConfig.model_json_schema(ref_template="#/$defs/{model}")
    definitions = tree.pop("$defs")
    for section, keys in CHART_SETS.items():
        if section not in tree["properties"]:
            continue
        if not keys:
            del tree["properties"][section]
            continue
        definition = definitions[tree["properties"][section]["$ref"].rpartition("/")[2]]
        for key in keys:
            del definition["properties"][key]
    tree, definitions = _plain(tree), _plain(definitions)
    referred = json.dumps([tree, definitions])
    return tree, {name: below for name, below in definitions.items() if f'"#/$defs/{name}"' in referred}


def _plain(tree: Any) -> Any:
    """Remove what only readers of the model need: defaults and titles. Restate unions by their kinds."""
    if isinstance(tree, dict):
        if "discriminator" in tree:
            return _by_kind(tree["discriminator"]["propertyName"], tree["discriminator"]["mapping"])
        kept = {key: _plain(below) for key, below in tree.items() if key != "default"}
        return {key: below for key, below in kept.items() if not (key == "title" and isinstance(below, str))}
    return [_plain(item) for item in tree] if isinstance(tree, list) else tree


def _by_kind(name: str, mapping: dict[str, str]) -> Schema:
    """Return a union as conditions: an error then names what is wrong with the kind that is meant, instead of all kinds."""
    meant = [
        {"if": {"required": [name], "properties": {name: {"const": kind}}}, "then": {"$ref": reference}}
        for kind, reference in mapping.items()
    ]
    properties = {name: {"enum": [*mapping]}}
    return {"type": "object", "required": [name], "properties": properties, "allOf": meant}


def make() -> str:
    """Return the file's text."""
    values = yaml.safe_load((HERE / "values.yaml").read_text(encoding="utf-8"))
    for pod in PODS:
        values[pod] = {**values["podDefaults"], **values[pod], "probes": values["podDefaults"]["probes"]}
    config, definitions = of_config()
    schema = of_value({key: value for key, value in values.items() if key != "config"}, ())
    schema["properties"]["config"] = config
    schema["properties"]["global"] = {"type": "object"}  # Helm's own
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "grpo", **schema, "$defs": definitions}
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    (HERE / "values.schema.json").write_text(make(), encoding="utf-8")
