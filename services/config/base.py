"""The base class of all configuration sections: strict validation.

The docstrings of keys are help text, which `explain` reads from the source: pydantic would read it on every import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


class Section(BaseModel):
    """A table of the configuration file. It rejects unknown keys, and its values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, validate_default=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the section's JSON schema with the docstrings of its keys as descriptions."""
        from services.config.docstrings import described

        return described(cls, core_schema, handler)
