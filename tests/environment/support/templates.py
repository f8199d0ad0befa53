"""Chat templates structured like those of well-known models, and a small tokenizer for each.

Each family has its own notation for tool calls. Among them are templates that drop past reasoning, trim, merge the system prompt
into a user message, require alternating roles, or end an assistant's turn with the next turn's header or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.chat.format import ChatFormat
from services.config.data import Data


@dataclass(frozen=True)
class Family:
    """A chat template and its properties."""

    name: str
    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    """Tokens that end an assistant's turn."""
    notation: str
    thinks: bool = False
    tools: bool = True
    system: bool = True
    prefix_space: bool = False
    strip: bool = False
    """Whether special tokens absorb the white space that follows them."""


_TOOLS = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
_HERMES_CALLS = (
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
CHATML = (
    "{% if tools %}<|im_start|>system\n" + _TOOLS + "Answer with <tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _HERMES_CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\\n') }}\n</think>\n\n{% endif %}"
    "{{ m.content.lstrip('\\n') }}" + _HERMES_CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_THINKING = QWEN3[: QWEN3.rindex("{% endif %}")] + "<think>\n\n</think>\n\n{% endif %}"
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if loop.first and tools %}" + _TOOLS + '{"name": function name, "parameters": dictionary}\n{% endif %}'
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}"
    "{% for m in rest %}{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('bad id') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ ' ' + m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if loop.first %}"
    + _TOOLS
    + "{% endif %}{{ m.content }}"
    + _HERMES_CALLS
    + "<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for call in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}\n```json\n"
    "{{ call.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    "<｜end▁of▁sentence｜>{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n" + _TOOLS + "{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}\n"
    "{% for key, value in call.function.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key>\n<arg_value>"
    "{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CODER = (
    "{% if tools %}<|im_start|>system\n"
    + _TOOLS
    + "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA4 = (
    "{{ bos_token }}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n{% if loop.first and tools %}" + _TOOLS
    + "[func_name1(params_name1=params_value1)]\n{% endif %}{% if m.tool_calls %}["
    "{% for call in m.tool_calls %}{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)  # fmt: skip
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"

_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_PIPE = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_HEADER = ("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_INST = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_WIDE = ("<s>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
FAMILIES = (
    Family("chatml", CHATML, _IM, ("<|im_end|>", "<|endoftext|>"), "hermes"),
    Family("qwen3", QWEN3, _IM, ("<|im_end|>",), "hermes", thinks=True),
    Family("qwen3_no_thinking", NO_THINKING, _IM, ("<|im_end|>",), "hermes", thinks=True),
    Family("llama3", LLAMA3, _HEADER, ("<|eot_id|>", "<|eom_id|>"), "llama3_json"),
    Family("mistral", MISTRAL, _INST, ("</s>",), "mistral"),
    Family("gemma", GEMMA, ("<s>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",), "hermes", tools=False, system=False),
    Family("phi", PHI, (*_PIPE, "<|tool|>", "<|end|>"), ("<|end|>",), "hermes", prefix_space=True, strip=True),
    Family("deepseek", DEEPSEEK, _WIDE, _WIDE[-1:], "deepseek", thinks=True),
    Family("glm", GLM, ("[gMASK]", "<sop>", *_PIPE), ("<|user|>", "<|observation|>"), "glm4"),
    Family("qwen3_coder", CODER, _IM, ("<|im_end|>",), "qwen3_coder"),
    Family("llama4", LLAMA4, ("<s>", "<|header_start|>", "<|header_end|>", "<|eot|>"), ("<|eot|>",), "pythonic"),
    Family("plain", PLAIN, ("</s>",), ("</s>",), "hermes", tools=False),
)


def data(**options: object) -> Data:
    """Return a configuration's section `data` with one source."""
    return Data.model_validate({"sources": [{"kind": "jsonl", "path": "none.jsonl"}], **options})


def save_family(family: Family, folder: Path) -> Path:
    """Write the family's tokenizer and template into a folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=family.prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the answer of the tool is what the user wants, so the assistant thinks again"], trainer)
    tokenizer.add_special_tokens([AddedToken(token, rstrip=family.strip, normalized=False) for token in family.special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": family.ends[0]} | ({"bos_token": "<s>"} if "<s>" in family.special else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(family.template)
    return folder


@cache
def chat_of(family: Family) -> ChatFormat:
    """Return the chat format of a family, created once per process."""
    folder = Path(mkdtemp(prefix=f"family-{family.name}-"))
    try:
        return ChatFormat(save_family(family, folder), data())
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
