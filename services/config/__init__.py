"""The configuration of a run: one frozen model.

Guarantees: a configuration that loads is complete and consistent; every key is documented (its docstring is the help
text) and is read somewhere; an unknown key, a wrong value, an invalid combination or a key that has no effect given the
others raises a `ConfigError` that names the key, the value and the remedy.
"""

from services.config.load import ConfigError, defining, digest, load, load_resolved, to_toml
from services.config.root import RunConfig

__all__ = ["ConfigError", "RunConfig", "defining", "digest", "load", "load_resolved", "to_toml"]
