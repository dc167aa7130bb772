"""The base of every configuration object: frozen, no unknown keys, errors that name the key and its nearest neighbour."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from moonlet.errors import ConfigError, nearest_name


class Strict(BaseModel):
    """A frozen record that refuses unknown keys. Build it with `parse`, which raises `ConfigError`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), coerce_numbers_to_str=True
    )

    @classmethod
    def parse(cls, values: dict[str, Any], where: str = "") -> Self:
        """Validate `values`; `where` names their origin in error messages.

        Raises:
            ConfigError: one line for each missing, unknown or wrong key.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(describe_validation_error(cls, error, where)) from None


def describe_validation_error(root: type[BaseModel], error: ValidationError, where: str) -> str:
    lines = [_describe_one(root, dict(item)) for item in error.errors()]
    head = f"{where}: " if where else ""
    return head + "; ".join(lines)


def _describe_one(root: type[BaseModel], item: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    match item["type"]:
        case "missing":
            return f"missing key '{key}'"
        case "extra_forbidden":
            known = _fields_at(root, item["loc"][:-1])
            return f"unknown key '{key}'{nearest_name(str(item['loc'][-1]), known)}"
        case _:
            return (
                f"key '{key}': {item['msg']} (got {item['input']!r})"
                if key
                else item["msg"].removeprefix("Value error, ")
            )


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Field names of the nested model that `path` leads to."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        field = getattr(current, "model_fields", {}).get(part)
        current = _model_in(field.annotation) if field else None
    return list(getattr(current, "model_fields", {}))


def _model_in(annotation: Any) -> Any:
    """The model class inside `list[Model]`, `Model | None` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _model_in(inner)) is not None:
            return found
    return None
