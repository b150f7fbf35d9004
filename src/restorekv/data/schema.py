"""What the JSON files of a data folder must hold, checked before anything computes with them; more
may be in them.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

Counts = dict[str, int]


class Entry(BaseModel):
    """An object of such a file: true is not a number, and other entries are allowed."""

    model_config = ConfigDict(strict=True, extra="allow")


class HubOrigin(Entry):
    """A dataset of the hub, at a commit."""

    hub: str
    revision: str


class FilesOrigin(Entry):
    """Files, each with its name and its SHA-256."""

    files: list[dict[str, str]]


def _discriminate_origin(value: Any) -> str:
    # A source comes from the hub or from files; which one decides how its entries are checked.
    if isinstance(value, dict) and "hub" in value:
        return "hub"
    return "files"


Origin = Annotated[
    Annotated[HubOrigin, Tag("hub")] | Annotated[FilesOrigin, Tag("files")],
    Discriminator(_discriminate_origin),
]


class SourceFile(Entry):
    """The file of a source's examples."""

    name: str
    sha256: str


class SourceAccount(Entry):
    """The examples of a source: how many, why others were dropped, and where they come from."""

    title: str
    examples: int = Field(ge=1)
    contexts: int
    licenses: Counts
    rows: int
    attempts: int
    dropped: Counts
    dropped_attempts: Counts
    origin: Origin = Field(alias="from")
    file: SourceFile


class Manifest(Entry):
    """The manifest of a complete folder."""

    mixture: str
    model: dict[str, Any]
    seed: int
    longest: int = Field(ge=1)
    sources: dict[str, SourceAccount]
    licenses: Counts

    @model_validator(mode="after")
    def check_names(self) -> Self:
        """Refuse names that the builder does not give, which might lead out of the folder."""
        for name, source in self.sources.items():
            if source.file.name != f"{name}.parquet":
                raise ValueError("a source's file has another name")
        return self


class BuildRecord(Entry):
    """What is being built."""

    config: dict[str, Any]
    sources: dict[str, dict[str, Any]]
    exclude: list[dict[str, Any]]
    model: dict[str, Any]


class AttemptLine(Entry):
    """A line of a source's answers so far: the context's name and hash, and what was asked about
    it.
    """

    context: list[str]
    attempts: list[dict[str, Any]]


def find_problem(kind: type[Entry], value: object) -> str | None:
    """Return what is wrong with a JSON value that should be of a kind, or None."""
    try:
        kind.model_validate(value)
    except ValidationError as error:
        # The first fault is enough: a user fixes one at a time.
        first = error.errors()[0]
        if first["type"] == "value_error":
            return str(first.get("ctx", {})["error"])
        if first["loc"]:
            return f"its {'.'.join(map(str, first['loc']))}"
        return "it is no object"
    return None
