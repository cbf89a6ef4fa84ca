"""Bodies of requests that are made to cost a server much: as large as is allowed, of as many parts as fit.

Each is of the shape that an endpoint reads, except for what makes it a bomb.
"""

from __future__ import annotations

from dataclasses import dataclass

CHAT, TEXT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


@dataclass(frozen=True)
class Shape:
    """A body: ``head``, then as many of ``unit`` as fit, with commas between, then ``tail``.

    Attributes:
        path: The endpoint.
        unit: A ``%d`` in it becomes a number of seven digits, another one each time.
        comma: What is between two units.
    """

    name: str
    path: str
    head: bytes
    unit: bytes
    tail: bytes
    comma: bytes = b","

    def body(self, size: int, most: int | None = None) -> bytes:
        """The body, of at most ``size`` bytes and ``most`` units."""
        longest = len(self._unit(0)) + len(self.comma)
        count = (size - len(self.head) - len(self.tail)) // longest
        count = count if most is None else min(count, most)
        return self.head + self.comma.join(map(self._unit, range(count))) + self.tail

    def _unit(self, number: int) -> bytes:
        return self.unit % (1_000_000 + number) if b"%d" in self.unit else self.unit


NAMED = b'{"model":"bitnet-demo","max_tokens":1,'
SOUND = NAMED + b'"messages":[{"role":"user","content":"x"}],'
ASKING = b',{"role":"user","content":"x"}]}'
"""The end of a conversation whose earlier messages are the bomb."""
PARTS = NAMED + b'"messages":[{"role":"user","content":['
CALLS = NAMED + b'"messages":[{"role":"assistant","content":"","tool_calls":['
CALLED = CALLS + b'{"id":"c","type":"function","function":{"name":"f","arguments":"'
"""The beginning of one call, up to its arguments, which are JSON in a text."""
FUNCTION = SOUND + b'"tools":[{"type":"function","function":{"name":"f",'
SCHEMA = SOUND + b'"response_format":{"type":"json_schema","json_schema":{"schema":'
PROMPT = NAMED + b'"prompt":'

LISTS = [
    # What conversations and other inputs are made of: elements that are small, empty or wrong.
    Shape("messages that are objects", CHAT, NAMED + b'"messages":[', b"{}", b"]}"),
    Shape("messages that are lists", CHAT, NAMED + b'"messages":[', b"[]", b"]}"),
    Shape("messages that are numbers", CHAT, NAMED + b'"messages":[', b"1", b"]}"),
    Shape("messages that are null", CHAT, NAMED + b'"messages":[', b"null", b"]}"),
    Shape("messages that are texts", CHAT, NAMED + b'"messages":[', b'""', b"]}"),
    Shape("messages", CHAT, NAMED + b'"messages":[', b'{"role":"user","content":""}', b"]}"),
    Shape("messages of parts", CHAT, NAMED + b'"messages":[', b'{"role":"user","content":[{"text":"x"}]}', b"]}"),
    Shape("results", CHAT, NAMED + b'"messages":[', b'{"role":"tool","tool_call_id":"c","content":"x"}', b"]}"),
    Shape("calls", CHAT, CALLS, b'{"id":"c","function":{"name":"f","arguments":"{}"}}', b"]}" + ASKING),
    Shape("broken calls", CHAT, CALLS, b'{"id":"c","function":{"name":"f","arguments":"{"}}', b"]}" + ASKING),
    Shape("parts", CHAT, PARTS, b"{}", b"]}]}"),
    Shape("Anthropic's messages", ANTHROPIC, NAMED + b'"messages":[', b"{}", b"]}"),
    Shape("Anthropic's parts", ANTHROPIC, PARTS, b"{}", b"]}]}"),
    Shape("Anthropic's system", ANTHROPIC, SOUND + b'"system":[', b'{"type":"text","text":""}', b"]}"),
    Shape("input items", RESPONSES, NAMED + b'"input":[', b"{}", b"]}"),
    Shape("input messages", RESPONSES, NAMED + b'"input":[', b'{"role":"user","content":"x"}', b"]}"),
    Shape("Ollama's messages", "/api/chat", NAMED + b'"messages":[', b"{}", b"]}"),
    Shape("Ollama's stops", "/api/generate", PROMPT + b'"x","options":{"stop":[', b'"a"', b"]}}"),
    Shape("tokens to be read", "/detokenize", b'{"tokens":[', b"1", b"]}"),
    Shape("prompts of ids", TEXT, PROMPT + b"[", b"1", b"]}"),
    Shape("echo of ids", TEXT, NAMED + b'"echo":true,"prompt":[', b"1", b"]}"),
    Shape("prompts", TEXT, PROMPT + b"[", b'"x"', b"]}"),
    Shape("prompts of one id", TEXT, PROMPT + b"[", b"[1]", b"]}"),
    # A sound conversation with one more field.
    Shape("tools", CHAT, SOUND + b'"tools":[', b"{}", b"]}"),
    Shape("named tools", CHAT, SOUND + b'"tools":[', b'{"function":{"name":"f%d"}}', b"]}"),
    Shape("properties", CHAT, FUNCTION + b'"parameters":{"properties":{', b'"p%d":{}', b"}}}}]}"),
    Shape("stop token ids", CHAT, SOUND + b'"stop_token_ids":[', b"1", b"]}"),
    Shape("stops", CHAT, SOUND + b'"stop":[', b'"a"', b"]}"),
    Shape("biases", CHAT, SOUND + b'"logit_bias":{', b'"%d":1', b"}}"),
    Shape("choices", CHAT, SOUND + b'"structured_outputs":{"choice":[', b'"a"', b"]}}"),
    Shape("values of a schema", CHAT, SCHEMA + b'{"enum":[', b"1", b"]}}}}"),
    Shape("a field that nobody reads", CHAT, SOUND + b'"x":{', b'"y%d":{}', b"}}"),
    Shape("one name again and again", CHAT, SOUND + b'"x":{', b'"a":[]', b"}}"),
    Shape("long numbers", CHAT, SOUND + b'"x":[', b"1" * 4000, b"]}"),
    Shape("long fractions", CHAT, SOUND + b'"x":[', b"0." + b"1" * 760, b"]}"),
    Shape("a call of objects", CHAT, CALLED + b'{\\"a\\":[', b"{}", b']}"}}]}' + ASKING),
]
TEXTS = [
    Shape("escapes", CHAT, SOUND + b'"x":"', b'\\"', b'"}', b""),
    Shape("numbered escapes", CHAT, SOUND + b'"x":"', b"\\u4e2d", b'"}', b""),
    Shape("white space", CHAT, SOUND + b'"x":', b" ", b"1}", b""),
    Shape("nested lists", CHAT, SOUND + b'"x":', b"[", b"}", b""),
    Shape("closing brackets", CHAT, SOUND + b'"x":', b"]", b"}", b""),
    Shape("a prompt", TEXT, PROMPT + b'"', b"x ", b'"}', b""),
    Shape("a message", CHAT, NAMED + b'"messages":[{"role":"user","content":"', b"x ", b'"}]}', b""),
    Shape("a call of a text", CHAT, CALLED + b'{\\"a\\":\\"', b"x ", b'\\"}"}}]}' + ASKING, b""),
    Shape("a tool's description", CHAT, FUNCTION + b'"description":"', b"x ", b'"}}]}', b""),
]
SHAPES = {shape.name: shape for shape in (*LISTS, *TEXTS)}
