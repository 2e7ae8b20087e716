"""/tokenize and /detokenize: how the other endpoints tokenise a text."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from zipage.errors import RequestError
from zipage.server.errors import bad_request
from zipage.server.prompts import chat_prompt
from zipage.server.protocol.system import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from zipage.server.serving import Serving


async def tokenize(
    serving: Serving, request: Request, body: TokenizeTextRequest | TokenizeChatRequest
) -> dict[str, Any]:
    """Token ids of a text or a conversation."""
    serving.accept(request, body)
    if isinstance(body, TokenizeChatRequest):
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        token_ids = (await chat_prompt(serving, body, tools)).token_ids
    else:
        special = body.add_special_tokens is not False
        try:
            token_ids = await serving.tokenizing(
                len(body.prompt),
                lambda tokenizer: serving.encode(tokenizer, body.prompt, special, "prompt"),
            )
        except RequestError as error:
            raise bad_request("prompt", str(error)) from None
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": serving.engine.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = serving.tokenizer.convert_ids_to_tokens(token_ids)
    return answer


async def detokenize(serving: Serving, request: Request, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    serving.accept(request, body)
    last = serving.engine.vocab_size - 1
    for token_id in body.tokens:
        if not 0 <= token_id <= last:
            message = f"token id {token_id} is not in the vocabulary, 0 to {last}"
            raise bad_request("tokens", message)

    def decode(tokenizer: Any) -> str:
        decoded = tokenizer.decode(
            body.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    return {"prompt": await serving.tokenizing(len(body.tokens), decode)}
