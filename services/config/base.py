"""The base class of all configuration sections: strict validation, and docstrings that serve as help text."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the configuration file. It rejects unknown keys, and its values cannot change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
