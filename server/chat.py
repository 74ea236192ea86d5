"""Chat: a conversation's way to token ids, and its answers' way to messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..agents import FORMATS, ToolFormat, conversation_keys, function_of, next_key, plain
from ..engine import Completion, RequestOutput, StructuredOutputsParams
from .service import Service


@dataclass
class _Answer:
    """A choice so far. told: characters of its text that the client knows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    told: int = 0


@dataclass
class Conversation:
    """The messages of a call, and its answers so far, whole or piece by piece.

    template: what the chat template gets beside the messages, `tools` among it. tools: how calls are written; None:
    they stay text. kept: whether ids of answers are kept for the next turn, and those of earlier turns used.
    cache_salt: shuts them off from calls with another one, as it does their KV. keys: `conversation_keys`, once the
    prompt is known.
    """

    server: Service
    messages: list[dict]
    template: dict[str, Any]
    tools: ToolFormat | None
    cache_salt: str | None
    kept: bool
    streamed: bool
    keys: list[bytes] = field(default_factory=list)
    answers: dict[int, _Answer] = field(default_factory=dict)

    async def prompt_ids(self) -> list[int]:
        """The prompt: an answer that was generated here with the ids that were sampled, the rest encoded."""
        tokenization = self.server.engine.tokenization
        self.messages = [plain(message) for message in self.messages]
        if self.kept:
            context = [self.template, self.cache_salt]
            self.keys = await tokenization.in_thread(conversation_keys, context, self.messages)
        known = self.server.kept.find(self.keys)
        return await tokenization.in_thread(tokenization.chat, self.messages, known, **self.template)

    def forced_call(self, choice: str | dict) -> StructuredOutputsParams:
        """The grammar of an answer that calls one of the tools, or the one that is named."""
        given = [tool for tool in self.template["tools"] or [] if isinstance(function_of(tool).get("name"), str)]
        if isinstance(choice, dict):
            given = [tool for tool in given if function_of(tool)["name"] == function_of(choice).get("name")]
        if not given:
            raise ValueError(f"tool_choice {choice!r} needs that tool among `tools`")
        if self.tools is None:
            raise ValueError(
                f"tool_choice {choice!r} needs to know how this model writes calls, which its chat template doesn't "
                f"tell; if it is one of these, start the server with --tool-parser {' | '.join(FORMATS)}"
            )
        added = self.server.engine.tokenization.need("tool_choice").added_tokens_decoder
        return self.tools.forced(given, {str(token): i for i, token in added.items() if token.special})

    def take(self, index: int, output: RequestOutput, c: Completion) -> dict[str, Any]:
        """Return what is new of a choice: the message or delta, and its finish_reason.

        The choice's `text` is the raw text, where calls were found in it. A message that ends with EOS or for its
        length is kept, with its ids, for the next turn.
        """
        role = {} if self.streamed and index in self.answers else {"role": "assistant"}
        answer = self.answers.setdefault(index, _Answer())
        answer.text += c.text or ""
        answer.token_ids += c.token_ids
        shown, calls = self._shown(answer, c.finish_reason is not None)
        message: dict[str, Any] = {**role, "content": answer.text[answer.told : shown]}
        answer.told = shown
        reason = c.finish_reason
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [{"index": i, **call} if self.streamed else call for i, call in enumerate(calls)]
            reason = "tool_calls" if reason == "stop" else reason
        if self.kept and (c.finish_reason == "length" or (c.finish_reason == "stop" and c.stop_reason is None)):
            said = plain({"role": "assistant", "content": answer.text[:shown], "tool_calls": calls})
            self.server.kept.add(next_key(self.keys[-1], said), output.prompt_token_ids + answer.token_ids)
        found = {"delta" if self.streamed else "message": message, "finish_reason": reason}
        return found | ({"text": answer.text} if calls else {})

    def _shown(self, answer: _Answer, finished: bool) -> tuple[int, list[dict]]:
        """The characters of the text that are content, and the calls that follow it."""
        if self.tools is None:
            return len(answer.text), []
        if not finished:
            return max(answer.told, self.tools.visible(answer.text)), []
        before, calls = self.tools.parse(answer.text, self.template["tools"] or ())
        return max(answer.told, len(before)), calls
