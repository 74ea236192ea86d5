"""A tiny model to talk to with tools: a template that writes calls as Qwen's does, and tools whose calls end soon."""

from transformers import AutoTokenizer

from helpers.serving import served_checkpoint

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tool(name: str, **properties) -> dict:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [tool("add", a={"enum": [1, 22]}, b={"type": "boolean"}), tool("now")]


def agent_checkpoint(checkpoint, folder, template: str = TEMPLATE):
    """A copy of a tiny checkpoint of 2,048 positions, with a tokenizer and the template."""
    path = served_checkpoint(checkpoint("llama", max_position_embeddings=2048), folder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path
