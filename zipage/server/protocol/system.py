"""The endpoints around generation: models, tokens, health and version."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Tag

from zipage.server.protocol.chat import ChatTemplateFields
from zipage.server.protocol.sampling import RequestModel, TokenIds


class ModelCard(BaseModel):
    """A name of the served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "zipage"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """All names of the served model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeTextRequest(RequestModel):
    """A text to be encoded as /v1/completions would."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatTemplateFields):
    """A conversation to be encoded as /v1/chat/completions would."""

    return_token_strs: bool | None = None


def _kind(body: Any) -> str:
    return "<chat>" if isinstance(body, dict) and "messages" in body else "<text>"


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("<text>")] | Annotated[TokenizeChatRequest, Tag("<chat>")],
    Discriminator(_kind),
]


class TokenizeResponse(BaseModel):
    """Token ids of the text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Token ids to be decoded, special tokens included."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    """Their text."""

    prompt: str


class Health(BaseModel):
    """The server accepts requests."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """Zipage's version."""

    version: str
