"""What all sections of cluster.yaml have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _as_text(value: object) -> object:
    """A size may be a mere number of bytes."""
    return str(value) if type(value) is int else value


Size = Annotated[str, BeforeValidator(_as_text)]


class Section(BaseModel):
    """Knows its keys, and no others."""

    # Strict: of `max_num_seqs: yes` YAML makes True, and of that pydantic would make 1.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
