"""Messages of a chat as chat templates read them."""

from __future__ import annotations

import json


def plain(message: dict) -> dict:
    """A message as templates read it: content as one text, and the arguments of tool calls as JSON's values.

    Raises ValueError for content that is not text, and arguments that are not JSON.
    """
    calls = message.get("tool_calls") or []
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError(f"tool_calls must be a list of objects, got {calls!r}")
        message = message | {"tool_calls": [_plain_call(call) for call in calls]}
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
        raise ValueError("message content must be text; images, audio and the like are not supported")
    return {**message, "content": "".join(str(part.get("text", "")) for part in content)}


def _plain_call(call: dict) -> dict:
    call = {key: value for key, value in call.items() if key != "index"}  # streams have it
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"] or "{}")}}
    except ValueError as error:
        raise ValueError(f"the arguments of a tool call are not JSON: {function['arguments']!r}") from error
