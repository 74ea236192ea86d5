"""Chats and agents around an engine, without HTTP: messages, calls of tools, token ids kept over turns."""

from .kept_ids import KeptIds, conversation_keys, next_key
from .messages import plain
from .tools import FORMATS, ToolFormat, function_of, tool_format

__all__ = ["FORMATS", "KeptIds", "ToolFormat", "conversation_keys", "function_of", "next_key", "plain", "tool_format"]
