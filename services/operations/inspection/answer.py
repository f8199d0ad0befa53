"""The base class of answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, dataclass_transform

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

MAX_PAGE = 500


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Answer:
    """Base of all answers. They are dataclasses: endpoints turn them into models, and commands need no pydantic.

    Their fields are immutable, and the fields' docstrings document the endpoints.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        from services.config.docstrings import described

        return described(cls, core_schema, handler)
